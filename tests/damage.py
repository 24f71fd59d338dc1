"""Damage GGUF files in every way a stranger's file can be damaged: one way for each number."""

from __future__ import annotations

import copy
import random
import struct
from pathlib import Path
from typing import Any, Callable

import gguf
import ggufile
from ggufile import ARRAY, BOOL, F32, F64, I32, I64, STRING, U8, U32, U64, Key, Parts

NAN, INF = float("nan"), float("inf")
VALUES: list[tuple[int, Any]] = [
    *((U32, n) for n in (0, 1, 2, 3, 5, 17, 255, 4096, 65537, 2**31 - 1, 2**31, 2**32 - 1)),
    *((I32, n) for n in (-1, -(2**31))),
    *((U64, n) for n in (0, 2**31, 2**32, 2**40, 2**63, 2**64 - 1)),
    *((I64, n) for n in (-1, -(2**63))),
    *((F32, n) for n in (0.0, 0.5, -1.0, 1e30, NAN, INF)),
    *((F64, n) for n in (1e308, NAN)),
    *((STRING, text) for text in (b"", b"x", b"\xff\xfe\0y", b"silu" * 1000)),
    (BOOL, 1),
    (BOOL, 255),
    *((ARRAY, (U32, items)) for items in ([], [0], [1, 2, 3], [2**32 - 1] * 40, [2] * 600)),
    (ARRAY, (I32, [-1, 0])),
    (ARRAY, (F32, [NAN, 1.0])),
    (ARRAY, (BOOL, [])),
    (ARRAY, (STRING, [])),
    (ARRAY, (STRING, [b"a", b""])),
    (ARRAY, (ARRAY, [(U32, [1])])),
    (99, b"\0\0\0\0"),
]
DIMS = [0, 1, 2, 31, 33, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
TYPES = [*range(42), 255, 2**31, 2**32 - 1]
OFFSETS = [1, 31, 32, 2**31, 2**40, 2**63 - 32, 2**63, 2**64 - 32]
BITS = [b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xff", b"\xff\xff\xff\xff", b"\xff\xff\x7f\x7f", b"\1\0\0\0"]


def damage(whole: Path, number: int, laid_out: bool = False) -> bytes:
    """The file with damage of that number, always the same. laid_out: only such as leave each tensor its room."""
    rng = random.Random(number)
    raw, parts = whole.read_bytes(), ggufile.read(whole)
    kinds = (
        _key,
        _key,
        _key,
        _vocabulary,
        _tensor,
        _tensor,
        _retyped,
        _number,
        _weights,
        _counts,
        _bytes,
        _bytes,
        _cut,
    )
    return rng.choice((_retyped, _number) if laid_out else kinds)(rng, raw, parts)


def value_damage(whole: Path, name: bytes, number: int) -> bytes:
    """The file with the key set to the value of that number in VALUES."""
    parts = ggufile.read(whole)
    for key in parts.keys:
        if key.name == name:
            key.kind, key.value = VALUES[number]
    return bytes(parts)


def _key(rng: random.Random, raw: bytes, parts: Parts) -> bytes:
    key = rng.choice([k for k in parts.keys if not k.name.startswith(b"general.name")])
    roll = rng.random()
    if roll < 0.12:
        parts.keys.remove(key)
    elif roll < 0.16:
        parts.keys.append(copy.deepcopy(key))
    elif roll < 0.2:
        key.name = rng.choice([b"", b"x" * 70000, b"a\0b", b"\xff", key.name[:-1]])
    elif roll < 0.35 and isinstance(key.value, int):
        key.value = max(0, key.value + rng.choice([-1, 1, key.value, -key.value // 2]))
        key.kind = key.kind if key.kind != BOOL else U8
    else:
        key.kind, key.value = rng.choice(VALUES)
    return bytes(parts)


def _vocabulary(rng: random.Random, raw: bytes, parts: Parts) -> bytes:
    key = rng.choice([k for k in parts.keys if k.name.startswith(b"tokenizer.") and k.kind == ARRAY])
    item, items = key.value
    items = list(items)
    at = rng.randrange(len(items))
    spoil: list[Callable[[], Any]] = [
        lambda: items.pop(at),
        lambda: items.append(items[at]),
        lambda: items.insert(at, items[0]),
        lambda: items.clear(),
        lambda: items.__setitem__(at, b"" if item == STRING else 2**31 - 1),
        lambda: items.__setitem__(at, items[at - 1]),
        lambda: items.__setitem__(at, b"\xff\xfe" if item == STRING else -5),
        lambda: items.__setitem__(at, b"a b c \xe2" if item == STRING else 0),
        lambda: items.extend(items * 3),
        lambda: rng.shuffle(items),
        lambda: items.__setitem__(slice(at, None), []),
        lambda: items.__setitem__(slice(None), [b"" if item == STRING else 0] * len(items)),
    ]
    rng.choice(spoil)()
    key.value = (item, items)
    return bytes(parts)


def _tensor(rng: random.Random, raw: bytes, parts: Parts) -> bytes:
    tensor, other = rng.sample(parts.tensors, 2)
    roll = rng.randrange(10)
    if roll <= 2:
        at = rng.randrange(len(tensor.dims))
        tensor.dims[at] = rng.choice([*DIMS, tensor.dims[at] + 1, tensor.dims[at] - 1, tensor.dims[at] * 2])
    elif roll == 3:
        tensor.kind = rng.choice(TYPES)
    elif roll == 4:
        tensor.offset = rng.choice([*OFFSETS, other.offset, tensor.offset + 32, len(parts.data)])
    elif roll == 5:
        tensor.name = rng.choice(
            [b"", b"x", other.name, b"y" * 64, b"y" * 70000, b"a\0b", b"\xff" * 8, tensor.name + b"2"]
        )
    elif roll == 6:
        parts.tensors.remove(tensor)
    elif roll == 7:
        tensor.name, other.name = other.name, tensor.name
    elif roll == 8:
        tensor.dims = rng.choice(
            [tensor.dims[::-1], [*tensor.dims, 1], [*tensor.dims, 2], [1, 1, 1, 1, 1], [], tensor.dims[:1]]
        )
    else:
        tensor.n_dims = rng.choice([0, 1, 3, 4, 5, 2**31, 2**32 - 1])
    return bytes(parts)


def _retyped(rng: random.Random, raw: bytes, parts: Parts) -> bytes:
    """One tensor of another type, or of another shape, and the file laid out for it."""
    tensor = rng.choice(parts.tensors)
    if rng.random() < 0.6:
        tensor.kind = int(rng.choice(list(gguf.GGMLQuantizationType)))
    else:
        at = rng.randrange(len(tensor.dims))
        tensor.dims[at] = rng.choice([0, 1, 31, 32, tensor.dims[at] + 1, tensor.dims[at] - 1, tensor.dims[at] * 2])
    parts.lay_out()
    return bytes(parts)


def _number(rng: random.Random, raw: bytes, parts: Parts) -> bytes:
    """A number changed wherever it stands, in a key and in the shapes that follow from it."""
    key = rng.choice(
        [k for k in parts.keys if isinstance(k.value, int) and k.value > 1 and not k.name.startswith(b"tok")]
    )
    old, key.value = (
        key.value,
        rng.choice([0, 1, 2, 3, 5, 7, 16, 31, 33, 64, 100, 320, 1024, key.value // 2, key.value * 2]),
    )
    for tensor in parts.tensors:
        if rng.random() < 0.97:
            tensor.dims = [key.value if dim == old else 2 * key.value if dim == 2 * old else dim for dim in tensor.dims]
    parts.lay_out()
    return bytes(parts)


def _weights(rng: random.Random, raw: bytes, parts: Parts) -> bytes:
    tensor = rng.choice(parts.tensors)
    data = bytearray(parts.data)
    if rng.random() < 0.5:
        n = min(4096, len(data) - tensor.offset) // 4
        data[tensor.offset : tensor.offset + 4 * n] = rng.choice(BITS) * n
    else:
        for _ in range(64):
            at = rng.randrange(tensor.offset, len(data))
            data[at] = rng.randrange(256)
    parts.data = bytes(data)
    return bytes(parts)


def _counts(rng: random.Random, raw: bytes, parts: Parts) -> bytes:
    number = rng.choice([0, 1, len(parts.keys) + 1, len(parts.keys) - 1, 2**31, 2**32, 2**63, 2**64 - 1])
    which = rng.choice(["n_keys", "n_tensors", "version", "magic"])
    setattr(
        parts,
        which,
        rng.choice([b"", b"GGML", b"FUGG"]) if which == "magic" else number % 2 ** (32 if which == "version" else 64),
    )
    return bytes(parts)


def _bytes(rng: random.Random, raw: bytes, parts: Parts) -> bytes:
    data = bytearray(raw)
    # The list of tokens is most of the header: leave room for the rest.
    places = [
        rng.randrange(24),
        rng.randrange(900),
        rng.randrange(parts.n_header),
        parts.n_header - 1 - rng.randrange(3000),
    ]
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.choice(places) + rng.randrange(8)
        data[at] = rng.choice([0, 1, 255, 128, data[at] ^ (1 << rng.randrange(8)), rng.randrange(256)])
    if rng.random() < 0.2:
        at = rng.choice(places)
        data[at : at + 8] = struct.pack("<Q", rng.choice([0, 2**31, 2**32, 2**63, 2**64 - 1]))
    return bytes(data)


def _cut(rng: random.Random, raw: bytes, parts: Parts) -> bytes:
    end = rng.choice(
        [rng.randrange(200), rng.randrange(parts.n_header), rng.randrange(parts.n_header, len(raw)), len(raw) - 1]
    )
    return raw[:end] + rng.choice([b"", b"", b"\0" * 100])


__all__ = ["VALUES", "Key", "damage", "value_damage"]
