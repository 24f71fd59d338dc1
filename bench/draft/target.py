"""A target in PyTorch, read from its GGUF: one pass over whole rows, and one token at a time for many rows."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from .rounding import round_q4_0

INTERLEAVED = {"llama": True, "qwen2": False, "qwen3": False}  # rotary pairs: neighbours, or halves of a head


class Target:
    """Weights and sizes of a target of architecture llama, qwen2 or qwen3.

    Args:
        path: the GGUF; quantised weights are dequantised.

    Raises:
        ValueError: another architecture.
    """

    def __init__(self, path: Path, device: str, dtype: torch.dtype) -> None:
        reader = gguf.GGUFReader(path)
        self.fields = reader.fields
        self.arch = reader.fields["general.architecture"].contents()
        if self.arch not in INTERLEAVED:
            raise ValueError(f"{path}: architecture {self.arch} is not among {', '.join(INTERLEAVED)}")
        self.width, self.layers = self._key("embedding_length"), self._key("block_count")
        self.heads, self.kv_heads = self._key("attention.head_count"), self._key("attention.head_count_kv")
        self.head_dim = self._key("attention.key_length", self.width // self.heads)
        self.eps = self._key("attention.layer_norm_rms_epsilon")
        self.base = self._key("rope.freq_base", 10000.0)
        self.interleaved = INTERLEAVED[self.arch]
        read = {tensor.name: _weight(tensor, device, dtype) for tensor in reader.tensors}
        self.embedding = read["token_embd.weight"]
        self.head = read.get("output.weight", self.embedding)
        self.norm = read["output_norm.weight"]
        self.vocabulary = self.embedding.shape[0]
        self.blocks = [_block(read, f"blk.{index}.") for index in range(self.layers)]

    def _key(self, name: str, default: Any = None) -> Any:
        field = self.fields.get(f"{self.arch}.{name}")
        return default if field is None else field.contents()

    def variant(self, name: str) -> Target:
        """A copy: "" as it is, "q4_0" with the matrices of its layers rounded to that type.

        Raises:
            ValueError: another name.
        """
        if name not in ("", "q4_0"):
            raise ValueError(f"variant {name} of a target is not known")
        made = copy.copy(self)
        made.blocks = [
            {key: round_q4_0(w.float()).to(w.dtype) if name and w.ndim == 2 else w.clone() for key, w in block.items()}
            for block in self.blocks
        ]
        return made

    def take(self, other: Target) -> None:
        """Copy another variant's weights into the same memory, which captured graphs read."""
        for mine, its in zip(self.blocks, other.blocks):
            for name, weight in its.items():
                mine[name].copy_(weight)

    def rotary(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each float32 [length, head_dim / 2]."""
        return rotary(length, self.head_dim, self.base, self.embedding.device)

    def rows(
        self, ids: Tensor, taps: Sequence[int], pre: Any, post: Any, turn: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Pass over ids [B, T]: features [B, T, m * width] of the layers' inputs, and the normed output [B, T, width].

        `pre` and `post` are layer_in and layer_out, or compiled.
        """
        x, found = self.embedding[ids], {}
        for index, block in enumerate(self.blocks):
            if index in taps:
                found[index] = x
            q, k, v = pre(self, x, block, *turn)
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = post(self, x, o.transpose(1, 2).flatten(2), block)
        return torch.cat([found[index] for index in taps], -1), F.rms_norm(x, (self.width,), self.norm, self.eps)


def _weight(tensor: Any, device: str, dtype: torch.dtype) -> Tensor:
    values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)  # a copy: F32 would be the file's
    return torch.from_numpy(values).to(device, dtype)


def _block(read: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """A layer's weights, those that are read together in one matrix."""
    have = {name.removeprefix(prefix): weight for name, weight in read.items() if name.startswith(prefix)}
    block = {name: have[f"{name}.weight"] for name in ("attn_norm", "attn_output", "ffn_norm", "ffn_down")}
    block["qkv"] = torch.cat([have[f"attn_{name}.weight"] for name in "qkv"])
    block["gate_up"] = torch.cat([have["ffn_gate.weight"], have["ffn_up.weight"]])
    if "attn_q.bias" in have:
        block["qkv_bias"] = torch.cat([have[f"attn_{name}.bias"] for name in "qkv"])
    for name in ("attn_q_norm", "attn_k_norm"):
        if f"{name}.weight" in have:
            block[name] = have[f"{name}.weight"]
    return block


def rotary(length: int, head_dim: int, base: float, device: Any) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions, each float32 [length, head_dim / 2]."""
    rate = 1.0 / base ** (torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    angle = torch.arange(length, device=device).float()[:, None] * rate
    return angle.cos(), angle.sin()


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Apply rotary positions to x [..., T, head_dim]; cos and sin are [..., T, head_dim / 2]."""
    if interleaved:
        a, b = x[..., 0::2].float(), x[..., 1::2].float()
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


def layer_in(t: Target, x: Tensor, block: dict[str, Tensor], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The queries, keys and values [B, heads, T, head_dim] of a layer's input x [B, T, width]."""
    normed = F.rms_norm(x, (t.width,), block["attn_norm"], t.eps)
    together = F.linear(normed, block["qkv"], block.get("qkv_bias"))
    sizes = [t.heads * t.head_dim, t.kv_heads * t.head_dim, t.kv_heads * t.head_dim]
    q, k, v = (part.unflatten(-1, (-1, t.head_dim)) for part in together.split(sizes, -1))
    if "attn_q_norm" in block:
        q = F.rms_norm(q, (t.head_dim,), block["attn_q_norm"], t.eps)
        k = F.rms_norm(k, (t.head_dim,), block["attn_k_norm"], t.eps)
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    return turned(q, cos, sin, t.interleaved), turned(k, cos, sin, t.interleaved), v


def layer_out(t: Target, x: Tensor, attended: Tensor, block: dict[str, Tensor]) -> Tensor:
    """What a layer returns for its input x [B, T, width] and the attention's [B, T, heads * head_dim]."""
    x = x + F.linear(attended, block["attn_output"])
    gate, up = F.linear(F.rms_norm(x, (t.width,), block["ffn_norm"], t.eps), block["gate_up"]).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, block["ffn_down"])
