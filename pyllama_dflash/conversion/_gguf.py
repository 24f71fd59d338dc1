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

from ._checkpoint import Array

ARCH = "dflash"
_FILE_TYPES = {Type.F32: 0, Type.F16: 1, Type.Q8_0: 7, Type.BF16: 32}  # llama.cpp's numbers for general.file_type


@dataclass(frozen=True)
class Entry:
    """A tensor. shape: as numpy has it. load: returns its bytes, in that type."""

    name: str
    kind: Type
    shape: tuple[int, ...]
    load: Callable[[], Array]

    @property
    def n_bytes(self) -> int:
        """Size of the data."""
        per_block, size = gguf.GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // int(per_block) * int(size)


def type_of(name: str, shape: tuple[int, ...], matrices: Type) -> Type:
    """Return the type of a tensor where that of the matrices is given."""
    if name == "d2t":
        return Type.I64
    # Norms and sinks are read as F32, and ggml adds nothing else to the bases of convolutions.
    if len(shape) < 2 or not name.endswith(".weight"):
        return Type.F32
    return matrices if shape[-1] % gguf.GGML_QUANT_SIZES[matrices][0] == 0 else Type.F16


def write(
    path: Path,
    matrices: Type,
    name: str,
    keys: Mapping[str, Any],
    tokenizer: Iterable[tuple[str, Any, list[Any]]],
    entries: Iterable[Entry],
) -> None:
    """Write a draft.

    Args:
        path: the file.
        matrices: their type.
        name: of the model.
        keys: without the architecture's name where they begin with none; None is left out.
        tokenizer: keys, values and their types, copied.
        entries: the tensors, in their order.
    """
    writer = gguf.GGUFWriter(path, ARCH)
    try:
        writer.add_type("model")
        writer.add_name(name)
        writer.add_uint32("general.file_type", _FILE_TYPES[matrices])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for key, value in keys.items():
            if value is not None:
                _add(writer, key if key.startswith("tokenizer.") else f"{ARCH}.{key}", value)
        for key, value, types in tokenizer:
            writer.add_key_value(key, value, types[0], *types[1:2])
        entries = list(entries)
        for entry in entries:
            writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), entry.n_bytes, entry.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for entry in entries:
            writer.write_tensor_data(entry.load())
    finally:
        writer.close()


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
