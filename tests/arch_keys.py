"""Metadata that architectures have in common, and how models of one kind of layer, of two, of two memories are made."""

from __future__ import annotations

from typing import Any

from arch_models import Arch, G

Keys = dict[str, Any]

MOE: Keys = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "expert_shared_count": 1,
    "expert_shared_feed_forward_length": 32,
    "expert_gating_func": 2,
    "leading_dense_block_count": 1,
}
NARROW: Keys = MOE | {"feed_forward_length": 32}
SWA: Keys = {"attention.sliding_window": 16}
SWA_BY_LAYER: Keys = SWA | {"attention.sliding_window_pattern": [True, False, True, False]}
MROPE: Keys = {"rope.dimension_sections": [2, 3, 3, 0]}
MLA: Keys = {
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 24,
    "attention.kv_lora_rank": 32,
    "attention.key_length": 40,
    "attention.value_length": 32,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 16,
    "rope.dimension_count": 8,
}
INDEXER: Keys = {
    "attention.indexer.head_count": 4,
    "attention.indexer.key_length": 64,
    "attention.indexer.top_k": 8,
    "attention.indexer.block_size": 4,
    "attention.indexer.local_blocks": 1,
    "attention.indexer.kpool": 4,
    "attention.indexer.kpool_select_tail": True,
}
SSM: Keys = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 128,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 8,
    "ssm.group_count": 2,
}
DELTA: Keys = SSM | {"ssm.inner_size": 64, "ssm.time_step_rank": 4, "full_attention_interval": 2}
KDA: Keys = MLA | SSM | {"kda.head_dim": 16, "kda.safe_gate": True, "kda.gate_lower_bound": -5.0}
WKV: Keys = {"attention.head_count": 0, "attention.head_count_kv": 0, "wkv.head_size": 64}
RWKV6: Keys = WKV | {"time_mix_extra_dim": 8, "time_decay_extra_dim": 16}
RWKV7: Keys = WKV | {f"attention.{name}_lora_rank": 8 for name in ("decay", "iclr", "value_residual_mix", "gate")}
STREAMS: Keys = {
    "hyper_connection.count": 4,
    "hyper_connection.sinkhorn_iterations": 2,
    "hyper_connection.epsilon": 1e-6,
    "hyper_connection.low_rank": 8,
}
GRANITE: Keys = {"logit_scale": 0.5, "residual_scale": 0.8, "embedding_scale": 2.0, "attention.scale": 0.2}
CLAMPED: Keys = {"swiglu_clamp_exp": 10.0, "expert_weights_scale": 1.0, "expert_weights_norm": True}

TIED = "token_embd output_norm"
LN = "token_embd output_norm output_norm.b output"


def dense(name: str, layer: str = "attn ffn", keys: Keys | None = None, **more: Any) -> Arch:
    """One kind of layer."""
    return Arch(name, {"a": layer}, "aaaa", keys or {}, **more)


def led(name: str, first: str, rest: str, keys: Keys, **more: Any) -> Arch:
    """A layer without experts before those with them."""
    return Arch(name, {"a": first, "b": rest}, "abbb", keys, **more)


def hybrid(name: str, pattern: str, keys: Keys, layers: dict[str, str], **more: Any) -> Arch:
    """Attention in the layers whose letter is "a" or "e", a recurrent state in others."""
    heads = keys.get("attention.head_count_kv", G)
    kv = {"attention.head_count_kv": [heads if kind in "ae" else 0 for kind in pattern]}
    return Arch(name, layers, pattern, keys | kv, recurrent=True, least=2, **more)
