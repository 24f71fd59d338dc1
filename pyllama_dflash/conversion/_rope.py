"""RoPE of a checkpoint as keys of a GGUF file."""

from __future__ import annotations

import math
from typing import Any

from ._config import Lookup

_YARN = {
    "extrapolation_factor": "rope.scaling.yarn_ext_factor",
    "attention_factor": "rope.scaling.yarn_attn_factor",
    "attn_factor": "rope.scaling.yarn_attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}


def rope_of(transformer: Lookup, prefer: str, d_head: int) -> tuple[dict[str, Any], tuple[float, ...]]:
    """Return keys without the architecture's name, and what each frequency is divided by, () for nothing.

    Args:
        transformer: the keys of the draft's decoder; rope_parameters is what transformers 5 writes, rope_theta and
            rope_scaling what its predecessors did.
        prefer: the kind of layer whose parameters count where a checkpoint has them for each.
        d_head: width of a head.

    Raises:
        ModelLoadError: a kind of scaling that llama.cpp has no keys for.
    """
    given = transformer.mapping("rope_parameters") or transformer.mapping("rope_scaling")
    kinds = [
        given[kind] for kind in (prefer, "full_attention", "sliding_attention") if isinstance(given.get(kind), dict)
    ]
    rope = Lookup(transformer.path, kinds[0] if kinds else given, *transformer.values)
    base = rope.number("rope_theta")
    if base is None or base <= 0:
        raise rope.fail(f"rope_theta={base} is not positive; use the config.json that came with the checkpoint")
    keys: dict[str, Any] = {"rope.freq_base": base}
    partial = rope.number("partial_rotary_factor")
    if partial is not None:
        if not 0 < partial <= 1 or int(d_head * partial) % 2:
            raise rope.fail(f"partial_rotary_factor={partial} is no share of a head with an even part; correct it")
        keys["rope.dimension_count"] = int(d_head * partial)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return keys, ()
    factor = rope.number("factor")
    if factor is None or factor <= 0:
        raise rope.fail(f"factor={factor} of RoPE scaling {kind!r} is not positive; correct it")
    if kind == "llama3":
        return keys, _llama3(rope, base, factor, int(d_head * (partial or 1)))
    if kind not in ("linear", "yarn"):
        raise rope.fail(f"RoPE scaling {kind!r} is not supported; known are linear, llama3 and yarn")
    keys |= {"rope.scaling.type": kind, "rope.scaling.factor": factor}
    if kind == "yarn":
        keys["rope.scaling.original_context_length"] = rope.whole("original_max_position_embeddings")
        for name, key in _YARN.items():
            value = rope.number(name)
            if value is not None:
                keys.setdefault(key, value)
    return keys, ()


def _llama3(rope: Lookup, base: float, factor: float, n_rot: int) -> tuple[float, ...]:
    """Leave fast turns alone, slow down slow ones by the factor, and go from one to the other in between."""
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low is None or high is None or not 0 < low < high:
        raise rope.fail(f"low_freq_factor={low} and high_freq_factor={high} do not follow each other; correct them")
    length = rope.whole("original_max_position_embeddings")

    def divisor(i: int) -> float:
        turns: float = length / (2 * math.pi * base ** (2 * i / n_rot))
        if turns > high:
            return 1.0
        if turns < low:
            return factor
        share = (turns - low) / (high - low)
        return 1 / ((1 - share) / factor + share)

    return tuple(map(divisor, range(n_rot // 2)))
