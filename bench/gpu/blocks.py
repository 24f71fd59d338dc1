"""Random weights of a given standard deviation, made as blocks in ggml's layouts (ggml-common.h), not quantised."""

from __future__ import annotations

import math
from typing import Any, BinaryIO

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

Bytes = npt.NDArray[np.uint8]
POOL_BYTES = 64 << 20


def q4_k(rng: np.random.Generator, n: int, std: float) -> Bytes:
    """d, dmin: f16; 12 bytes of 8 scales and 8 minima, 6 bits each; 128 bytes of quants. x = d s q - dmin m.

    The minima are the scales and dmin is 7.5 d, so that x = d s (q - 7.5) is centred.
    """
    return _centred(rng.integers(0, 256, (n, 144), np.uint8), std, 7.5)


def q5_k(rng: np.random.Generator, n: int, std: float) -> Bytes:
    """As q4_k, with 32 bytes of the quants' fifth bits before the others; dmin is 15.5 d."""
    return _centred(rng.integers(0, 256, (n, 176), np.uint8), std, 15.5)


def _centred(out: Bytes, std: float, middle: float) -> Bytes:
    d = std / math.sqrt(_square(0, 63) * _square(-middle, middle))
    out[:, 0:4] = np.array([d, middle * d], np.float16).view(np.uint8)
    out[:, 8:12] = out[:, 4:8]  # low bits of minima 0 to 3, and above them the top bits of 4 to 7: those of the scales
    out[:, 12:16] = (out[:, 12:16] & 15) * 17  # low bits of scales and of minima 4 to 7
    return out


def q6_k(rng: np.random.Generator, n: int, std: float) -> Bytes:
    """128 bytes of low and 64 of high quant bits; 16 scales of 8 bits, signed; d: f16. x = d s (q - 32)."""
    out = rng.integers(0, 256, (n, 210), np.uint8)
    d = std / math.sqrt(_square(-128, 127) * _square(-32, 31))
    out[:, 208:210] = np.array([d], np.float16).view(np.uint8)
    return out


def q8_0(rng: np.random.Generator, n: int, std: float) -> Bytes:
    """d: f16; 32 quants, -127 to 127. x = d q."""
    out = np.empty((n, 34), np.uint8)
    out[:, 0:2] = np.array([std / math.sqrt(_square(-127, 127))], np.float16).view(np.uint8)
    out[:, 2:] = rng.integers(-127, 128, (n, 32), np.int8).view(np.uint8)
    return out


def q4_0(rng: np.random.Generator, n: int, std: float) -> Bytes:
    """d: f16; 16 bytes of quants, 0 to 15. x = d (q - 8), with d of either sign so that x is centred."""
    out = rng.integers(0, 256, (n, 18), np.uint8)
    d = np.float16(std / math.sqrt(_square(-8, 7)))
    out[:, 0:2] = np.where(rng.random((n, 1)) < 0.5, d, -d).astype(np.float16).view(np.uint8)
    return out


def _square(low: float, high: float) -> float:
    """Mean square of low, low + 1, ... high, all as likely."""
    return ((low + high) / 2) ** 2 + ((high - low + 1) ** 2 - 1) / 12


MAKERS = {Type.Q4_K: q4_k, Type.Q5_K: q5_k, Type.Q6_K: q6_k, Type.Q8_0: q8_0, Type.Q4_0: q4_0}


def n_bytes(kind: Type, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; `shape` is numpy's, the row last."""
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    assert shape[-1] % per_block == 0, f"rows of {shape[-1]} values are no whole {kind.name} blocks of {per_block}"
    return math.prod(shape) // per_block * size


class Pools:
    """Random blocks of each type and deviation, drawn once; tensors are written as slices of them at random places.

    A tensor larger than a pool repeats it, cut elsewhere: reading its bytes costs what reading others would.
    """

    def __init__(self, seed: int, pool_bytes: int = POOL_BYTES) -> None:
        self.rng = np.random.default_rng(seed)
        self.pool_bytes = pool_bytes
        self.pools: dict[Any, Bytes] = {}

    def write(self, file: BinaryIO, kind: Type, std: float, n: int) -> None:
        """Write `n` bytes of whole blocks."""
        size = gguf.GGML_QUANT_SIZES[kind][1]
        if (kind, std) not in self.pools:
            self.pools[kind, std] = MAKERS[kind](self.rng, self.pool_bytes // size, std)
        pool, left = self.pools[kind, std], n // size
        while left:
            start = int(self.rng.integers(len(pool)))
            take = min(left, len(pool) - start)
            file.write(pool[start : start + take].data)
            left -= take
