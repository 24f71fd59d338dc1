"""The tensors of a draft as they are written: read, brought into the layout and the type of the GGUF when asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import quantize

from ..errors import ModelLoadError
from ._checkpoint import MASK, Array, Checkpoint
from ._config import DraftConfig
from ._gguf import Entry, type_of
from ._mask import read_mask
from ._target import TargetFile
from ._tensors import Wanted

_MOST = {Type.F16: 65504, Type.Q8_0: 65504 * 127}  # whose scale is an F16


def entries_of(
    config: DraftConfig, checkpoint: Checkpoint, pairs: list[tuple[Wanted, str]], matrices: Type
) -> Iterator[Entry]:
    for tensor, stored in pairs:
        kind = type_of(tensor.name, tensor.shape, matrices)

        def load(tensor: Wanted = tensor, stored: str = stored, kind: Type = kind) -> Array:
            data = checkpoint.read(stored)
            if kind == Type.I64:
                return _token_map(config, checkpoint.tensors[stored].path, data)
            if tensor.turned and config.interleaved:
                data = _halves(data, config.d_head)
            if float(np.abs(data).max(initial=0)) > _MOST.get(kind, np.inf):
                raise ModelLoadError(
                    f"{checkpoint.tensors[stored].path}: tensor {stored} has weights beyond the range of {kind.name}; "
                    "convert it as bf16 or f32"
                )
            out: Array = np.ascontiguousarray(quantize(data, kind))
            return out

        yield Entry(tensor.name, kind, tensor.shape, load)
    if config.rope_factors:
        factors = np.array(config.rope_factors, np.float32)
        yield Entry("rope_freqs.weight", Type.F32, factors.shape, lambda: factors)


def _halves(data: Array, d_head: int) -> Array:
    """Sort the rows of each head from neighbours into halves: those at even places first."""
    pairs = data.reshape(-1, d_head // 2, 2, *data.shape[1:])
    out: Array = pairs.swapaxes(1, 2).reshape(data.shape)
    return out


def _token_map(config: DraftConfig, path: Path, data: Array) -> Array:
    """Turn the distance from a draft's token to the target's into the target's."""
    if data.dtype.kind not in "iu":
        raise ModelLoadError(f"{path}: tensor d2t has no whole numbers; download it again")
    tokens = data.astype(np.int64) + np.arange(data.size)
    wrong = tokens[(tokens < 0) | (tokens >= config.n_vocab)]
    if wrong.size:
        raise ModelLoadError(
            f"{path}: tensor d2t names token {wrong[0]}, and there are {config.n_vocab}; download it again"
        )
    return tokens


def with_mask(
    config: DraftConfig, folder: Path, model: TargetFile, entries: list[Entry], matrices: Type
) -> list[Entry]:
    """Add the target's tables where the mask token has a row of the draft's: then they can be shared no more."""
    mask = config.mask_token or 0
    row = read_mask(folder, mask, config.n_embd)
    if row is None:
        return entries
    by_name = {entry.name: entry for entry in entries}
    found, shape = model.table("token_embd.weight"), (config.n_vocab, config.n_embd)
    if found is None or found.shape != shape:
        raise ModelLoadError(f"{folder / MASK}: {model.name} has no embeddings of shape {list(shape)} to put it in")
    own, embeddings, head = by_name.get("token_embd.weight"), found, model.table("output.weight") or found
    kind = type_of("token_embd.weight", shape, matrices)

    def patched() -> Array:
        if own is None:
            return embeddings.quantised(kind, mask, row)
        data: Array = own.load().copy()
        data[mask] = quantize(row[None], kind)[0]
        return data

    tables = [Entry("token_embd.weight", kind, shape, patched)]
    if "output.weight" not in by_name:  # as the target has it, so that both answer alike
        tables.append(Entry("output.weight", head.kind, head.shape, lambda: np.ascontiguousarray(head.data)))
    return [*tables, *(entry for entry in entries if entry.name != "token_embd.weight")]
