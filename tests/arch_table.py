"""The architectures that tests run over, and a draft for any of them."""

from __future__ import annotations

from typing import Any

from arch_attention import DENSE, EXPERTS, STREAMS_OF_THEIR_OWN
from arch_models import Arch
from arch_states import HYBRID, RECURRENT

ARCHS = {repr(arch): arch for arch in DENSE + EXPERTS + STREAMS_OF_THEIR_OWN + RECURRENT + HYBRID}


def draft_reading(*layers: int, **keys: Any) -> Arch:
    """A DFlash draft with random weights that reads these layers of any of them."""
    own = {"block_size": 5, "target_layers": list(layers), "attention.causal": False}
    ends = f"enc.output_norm output_norm fc={len(layers)}*E,E"
    return Arch("dflash", {"a": "attn qk ffn"}, "a", own | keys, ends=ends, note=f"draft{layers}")
