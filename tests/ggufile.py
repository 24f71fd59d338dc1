"""A GGUF file taken apart, so that any part can be damaged and the whole written again, consistent or not."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf

# value types of the format
U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}
# values in a block and its bytes; what gguf says of Q8_1 is not what ggml reads
_SIZES = {**gguf.GGML_QUANT_SIZES, gguf.GGMLQuantizationType.Q8_1: (32, 36)}


@dataclass
class Key:
    name: bytes
    kind: int
    value: Any  # an array is (item kind, items)


@dataclass
class Tensor:
    name: bytes
    dims: list[int]
    kind: int
    offset: int
    n_dims: int | None = None  # as written, if it is to lie


@dataclass
class Parts:
    keys: list[Key] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    data: bytes = b""
    magic: bytes = b"GGUF"
    version: int = 3
    n_keys: int | None = None
    n_tensors: int | None = None

    def __bytes__(self) -> bytes:
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_keys = len(self.keys) if self.n_keys is None else self.n_keys
        out = [self.magic, struct.pack("<IQQ", self.version, n_tensors, n_keys)]
        for key in self.keys:
            out += [_string(key.name), struct.pack("<I", key.kind), _value(key.kind, key.value)]
        for tensor in self.tensors:
            n_dims = len(tensor.dims) if tensor.n_dims is None else tensor.n_dims
            dims = [dim % 2**64 for dim in tensor.dims]
            tail = struct.pack("<IQ", tensor.kind % 2**32, tensor.offset % 2**64)
            out += [_string(tensor.name), struct.pack(f"<I{len(dims)}Q", n_dims, *dims), tail]
        head = b"".join(out)
        return head + b"\0" * (-len(head) % 32) + self.data

    def key(self, name: str) -> Key:
        return next(key for key in self.keys if key.name == name.encode())

    def tensor(self, name: str) -> Tensor:
        return next(tensor for tensor in self.tensors if tensor.name == name.encode())

    def lay_out(self) -> None:
        """Give each tensor the room that its type and shape ask for, in order; the data repeats what was there."""
        offset, old = 0, self.data
        pieces = []
        for tensor in self.tensors:
            per_block, size = _SIZES.get(gguf.GGMLQuantizationType(tensor.kind), (1, 4))
            n_bytes = math.prod(tensor.dims) // per_block * size
            if not 0 <= n_bytes <= 1 << 27:
                break
            source = old[tensor.offset : tensor.offset + n_bytes] or b"\0"
            tensor.offset, offset = offset, offset + n_bytes + (-n_bytes % 32)
            pieces.append((source * (n_bytes // len(source) + 1))[:n_bytes] + b"\0" * (-n_bytes % 32))
        self.data = b"".join(pieces)

    @property
    def n_header(self) -> int:
        """Bytes before the tensors' data."""
        return len(bytes(self)) - len(self.data)


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _string(value)
    if kind == ARRAY:
        item, items = value
        if item in _FORMATS:
            return struct.pack(f"<IQ{len(items)}{_FORMATS[item]}", item, len(items), *items)
        return struct.pack("<IQ", item, len(items)) + b"".join(_value(item, each) for each in items)
    if kind in _FORMATS:
        return struct.pack(f"<{_FORMATS[kind]}", value)
    return bytes(value)  # a kind that does not exist


def read(path: Path) -> Parts:
    raw = path.read_bytes()
    at = 24
    version, n_tensors, n_keys = struct.unpack_from("<IQQ", raw, 4)
    parts = Parts(version=version)

    def take(form: str) -> Any:
        nonlocal at
        value = struct.unpack_from(f"<{form}", raw, at)
        at += struct.calcsize(f"<{form}")
        return value[0] if len(value) == 1 else value

    def text() -> bytes:
        nonlocal at
        size = take("Q")
        at += size
        return raw[at - size : at]

    def value(kind: int) -> Any:
        if kind == STRING:
            return text()
        if kind != ARRAY:
            return take(_FORMATS[kind])
        item, n = take("IQ")
        return item, [value(item) for _ in range(n)]

    for _ in range(n_keys):
        name, kind = text(), take("I")
        parts.keys.append(Key(name, kind, value(kind)))
    for _ in range(n_tensors):
        name, n_dims = text(), take("I")
        dims = [take("Q") for _ in range(n_dims)]
        kind, offset = take("IQ")
        parts.tensors.append(Tensor(name, dims, kind, offset))
    parts.data = raw[at + (-at % 32) :]
    return parts
