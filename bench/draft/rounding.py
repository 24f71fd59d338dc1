"""Weights rounded as a GGUF's types would, with values left in floating point."""

from __future__ import annotations

from torch import Tensor

BLOCK = 32  # weights that share a scale


def round_q4_0(weight: Tensor) -> Tensor:
    """Round to Q4_0: sixteen steps of a scale in F16, of which a block's largest weight is -8. Rows fit blocks."""
    parts = weight.unflatten(-1, (-1, BLOCK))
    at = parts.abs().argmax(-1, keepdim=True)
    scale = parts.gather(-1, at) / -8
    inverse = (1 / scale).nan_to_num(0, 0, 0)
    steps = (parts * inverse + 8.5).floor().clamp(0, 15) - 8
    return (steps * scale.half().to(weight.dtype)).flatten(-2)


def round_q8_0(weight: Tensor) -> Tensor:
    """Round to Q8_0: 255 steps of a scale in F16."""
    parts = weight.unflatten(-1, (-1, BLOCK))
    scale = parts.abs().amax(-1, keepdim=True) / 127
    inverse = (1 / scale).nan_to_num(0, 0, 0)
    return ((parts * inverse).round() * scale.half().to(weight.dtype)).flatten(-2)
