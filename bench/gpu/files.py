"""Write a pair of the given shape, tensor by tensor: a file of 16 GB takes as long as the disk needs."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, BinaryIO

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from tqdm import tqdm

from ..records import Record
from . import blocks, pair
from .pair import Tensor
from .shape import Shape


@dataclass(frozen=True)
class Pair:
    """Paths of a target and its draft, and what writing them took, 0 if they were there."""

    target: Path
    draft: Path
    seconds: float


def write(shape: Shape, folder: Path, seed: int, pool_bytes: int = blocks.POOL_BYTES) -> Pair:
    """Write the files into `folder` unless an earlier call has done so."""
    digest = hashlib.sha256(repr((shape, seed, pool_bytes)).encode()).hexdigest()[:8]
    target, draft = (folder / f"{name}-{digest}.gguf" for name in ("target", "draft"))
    folder.mkdir(parents=True, exist_ok=True)
    start = perf_counter()
    vocabulary = pair.tokenizer(shape.n_vocab)
    of_target, of_draft = list(pair.target_tensors(shape)), list(pair.draft_tensors(shape))
    largest = max(blocks.n_bytes(tensor.kind, tensor.shape) for tensor in of_target)
    pools = blocks.Pools(seed, min(pool_bytes, largest))
    for path, arch, keys, tensors in (
        (target, "qwen3", pair.target_keys(shape), of_target),
        (draft, "dflash", pair.draft_keys(shape), of_draft),
    ):
        if not path.exists():
            prefixed = {f"{arch}.{key}": value for key, value in keys.items()}
            _write(path, arch, prefixed | vocabulary, tensors, pools)
    return Pair(target, draft, perf_counter() - start)


def _write(path: Path, arch: str, keys: dict[str, Any], tensors: Sequence[Tensor], pools: blocks.Pools) -> None:
    size = sum(blocks.n_bytes(tensor.kind, tensor.shape) for tensor in tensors)
    free = shutil.disk_usage(path.parent).free
    if size > free:
        raise SystemExit(f"{path} will have {size / 1e9:.1f} GB, {free / 1e9:.1f} are free; give another --models")
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, arch)
    for key, value in keys.items():
        _add_key(writer, key, value)
    for tensor in tensors:
        n_bytes = blocks.n_bytes(tensor.kind, tensor.shape)
        row = n_bytes // max(1, _rows(tensor.shape))
        if tensor.kind == Type.F32:
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), n_bytes)
        else:
            byte_shape = (*tensor.shape[:-1], row)
            writer.add_tensor_info(tensor.name, byte_shape, np.dtype(np.uint8), n_bytes, raw_dtype=tensor.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout
    file = writer.fout[0]
    writer.write_padding(file, file.tell())
    with tqdm(total=size, unit="B", unit_scale=True, desc=path.name) as bar:
        for tensor in tensors:
            bar.update(_write_tensor(file, tensor, pools))
            writer.write_padding(file, file.tell())
    writer.close()
    part.rename(path)


def _write_tensor(file: BinaryIO, tensor: Tensor, pools: blocks.Pools) -> int:
    n_bytes = blocks.n_bytes(tensor.kind, tensor.shape)
    if tensor.kind == Type.F32:
        file.write(_ones(tensor).tobytes())
    else:
        pools.write(file, tensor.kind, tensor.std, n_bytes)
    return n_bytes


def _ones(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A norm's ones; of a convolution [side, tap, channel] only the first tap is 1: it lets its input through."""
    out = np.ones(tensor.shape, np.float32)
    if len(tensor.shape) > 1:
        out[:, 1:] = 0.0
    return out


def _rows(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape[:-1]))


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders: dict[type, Callable[[str, Any], None]] = {
        list: writer.add_array,
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    adders[type(value)](key, value)


def sizes(shape: Shape, paths: Pair) -> Record:
    """The record of a pair: bytes of the files, and of the weights that a verify and a draft read.

    Of embeddings and of the selector's two tables a few rows are read; a draft reads the target's head.
    """
    target, draft = list(pair.target_tensors(shape)), list(pair.draft_tensors(shape))
    tables = ("token_embd.weight", "selector_predecessor.weight", "selector_successor.weight")
    head = [tensor for tensor in target if tensor.name == "output.weight"]
    return {
        "record": "shape",
        "shape": dataclasses.asdict(shape),
        "target": {"bytes": paths.target.stat().st_size, "bytes_read": _bytes(target, tables)},
        "draft": {"bytes": paths.draft.stat().st_size, "bytes_read": _bytes([*draft, *head], tables)},
        "write_s": paths.seconds,
    }


def _bytes(tensors: Iterable[Tensor], without: Sequence[str]) -> int:
    return sum(blocks.n_bytes(each.kind, each.shape) for each in tensors if each.name not in without)
