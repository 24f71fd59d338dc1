"""The info and version commands: what a GGUF is, and what this build is."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from . import _cli_common as common
from . import _cli_memory, _cli_options
from .build import build_info, devices
from .errors import IncompatibleModelsError
from .model import Model, ModelInfo

INFO_EXAMPLES = """examples:
  pyllama-dflash info draft.gguf
  pyllama-dflash info draft.gguf --target target.gguf   # do the two belong together?
  pyllama-dflash info target.gguf --draft draft.gguf -c 32768 -ctk q8_0 -ctv q8_0   # what would they take?
"""
_KINDS = {
    "target": "target (an ordinary model)",
    "dflash": "DFlash draft",
    "dflash2": "DFlash2 draft",
    "other": "draft of a kind that is not run here",
}


def add_info_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of info."""
    parser.add_argument("file", help="a GGUF file; only its header is read")
    parser.add_argument("--target", help="say whether FILE is a draft for this target; exit code 1 if not")
    parser.add_argument("--draft", help="say whether this is a draft for FILE; exit code 1 if not")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.add_argument_group("options that the memory needed is estimated for")
    _cli_options.add_options(options, _cli_memory.OPTIONS)


def info(args: argparse.Namespace) -> int:
    """Describe a GGUF. Returns 1 if it does not belong to the file that was named beside it."""
    if args.target and args.draft:
        raise ValueError("give --target for a draft, or --draft for a target, not both")
    with Model.header(args.file) as model:
        facts = {
            "file": model.path,
            "architecture": model.meta("general.architecture"),
            "name": model.meta("general.name"),
            **asdict(model.info),
            "tensor_types": model.tensor_types,
        }
        reason = _mismatch(args.target or args.draft, model, args.draft is not None)
    if args.target or args.draft:
        role = "target" if args.target else "draft"
        facts.update({role: args.target or args.draft, "pairs": reason is None, "reason": reason})
    target, draft = (args.target, args.file) if model.info.is_draft else (args.file, args.draft)
    memory = None if reason else _cli_memory.estimate(args, target, draft)
    if args.json:
        common.print_json({**facts, "memory": memory})
        return 0 if reason is None else 1
    common.print_table(_rows(facts, model.info))
    if memory is not None:
        print(*_cli_memory.table(memory, is_draft=target is None), sep="\n")
    return 0 if reason is None else 1


def _mismatch(path: str | None, model: Model, is_draft: bool) -> str | None:
    if path is None:
        return None
    with Model.header(path) as other:
        target, draft = (model, other) if is_draft else (other, model)
        try:
            target.check_pair(draft)
        except IncompatibleModelsError as error:
            return str(error)
    return None


def _rows(facts: dict[str, Any], info: ModelInfo) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = [
        ("file", facts["file"]),
        ("kind", _KINDS[info.kind]),
        ("architecture", facts["architecture"]),
        ("name", facts["name"] or "-"),
        ("size", f"{info.n_params / 1e6:.1f} M parameters, {info.n_bytes / 1e6:.1f} MB"),
        ("layers", f"{info.n_layer} of width {info.n_embd}"),
        ("vocabulary", f"{info.n_vocab} tokens"),
        ("trained context", f"{info.n_ctx_train} tokens" + (f", window {info.n_swa}" if info.n_swa else "")),
        ("tensor types", facts["tensor_types"]),
    ]
    if info.is_draft:
        rows += [
            ("block", f"{info.block_size} tokens, anchor included; {'causal' if info.causal else 'not causal'}"),
            ("taps", "inputs of target layers " + ", ".join(map(str, info.target_layers))),
            ("mask token", "-" if info.mask_token is None else info.mask_token),
            ("own tables", f"embeddings: {_yes(info.own_embd)}, head: {_yes(info.own_head)}"),
        ]
    if info.is_draft and info.n_vocab_draft != info.n_vocab:
        rows.append(("drafted vocabulary", f"{info.n_vocab_draft} tokens"))
    if info.selector_top_k:
        rows.append(("selector", f"top {info.selector_top_k}, rank {info.selector_rank}"))
    if "pairs" in facts:
        verdict = "yes" if facts["pairs"] else f"no: {facts['reason']}"
        rows.append(("pairs with draft" if "draft" in facts else "pairs with target", verdict))
    return rows


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def add_version_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of version."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def version(args: argparse.Namespace) -> int:
    """Describe the build and the devices."""
    facts, found = build_info(), devices()
    if args.json:
        common.print_json({**facts, "devices": [asdict(device) for device in found]})
        return 0
    rows: list[tuple[str, Any]] = [(name.replace("_", " "), value) for name, value in facts.items()]
    for device in found:
        memory = f", {device.memory_total >> 20} MiB" if device.memory_total else ""
        if device.is_gpu:  # what a CPU reports as free is all that it has
            memory += f", {device.memory_free >> 20} free"
        rows.append(("device", f"{device.name}: {device.description}{memory}"))
    common.print_table(rows)
    return 0
