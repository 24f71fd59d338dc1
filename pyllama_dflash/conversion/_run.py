"""Convert a checkpoint: read its description, check it against the target, write, and open what was written."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

from gguf import GGMLQuantizationType as Type

from .._replace import check_place, replacing
from ..errors import ModelLoadError
from ..model import Model, ModelInfo
from ..params import check_bool
from . import OUTTYPES, PathLike
from ._checkpoint import CONFIG, Checkpoint
from ._config import DraftConfig
from ._entries import entries_of, with_mask
from ._formats import read_config
from ._gguf import Head, write
from ._target import MASK_KEY, TargetFile
from ._tensors import match


def run(
    source: PathLike,
    out: PathLike,
    target: PathLike,
    outtype: str,
    overwrite: bool,
    progress: Callable[[int, int], None] | None,
) -> ModelInfo:
    """Convert; see convert()."""
    check_bool("overwrite", overwrite)
    folder, place = Path(source), Path(out)
    if outtype not in OUTTYPES:
        raise ValueError(f"outtype={outtype!r} is not one of {', '.join(OUTTYPES)}")
    if folder.is_file():
        raise ValueError(f"{folder} is a file; give the folder of the checkpoint, with {CONFIG} in it")
    check_place(place, overwrite, [Path(target)], "the target")
    config = read_config(folder)
    model = TargetFile(target)
    config = replace(config, mask_token=model.check(config, str(folder)))
    _check_config(config, folder)
    checkpoint = Checkpoint(folder)
    check_place(place, overwrite, checkpoint.files, "a part of the checkpoint")
    matrices = _stored_type(checkpoint) if outtype == "auto" else Type[outtype.upper()]
    entries = list(entries_of(config, checkpoint, match(config, checkpoint), matrices))
    entries = with_mask(config, folder, model, entries, matrices)
    with replacing(place, overwrite) as path:
        head = Head(_name(folder), matrices, _keys(config, model), model.tokenizer())
        write(path, place, head, entries, progress)
        with Model.header(target) as opened, Model.header(path) as draft:
            opened.check_pair(draft)
            info = draft.info
    return info


def _check_config(config: DraftConfig, folder: Path) -> None:
    if config.interleaved and config.d_head % 2:
        raise ModelLoadError(f"{folder / CONFIG}: head_dim={config.d_head} is not even; correct it")
    if config.version == 1:
        return
    if config.n_embd % config.conv_group:
        raise ModelLoadError(
            f"{folder / CONFIG}: conv_group_size={config.conv_group} does not divide hidden_size={config.n_embd}; "
            "correct it"
        )
    if config.reduced:
        raise ModelLoadError(
            f"{folder / CONFIG}: draft_vocab_size={config.n_vocab_draft} and vocab_size={config.n_vocab} differ, "
            "and a DFlash2 draft needs all tokens"
        )


def _stored_type(checkpoint: Checkpoint) -> Type:
    """Return the 16-bit type that the first matrix in one has."""
    kinds = (stored.dtype for stored in checkpoint.tensors.values() if len(stored.shape) >= 2)
    return next((Type[kind] for kind in kinds if kind in ("BF16", "F16")), Type.F16)


def _keys(c: DraftConfig, model: TargetFile) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "context_length": c.n_ctx or model.info.n_ctx_train,
        "embedding_length": c.n_embd,
        "block_count": c.n_layer,
        "feed_forward_length": c.n_ff,
        "attention.head_count": c.n_head,
        "attention.head_count_kv": c.n_kv,
        "attention.key_length": c.d_head,
        "attention.value_length": c.d_head,
        "attention.layer_norm_rms_epsilon": c.rms_eps,
        "attention.causal": c.causal,
        "hidden_activation": None if c.activation == "silu" else c.activation,
        "block_size": c.block_size,
        "target_layers": c.target_layers,
        **c.rope,
        **c.scales,
        MASK_KEY: c.mask_token,
    }
    if c.version == 2:
        keys |= {"conv_kernel_size": c.conv_taps, "conv_group_size": c.conv_group}
        keys |= {"selector_rank": c.selector_rank, "selector_top_k": c.selector_top_k}
    if c.window:
        keys |= {"attention.sliding_window": c.window, "attention.sliding_window_pattern": c.windowed}
    if model.has_sections:
        keys["rope.dimension_sections"] = (c.d_head // 2, 0, 0, 0)
    return keys


def _name(folder: Path) -> str:
    """Return the folder's name, and that of the repository where the folder is in the hub's cache."""
    folder = Path(os.fsencode(folder.resolve()).decode("utf-8", "replace"))  # a GGUF's text is UTF-8
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.rpartition("--")[2]
    return folder.name
