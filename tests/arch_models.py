"""Tiny random models of nearly every architecture, written as GGUF files.

An Arch is what one has of its own: metadata that differs from COMMON, and what each kind of layer is made of
(arch_parts.py). arch_table.py has them all.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from arch_parts import dims, expand, name_of, shape_of
from tiny import EOS, N_VOCAB, Array, File, tokenizer

E, H, G, D = 64, 4, 2, 16  # width, heads, key/value heads, their width

COMMON: dict[str, Any] = {
    "general.name": "tiny",
    "context_length": 512,
    "embedding_length": E,
    "block_count": 4,
    "feed_forward_length": 96,
    "attention.head_count": H,
    "attention.head_count_kv": G,
    "attention.key_length": D,
    "attention.value_length": D,
    "rope.dimension_count": D,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "vocab_size": N_VOCAB,
}


@dataclass(frozen=True, eq=False)
class Arch:
    """A model before it is written.

    Args:
        name: that of the architecture.
        layers: what each kind of layer is made of, by its letter.
        pattern: the kind of each layer.
        keys: metadata; a list with a value for each layer is cut with the layers.
        ends: the tensors outside of layers; without "output" the head is the embeddings.
        mean: whether the last norm takes the mean out.
        norm: the last norm's weight.
        scale: of the embeddings; small where the model or a tied head makes large ones of them.
        shown: the layers that show a draft their input: "all", "rest" (all but the first) or "none".
        least: layers in the shortest model of its first layers that runs: some need one of each kind.
        recurrent: whether it has a state that cannot be cut back.
        seed: of the weights.
        note: what sets it apart from another of the same name.
    """

    name: str
    layers: dict[str, str]
    pattern: str
    keys: dict[str, Any] = field(default_factory=dict)
    ends: str = "token_embd output_norm output"
    mean: bool = False
    norm: str = "output_norm"
    scale: float = 1.0
    shown: str = "rest"
    least: int = 1
    recurrent: bool = False
    seed: int = 0
    note: str = ""

    def __repr__(self) -> str:
        return self.note or self.name

    @property
    def n_layer(self) -> int:
        return len(self.pattern)

    def file(self) -> File:
        return self.first(self.n_layer)

    def first(self, n_layer: int) -> File:
        """The model of the first layers of this one: the same weights, then the last norm and the head."""
        keys = COMMON | {"block_count": n_layer} | self.keys
        lists = {key: value for key, value in keys.items() if isinstance(value, list)}
        by_layer = [key for key in lists if len(lists[key]) == self.n_layer and key != "rope.dimension_sections"]
        keys |= {key: keys[key][:n_layer] for key in by_layer}
        symbols, whole = dims(keys, N_VOCAB), dims(keys | {"block_count": self.n_layer}, N_VOCAB)
        out = File(self.name, keys | tokenizer(EOS))
        parts = [("", self.ends)] + [(f"blk.{i}.", self.layers[kind]) for i, kind in enumerate(self.pattern[:n_layer])]
        for prefix, spec in parts:
            for tensor, shape in expand(spec).items():
                name = prefix + name_of(tensor)
                values = self._values(tensor, name, shape_of(shape, whole))
                out.tensors[name] = values[tuple(slice(n) for n in shape_of(shape, symbols)[::-1])]
        return out

    def _values(self, tensor: str, name: str, shape: tuple[int, ...]) -> Array:
        rng = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        out: Array = rng.standard_normal(shape[::-1]).astype(np.float32)
        if tensor == "ssm_a!":
            return -np.abs(out) - 0.1  # a state decays
        if tensor in ("time_mix_decay", "time_mix_w0"):
            return 0.1 * out - 3  # slowly
        if tensor == "token_embd":
            return self.scale * out
        if tensor == "rope_freqs":
            return np.abs(out) + 1
        if any(word in tensor for word in ("norm", "scale", "_ln", "mix_k_")) and tensor[-2:] != ".b":
            return 1 + 0.2 * out
        if len(shape) == 1:
            return 0.1 * out
        return 1.5 / np.sqrt(shape[0]) * out
