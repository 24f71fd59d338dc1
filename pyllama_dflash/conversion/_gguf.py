"""Write a GGUF file tensor by tensor: only one of them is in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from .._replace import naming, writing
from ..recipes import FILE_TYPES, fitting
from ._checkpoint import Array

ARCH = "dflash"


@dataclass(frozen=True)
class Entry:
    """A tensor. shape: as numpy has it. load: returns its bytes, in that type."""

    name: str
    kind: Type
    shape: tuple[int, ...]
    load: Callable[[], Array]

    @property
    def n_weights(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """Size of the data."""
        per_block, size = gguf.GGML_QUANT_SIZES[self.kind]
        return self.n_weights // int(per_block) * int(size)


@dataclass(frozen=True)
class Head:
    """What a file has before its tensors.

    Args:
        name: of the model.
        matrices: their type.
        keys: without the architecture's name where they begin with none; None is left out.
        tokenizer: keys, values and their types, copied.
    """

    name: str
    matrices: Type
    keys: Mapping[str, Any]
    tokenizer: Iterable[tuple[str, Any, list[Any]]]


def type_of(name: str, shape: tuple[int, ...], matrices: Type) -> Type:
    """Return the type of a tensor where that of the matrices is given."""
    if name == "d2t":
        return Type.I64
    # Norms and sinks are read as F32, and ggml adds nothing else to the bases of convolutions.
    if len(shape) < 2 or not name.endswith(".weight"):
        return Type.F32
    return Type[fitting(matrices.name.lower(), shape[-1]).upper()]


def write(
    path: Path, place: Path, head: Head, entries: list[Entry], progress: Callable[[int, int], None] | None
) -> None:
    """Write a draft.

    Args:
        path: the file.
        place: the path that messages name it by.
        head: what is before the tensors.
        entries: the tensors, in their order.
        progress: called with the number of weights done and of all, after each tensor.
    """
    n_done, n_all = 0, sum(entry.n_weights for entry in entries)
    alignment = _start(path, place, head, entries)
    with writing(path, place) as written:
        written.write(bytes(-written.tell() % alignment))
        for entry in entries:
            written.write(np.ascontiguousarray(entry.load()).reshape(-1).view(np.uint8).data)
            written.write(bytes(-written.tell() % alignment))
            n_done += entry.n_weights
            if progress is not None:
                progress(n_done, n_all)


def _start(path: Path, place: Path, head: Head, entries: Iterable[Entry]) -> int:
    """Write what is before the first tensor's data; return the alignment of each."""
    writer = gguf.GGUFWriter(None, ARCH)
    writer.add_type("model")
    writer.add_name(head.name)
    writer.add_uint32("general.file_type", FILE_TYPES[head.matrices.name.lower()])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in head.keys.items():
        if value is not None:
            _add(writer, key if key.startswith("tokenizer.") else f"{ARCH}.{key}", value)
    for key, value, types in head.tokenizer:
        writer.add_key_value(key, value, types[0], *types[1:2])
    for entry in entries:
        writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), entry.n_bytes, entry.kind)
    alignment = int(writer.data_alignment)
    with naming(place):
        try:
            writer.write_header_to_file(path)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
        finally:
            writer.close()
    return alignment


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))
