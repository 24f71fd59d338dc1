"""The options of Params as flags: their names, how their values are read, and messages that name them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from .params import GenerateParams, Params

HELP = {field.name: field.metadata["help"] for kind in (GenerateParams, Params) for field in fields(kind)}
DEFAULTS = {field.name: field.default for kind in (GenerateParams, Params) for field in fields(kind)}
OF_DRAFT = (
    "n_ctx_draft",
    "n_gpu_layers_draft",
    "devices_draft",
    "type_k_draft",
    "type_v_draft",
    "n_max",
    "n_min",
    "margin",
    "p_min",
    "fused_draft",
    "draft_vocab",
)
# In llama.cpp's words where it has them.
VALUES = {
    "n_ctx": ("-c", "--ctx-size"),
    "n_ctx_draft": ("-cd", "--ctx-size-draft"),
    "n_ubatch": ("-ub", "--ubatch-size"),
    "n_threads": ("-t", "--threads"),
    "n_gpu_layers": ("-ngl", "--gpu-layers"),
    "n_gpu_layers_draft": ("-ngld", "--gpu-layers-draft"),
    "devices": ("-dev", "--device"),
    "devices_draft": ("-devd", "--device-draft"),
    "split_mode": ("-sm", "--split-mode"),
    "main_gpu": ("-mg", "--main-gpu"),
    "tensor_split": ("-ts", "--tensor-split"),
    "flash_attn": ("-fa", "--flash-attn"),
    "type_k": ("-ctk", "--cache-type-k"),
    "type_v": ("-ctv", "--cache-type-v"),
    "type_k_draft": ("-ctkd", "--cache-type-k-draft"),
    "type_v_draft": ("-ctvd", "--cache-type-v-draft"),
    "cuda_graphs": ("--cuda-graphs",),
    "n_max": ("--n-max",),
    "n_min": ("--n-min",),
    "margin": ("--margin",),
    "p_min": ("--p-min",),
}
# Those that a flag turns from their default.
SWITCHES = {
    "use_mmap": ("--no-mmap",),
    "use_mlock": ("--mlock",),
    "kv_unified": ("-kvu", "--kv-unified"),
    "backend_argmax": ("--no-backend-argmax",),
    "fused_draft": ("--no-fused-draft",),
    "draft_vocab": ("--no-draft-vocab",),
}
_TURNED_OFF = {
    "use_mmap": "read the files into memory instead of mapping them",
    "backend_argmax": "read logits back and pick tokens on the host",
    "fused_draft": "run llama.cpp's own draft graph, the reference",
    "draft_vocab": "draft any token, whatever the draft's file lists",
}
# Of the commands that write a file.
_OF_A_FILE = {"overwrite=True": "--force", "strict=False": "no --strict", "recipe=": "--recipe="}
_METHODS = {r"save\(\)": "--save", r"run_many\(\)": "the batch command", r"devices\(\)": "the version command"}
_OF_THE_REPLY = {
    "max_tokens": "--n-predict",
    "stop": "--stop",
    "ignore_eos": "--ignore-eos",
    "n_parallel": "--parallel",
}


def _devices(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers; give one for each GPU, as 3,1") from None


_READ: dict[str, Any] = {
    "flash_attn": str,
    "cuda_graphs": str,
    "split_mode": str,
    "devices": _devices,
    "devices_draft": _devices,
    "tensor_split": _shares,
    "margin": float,
    "p_min": float,
}


def add_options(parser: Any, names: Iterable[str]) -> None:
    """Add a flag for each option; its default and its help are those of Params."""
    for name in names:
        if name in VALUES:
            kind = _READ.get(name, str if name.startswith("type_") else int)
            parser.add_argument(*VALUES[name], dest=name, type=kind, metavar="X", **described(name))
        else:
            text, default = in_flags(_TURNED_OFF.get(name, HELP[name])), DEFAULTS[name]
            flags = SWITCHES[name]
            parser.add_argument(*flags, dest=name, action="store_const", default=default, const=not default, help=text)


def described(name: str) -> dict[str, Any]:
    """Return an option's default and help as add_argument() takes them."""
    default = DEFAULTS[name]
    text = in_flags(HELP[name]) + ("" if default is None else f" (default: {default})")
    return {"default": default, "help": text.replace("%", "%%")}


def given(args: argparse.Namespace, names: Iterable[str], without_draft: bool = False) -> dict[str, Any]:
    """Return the values of options, but for those of a draft if there is none."""
    return {name: getattr(args, name) for name in names if not (without_draft and name in OF_DRAFT)}


def in_flags(message: str) -> str:
    """Name options in a message as they are given here: n_max=9 becomes --n-max=9."""
    for name, flags in SWITCHES.items():
        message = message.replace(f"{name}={not DEFAULTS[name]}", flags[-1])
        message = message.replace(f"{name}={DEFAULTS[name]}", f"no {flags[-1]}")
    for text, flag in {**_OF_A_FILE, **_METHODS}.items():
        message = re.sub(rf"(?<![\w./-]){text}", flag, message)
    names = {**{name: flags[-1] for name, flags in {**VALUES, **SWITCHES}.items()}, **_OF_THE_REPLY}
    # Not inside a path or a longer word; "stop", "devices" and "margin" are words of their own, so only before "=".
    for name, flag in names.items():
        end = r"(?![\w./-])" if "_" in name else r"(?==)"
        message = re.sub(rf"(?<![\w./-]){name}{end}", flag, message)
    return message
