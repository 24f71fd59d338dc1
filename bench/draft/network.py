"""The draft in PyTorch: DFlash2 (z-lab), with blocks of many anchors side by side for training.

A: anchors of a row, B: tokens of a block, T: tokens of a row, m: tapped layers. Matrices are bfloat16 and hold the
values that a pass uses; the optimizer keeps float32 ones beside them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .config import DraftShape
from .target import Target, turned

EPS = 1e-6


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), EPS)


class Convolution(nn.Module):
    """Mixes a block's tokens with those before them, at both sides of a sublayer; starts as the identity.

    out[t, c] = sum over j of (base[side, j, c] + proj(u)[t, side, j, c // group]) * x[t - j, c]
    """

    def __init__(self, width: int, kernel: int, group: int) -> None:
        super().__init__()
        self.kernel, self.group = kernel, group
        self.base = nn.Parameter(torch.zeros(2, kernel, width))
        self.base.data[:, 0] = 1
        self.proj = nn.Parameter(torch.zeros(2 * kernel * (width // group), width, dtype=torch.bfloat16))

    def kernels(self, u: Tensor) -> Tensor:
        """[..., 2, kernel, width]: what the sublayer's input u [..., width] adds to the base, and the base."""
        added = F.linear(u, self.proj).unflatten(-1, (2, self.kernel, -1)).repeat_interleave(self.group, -1)
        return added + self.base.to(u.dtype)

    def forward(self, x: Tensor, kernels: Tensor, side: int) -> Tensor:
        """X [..., B, width] -> the same shape."""
        out = kernels[..., side, 0, :] * x
        for j in range(1, self.kernel):
            out = out + kernels[..., side, j, :] * F.pad(x, (0, 0, j, 0))[..., : x.shape[-2], :]
        return out


def matrix(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter((torch.randn(rows, columns) * 0.02).bfloat16())


class Layer(nn.Module):
    def __init__(self, shape: DraftShape, target: Target) -> None:
        super().__init__()
        width, self.dim = target.width, target.head_dim
        self.heads, self.kv_heads = target.heads, target.kv_heads
        self.attn_norm, self.ffn_norm = Norm(width), Norm(width)
        self.q_norm, self.k_norm = Norm(self.dim), Norm(self.dim)
        self.q, self.o = matrix(self.heads * self.dim, width), matrix(width, self.heads * self.dim)
        self.k, self.v = matrix(self.kv_heads * self.dim, width), matrix(self.kv_heads * self.dim, width)
        self.gate, self.up, self.down = matrix(shape.ff, width), matrix(shape.ff, width), matrix(width, shape.ff)
        self.attn_conv = Convolution(width, shape.conv_kernel, shape.conv_group)
        self.ffn_conv = Convolution(width, shape.conv_kernel, shape.conv_group)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.dim)).transpose(-2, -3)  # [..., heads, tokens, dim]

    def keys_values(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        k = self.k_norm(self._split(F.linear(x, self.k)))
        return turned(k, *turn, interleaved=False), self._split(F.linear(x, self.v))

    def forward(
        self, x: Tensor, context: Tensor, seen: Tensor, turn: tuple[Tensor, Tensor], block_turn: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Map x [R, A, B, width] to the same; context [R, T, width]; seen [R, A, T]: what a block attends to."""
        rows, anchors, block, _ = x.shape
        u = self.attn_norm(x)
        kernels = self.attn_conv.kernels(u)
        u = self.attn_conv(u, kernels, 0)
        q = turned(self.q_norm(self._split(F.linear(u, self.q))), *block_turn, interleaved=False)
        own_k, own_v = self.keys_values(u, block_turn)  # [R, A, kv, B, dim]
        k, v = self.keys_values(context, turn)  # [R, kv, T, dim]
        share = self.heads // self.kv_heads
        grouped = q.unflatten(2, (self.kv_heads, share))  # [R, A, kv, share, B, dim]
        flat = grouped.permute(0, 2, 1, 3, 4, 5).reshape(rows, self.kv_heads, -1, self.dim)
        past = (flat @ k.mT).view(rows, self.kv_heads, anchors, share * block, -1).permute(0, 2, 1, 3, 4)
        past = past.masked_fill(~seen[:, :, None, None], -math.inf)
        own = grouped.flatten(3, 4) @ own_k.mT  # [R, A, kv, share * B, B]
        weights = (torch.cat((past, own), -1).float() / math.sqrt(self.dim)).softmax(-1).to(x.dtype)
        weights_past, weights_own = weights.split((k.shape[-2], block), -1)
        o = weights_own @ own_v
        o = o + (weights_past.permute(0, 2, 1, 3, 4).flatten(2, 3) @ v).view(
            rows, self.kv_heads, anchors, share * block, self.dim
        ).permute(0, 2, 1, 3, 4)
        o = o.unflatten(3, (share, block)).permute(0, 1, 4, 2, 3, 5).flatten(3)  # [R, A, B, heads * dim]
        x = x + self.attn_conv(F.linear(o, self.o), kernels, 1)
        u = self.ffn_norm(x)
        kernels = self.ffn_conv.kernels(u)
        u = self.ffn_conv(u, kernels, 0)
        u = F.linear(F.silu(F.linear(u, self.gate)) * F.linear(u, self.up), self.down)
        return x + self.ffn_conv(u, kernels, 1)


class Draft(nn.Module):
    def __init__(self, shape: DraftShape, target: Target) -> None:
        super().__init__()
        width = target.width
        if width % shape.conv_group or shape.top_k * (shape.top_k + 1) > width:
            raise ValueError(f"conv_group {shape.conv_group} or top_k {shape.top_k} does not fit a width of {width}")
        self.fc = matrix(width, len(shape.taps) * width)
        self.context_norm, self.norm = Norm(width), Norm(width)
        self.layers = nn.ModuleList(Layer(shape, target) for _ in range(shape.layers))
        self.predecessor = nn.Parameter((torch.randn(target.vocabulary, shape.rank) * 0.5).bfloat16())
        self.successor = nn.Parameter(torch.zeros(target.vocabulary, shape.rank, dtype=torch.bfloat16))
        self.selector = matrix(shape.rank, width)

    def forward(
        self,
        features: Tensor,
        embedded: Tensor,
        seen: Tensor,
        turn: tuple[Tensor, Tensor],
        block_turn: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Normed hidden rows [R, A, B, width] of blocks whose embeddings are given, [R, A, B, width].

        Args:
            features: [R, T, m * width] of the target's layers.
            embedded: an anchor and masks.
            seen: bool [R, A, T], the tokens before each anchor.
            turn: rotary positions [T, dim / 2] of the row.
            block_turn: [R, A, 1, B, dim / 2] of the blocks.
        """
        context = self.context_norm(F.linear(features, self.fc))
        x = embedded
        for layer in self.layers:
            x = layer(x, context, seen, turn, block_turn)
        return self.norm(x)
