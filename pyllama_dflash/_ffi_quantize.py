"""Call the part of the library that quantises; _ffi has the rest, and the rules that hold here too."""

from __future__ import annotations

from contextlib import suppress
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ._ffi import ModelHandle, _ffi, _fields, _lib, check

Bytes = npt.NDArray[np.uint8]
_MAX_TYPES = 128  # there are 42 numbers, some of them no type any more


class TensorType(NamedTuple):
    """The fields of pld_tensor_type, and the type's number."""

    number: int
    name: str
    block: int
    n_bytes: int

    def size(self, n_weights: int) -> int:
        """Return the bytes of whole blocks."""
        return n_weights // self.block * self.n_bytes


@cache
def tensor_type(number: int) -> TensorType:
    """Describe a tensor type; ValueError for a number that is none."""
    out = _ffi.new("pld_tensor_type *")
    check(_lib.pld_get_tensor_type(number, out))
    return TensorType(number, **_fields(out[0]))


@cache
def type_named(name: str) -> TensorType:
    """Describe the tensor type of that name."""
    for number in range(_MAX_TYPES):
        with suppress(ValueError):
            if tensor_type(number).name == name:
                return tensor_type(number)
    raise ValueError(f"there is no tensor type {name!r}")


def quantize_header(model: ModelHandle, types: list[int], file_type: int) -> tuple[bytes, int]:
    """Return the start of a file with these types, and the alignment of its tensors."""
    alignment = _ffi.new("int32_t *")
    call = partial(_lib.pld_quantize_header, model.pointer, types, len(types), file_type, alignment)
    n = check(call(_ffi.NULL, 0))
    buffer = _ffi.new("char[]", n)
    check(call(buffer, n))
    return bytes(_ffi.buffer(buffer, n)), alignment[0]


def quantize_rows(source: TensorType, target: TensorType, n_per_row: int, rows: Bytes, n_threads: int) -> Bytes:
    """Convert whole rows of n_per_row weights: bytes [n] of the one type to bytes of the other."""
    n_rows = rows.size // source.size(n_per_row)
    out = np.empty(n_rows * target.size(n_per_row), np.uint8)
    src, dst = _ffi.from_buffer("char[]", rows), _ffi.from_buffer("char[]", out, require_writable=True)
    numbers = (source.number, target.number, n_per_row, n_rows, n_threads)
    check(_lib.pld_quantize_rows(*numbers, src, rows.size, dst, out.size))
    return out
