"""The architectures of arch_models.py."""

from __future__ import annotations

from typing import Any

from arch_models import Arch, D, G, H

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


DENSE = [
    dense("llama", shown="all"),
    *map(dense, ["deci", "baichuan", "refact", "qwen2", "internlm2", "xverse", "exaone", "smollm3", "mistral3"]),
    dense("ernie4_5"),
    dense("minicpm", keys={"residual_scale": 0.7}, scale=0.1),
    dense("paddleocr", keys=MROPE),
    dense("nanbeige", shown="all"),
    dense("qwen3", "attn qk ffn", shown="all"),
    dense("hunyuan-dense", "attn qk ffn", shown="all"),
    dense("hunyuan_vl", "attn qk ffn", MROPE, shown="all"),
    dense("maincoder", "attn qk ffn"),
    dense("qwen2vl", keys=MROPE),
    dense("qwen3vl", "attn qk ffn", MROPE),
    dense("qwen3vl", "attn qk ffn", MROPE | {"n_deepstack_layers": 1}, least=2, note="qwen3vl-deepstack"),
    dense("falcon", "fused attn_norm.b attn_norm_2 ffn_up ffn_down", ends=LN, mean=True),
    *(dense(name, "gpt", ends=LN + " position_embd", mean=True) for name in ("gpt2", "starcoder")),
    dense("gptneox", "gpt", {"use_parallel_residual": True}, ends=LN, mean=True),
    dense("gptneox", "gpt", {"use_parallel_residual": False}, ends=LN, mean=True, note="gptneox-sequential"),
    dense("bloom", "gpt", ends=LN + " token_embd_norm token_embd_norm.b", mean=True),
    dense("jais", "gpt ffn_gate ffn_gate.b", ends=LN, mean=True),
    dense("jais2", "attn attn_output.b mlp attn_norm.b", ends=LN, mean=True),
    dense("mpt", "fused attn_k_norm=E updown", ends="token_embd output_norm output position_embd", mean=True),
    dense("stablelm", "attn attn_q_norm=D,H attn_k_norm=D,K//D ffn attn_norm.b", ends=LN, mean=True),
    dense("phi2", "attn attn_norm.b attn_output.b mlp -ffn_norm -ffn_norm.b", ends=LN + " output.b", mean=True),
    dense("phi3", "attn swiglu", SWA),
    dense("plamo", "attn ffn -ffn_norm"),
    dense("plamo3", "fused qk swiglu post_attention_norm! post_ffw_norm!", SWA),
    dense("codeshell", "attn attn_norm.b attn_output.b mlp", ends=LN, mean=True),
    dense("starcoder2", "attn attn_norm.b attn_output.b mlp", ends=LN, mean=True),
    dense("orion", "attn ffn ln", ends=LN, mean=True),
    dense("nemotron", "attn updown ln", ends=LN, mean=True),
    dense(
        "minicpm3",
        "mla -attn_k_b -attn_v_b attn_kv_b ffn",
        MLA | {"attention.head_count_kv": H, "attention.key_length": 24, "attention.value_length": 16},
        scale=0.1,
        least=4,
    ),
    dense("gemma", ends=TIED, scale=0.05),
    dense("gemma2", "attn post ffn", SWA, ends=TIED, scale=0.05),
    dense("gemma3", "attn qk post ffn", SWA, scale=0.1),
    dense(
        "gemma4",
        "attn qk post ffn inp_gate proj post_norm",
        SWA_BY_LAYER
        | {
            "attention.key_length_swa": D,
            "attention.value_length_swa": D,
            "embedding_length_per_layer_input": 16,
            "attention.shared_kv_layers": 0,
            "rope.freq_base_swa": 1000.0,
        },
        scale=0.1,
        shown="all",
        least=2,
        ends="token_embd output_norm output per_layer_model_proj per_layer_proj_norm per_layer_token_embd rope_freqs",
    ),
    dense("command-r", "attn ffn -ffn_norm", {"logit_scale": 0.5}, ends=TIED, mean=True),
    dense("cohere2", "attn ffn -ffn_norm", SWA | {"logit_scale": 0.5}, ends=TIED, mean=True),
    dense("olmo", "attn ffn -attn_norm -ffn_norm", ends="token_embd output", norm="", mean=True),
    dense("olmo2", "attn -attn_norm qk_all post ffn -ffn_norm", SWA),
    dense("openelm", "fused qk ffn", ends=TIED, scale=0.3),
    dense("chatglm", "attn swiglu"),
    dense("glm4", "attn post swiglu", MROPE),
    dense("bitnet", "attn attn_sub_norm ffn ffn_sub_norm", ends=TIED, scale=0.3),
    dense("exaone4", "attn -attn_norm qk post ffn -ffn_norm", SWA),
    dense("granite", keys=GRANITE),
    dense("granite_swa", "attn attn_sinks ffn", GRANITE | SWA_BY_LAYER),
    dense("arcee", "attn updown"),
    dense("seed_oss", "attn post_attention_norm ffn -ffn_norm"),
    dense(
        "apertus", "attn qk updown", {"xielu.alpha_n": 1.0, "xielu.alpha_p": 1.0, "xielu.beta": 0.5, "xielu.eps": 1e-6}
    ),
    dense("cogvlm", "fused attn_qkv=E,3*Q ffn vis_attn_output vis_attn_qkv vis_down vis_gate vis_up"),
    dense("pangu-embedded", "attn attn_output.b ffn"),
    dense(
        "talkie",
        "attn attn_q_norm=1,H ffn layer_output_scale -attn_norm -ffn_norm",
        SWA | {"logit_scale": 0.5},
        ends="token_embd output",
        norm="",
    ),
    dense("qwen", "fused attn_qkv=E,3*Q attn_qkv.b=3*Q ffn_norm ffn_gate=E,48 ffn_up=E,48 ffn_down=48,E"),
    dense("muse-glimmer", "attn qk post attn_gate ffn", SWA_BY_LAYER | {"logit_scale": 0.5}, shown="all"),
    dense("spark2_5", "attn gate_heads ffn", SWA_BY_LAYER),
]
EXPERTS = [
    Arch(
        "llama4",
        {"a": "attn ffn", "b": "attn moe shared"},
        "ababa",
        MOE | SWA | {"interleave_moe_layer_step": 2},
        least=4,
    ),
    dense("grok", "attn moe ffn attn_output_norm layer_output_norm", NARROW, scale=0.02),
    dense("qwen2moe", "attn moe shared ffn_gate_inp_shexp", MOE),
    dense("qwen3moe", "attn qk moe", MOE, shown="all"),
    dense("qwen3vlmoe", "attn qk moe", MOE | MROPE | {"n_deepstack_layers": 1}, least=2),
    dense("phimoe", "attn attn_output.b moe ln", NARROW, ends=LN + " output.b"),
    dense("dbrx", "fused attn_output_norm moe -ffn_norm", NARROW | {"attention.clamp_kqv": 8.0}, mean=True),
    dense("olmoe", "attn qk_all moe_wide", NARROW | {"attention.head_count_kv": H}),
    dense("arctic", "attn moe ffn_norm_exps ffn_gate=E,E ffn_up=E,E ffn_down=E,E", NARROW),
    led("deepseek", "attn ffn", "attn moe shared", MOE),
    led(
        "glm4moe",
        "attn qk post_attention_norm ffn -ffn_norm",
        "attn qk post_attention_norm moe shared exp_probs_b.b -ffn_norm",
        MOE | MROPE,
    ),
    led("exaone-moe", "attn qk ffn", "attn qk moe shared", MOE | SWA),
    dense("bailingmoe", "attn moe shared", MOE),
    led("bailingmoe2", "fused qk ffn", "fused qk moe shared", MOE),
    led("dots1", "attn qk ffn", "attn qk moe shared", MOE | {"attention.head_count_kv": H}),
    led("afmoe", "attn qk post attn_gate ffn", "attn qk post attn_gate moe shared exp_probs_b.b", MOE | SWA, scale=0.1),
    led("ernie4_5-moe", "attn ffn", "attn moe shared", MOE | {"interleave_moe_layer_step": 1}),
    dense("hunyuan-moe", "attn qk moe shared", NARROW),
    led("hy_v3", "attn qk ffn", "attn qk moe shared", NARROW),
    dense(
        "gpt-oss",
        "attn attn_output.b attn_sinks post_attention_norm moe -ffn_norm ffn_gate_inp.b ffn_gate_exps.b "
        "ffn_up_exps.b ffn_down_exps.b",
        MOE | SWA,
        shown="all",
    ),
    dense("smallthinker", "attn moe", MOE),
    dense(
        "grovemoe",
        "attn qk moe ffn_gate_chexps ffn_up_chexps ffn_down_chexps",
        MOE | {"expert_group_scale": 0.5, "experts_per_group": 2, "expert_chunk_feed_forward_length": 16},
    ),
    dense("minimax-m2", "attn qk_all moe exp_probs_b.b", NARROW, shown="all"),
    led(
        "minimax-m3",
        "attn qk ffn",
        "attn qk moe shared exp_probs_b.b indexer_msa indexer.q_proj=E,128",
        MOE | INDEXER | {"attention.indexer.head_count": G, "rope.dimension_count": 8},
        least=2,
    ),
    dense("mimo2", "attn attn_sinks moe", MOE | SWA_BY_LAYER, shown="all"),
    dense("step35", "attn qk gate_heads moe shared", MOE | SWA_BY_LAYER),
    dense("mellum", "attn qk moe", MOE | SWA),
    led("laguna", "attn qk gate_heads ffn", "attn qk gate_heads moe shared exp_probs_b.b", MOE | SWA, least=2),
    dense("maple", "attn qk moe", MOE | SWA_BY_LAYER | {"swiglu_clamp_exp": 7.0}),
    led(
        "cohere2moe",
        "attn ffn -ffn_norm",
        "attn moe shared -ffn_norm",
        MOE | SWA_BY_LAYER | {"logit_scale": 0.5},
    ),
    dense("granitemoe", "attn moe shared", NARROW | GRANITE),
    led("mistral4", "mla ffn", "mla moe shared", MOE | MLA),
    led("deepseek2", "mla ffn", "mla moe shared", MOE | MLA),
    led("deepseek32", "mla indexer ffn", "mla indexer moe shared", MOE | MLA | INDEXER),
    led(
        "glm-dsa", "mla indexer -indexer.k_norm.b ffn", "mla indexer -indexer.k_norm.b moe shared", MOE | MLA | INDEXER
    ),
    Arch(
        "dots3note",
        {
            "a": "mla gate_heads attn_k_norm=P ffn",
            "b": "mla indexer gate_heads attn_k_norm=P moe shared exp_probs_b.b",
            "c": "mla gate_heads attn_k_norm=P moe shared exp_probs_b.b",
        },
        "abcb",
        MOE
        | MLA
        | INDEXER
        | SWA_BY_LAYER
        | {"attention.indexer.types": [0, 1, 0, 1], "rope.freq_base_swa": 1000.0}
        | {
            f"attention.{key}_swa": MLA[f"attention.{key}"]
            for key in ("kv_lora_rank", "key_length", "value_length", "key_length_mla", "value_length_mla")
        },
        least=2,
    ),
]
STREAMS_OF_THEIR_OWN = [
    dense(
        "gemma3n",
        "attn qk post ffn altup",
        SWA,
        scale=0.1,
        shown="none",
        ends="token_embd output_norm output altup_proj altup_unembd_proj per_layer_model_proj=E,256*Y "
        "per_layer_proj_norm=256 per_layer_token_embd=256*Y,V",
    ),
    Arch(
        "hrm_text",
        {"a": "attn -attn_norm attn_gate ffn -ffn_norm", "b": ""},
        "aabbbb",
        {"hrm.layers_per_stack": 1, "hrm.h_cycles": 2, "hrm.l_cycles": 2},
        ends="token_embd output hrm.z_l_init!",
        norm="",
        shown="none",
    ),
    Arch(
        "hy_v4",
        {
            "a": "mla hc_short indexer attn_gate attn_sinks ffn",
            "b": "mla hc_short attn_gate attn_sinks moe shared",
            "c": "mla hc_short indexer attn_gate attn_sinks moe shared",
        },
        "abcb",
        MOE
        | MLA
        | INDEXER
        | STREAMS
        | CLAMPED
        | {"hyper_connection.magnitude": 2.0, "attention.indexer.types": [1, 0, 1, 0]},
        shown="none",
        ends="token_embd output_norm output output_hc_base output_hc_fn output_hc_scale",
    ),
]
RECURRENT = [
    dense("mamba", "mamba", SSM, recurrent=True),
    dense("mamba2", "mamba2", SSM, recurrent=True),
    dense(
        "rwkv6",
        "rwkv6 rwkv_mix channel_mix_lerp_r channel_mix_receptance time_mix_first=W,E//W",
        RWKV6 | {"token_shift_count": 2},
        ends=LN + " token_embd_norm token_embd_norm.b",
        mean=True,
        recurrent=True,
    ),
    dense("rwkv6qwen2", "rwkv6 ffn", RWKV6 | {"token_shift_count": 1}, recurrent=True),
    dense(
        "rwkv7",
        "rwkv7 rwkv_mix",
        RWKV7 | {"token_shift_count": 2},
        ends=LN + " token_embd_norm token_embd_norm.b",
        mean=True,
        recurrent=True,
    ),
    dense("arwkv7", "rwkv7 ffn time_mix_ln", RWKV7 | {"token_shift_count": 1}, recurrent=True),
]
HYBRID = [
    hybrid("jamba", "mama", SSM, {"m": "mamba ffn ssm_b_norm ssm_c_norm ssm_dt_norm=R", "a": "attn ffn"}),
    dense("falcon-h1", "mamba2 attn ffn -ffn_norm ffn_norm!", SSM, recurrent=True),
    hybrid(
        "plamo2",
        "mama",
        SSM | {"ssm.group_count": 0},
        {
            "m": "attn_norm ssm_in=E,2*I ssm_conv1d ssm_x=I,64+2*S ssm_dt=64,R ssm_dt.b ssm_a!=R ssm_d!=R ssm_dt_norm!=64 "
            "ssm_b_norm! ssm_c_norm! ssm_out swiglu post_attention_norm! post_ffw_norm!",
            "a": "fused attn_q_norm=D,H attn_k_norm=D,K//D swiglu post_attention_norm! post_ffw_norm!",
        },
    ),
    hybrid("granitehybrid", "mama", SSM | GRANITE, {"m": "mamba2 ffn", "a": "attn ffn"}),
    hybrid(
        "lfm2",
        "mama",
        {"shortconv.l_cache": 3},
        {"m": "conv ffn", "a": "attn qk ffn"},
        ends="token_embd token_embd_norm output",
        norm="token_embd_norm",
        shown="all",
    ),
    hybrid(
        "lfm2moe",
        "mene",
        MOE | {"shortconv.l_cache": 3},
        {"m": "conv ffn", "n": "conv moe exp_probs_b.b", "e": "attn qk moe exp_probs_b.b"},
        ends="token_embd token_embd_norm output",
        norm="token_embd_norm",
        shown="all",
    ),
    hybrid(
        "nemotron_h",
        "mafm",
        SSM | {"feed_forward_length": [0, 0, 96, 0]},
        {"m": "mamba2", "a": "attn", "f": "attn_norm ffn_up ffn_down"},
        shown="all",
    ),
    hybrid(
        "nemotron_h_moe",
        "mafm",
        MOE | SSM | {"feed_forward_length": [0, 0, 96, 0]},
        {
            "m": "mamba2",
            "a": "attn",
            "f": "attn_norm ffn_gate_inp ffn_up_exps ffn_down_exps exp_probs_b.b ffn_up_shexp ffn_down_shexp",
        },
        shown="all",
    ),
    Arch(
        "qwen3next",
        {
            "m": "delta ssm_in=E,I+2*N*S+I ssm_ba=E,2*H post_attention_norm moe -ffn_norm shared "
            "ffn_gate_inp_shexp -attn_qkv -attn_gate",
            "a": "gated_attn post_attention_norm moe -ffn_norm shared ffn_gate_inp_shexp",
        },
        "mama",
        MOE | DELTA,
        shown="all",
        recurrent=True,
        least=2,
    ),
    Arch(
        "qwen35",
        {
            "m": "delta ssm_alpha ssm_beta post_attention_norm ffn -ffn_norm",
            "a": "gated_attn post_attention_norm ffn -ffn_norm",
        },
        "mama",
        DELTA | MROPE,
        shown="all",
        recurrent=True,
        least=2,
    ),
    Arch(
        "qwen35moe",
        {
            "m": "delta ssm_alpha ssm_beta post_attention_norm moe -ffn_norm shared ffn_gate_inp_shexp",
            "a": "gated_attn post_attention_norm moe -ffn_norm shared ffn_gate_inp_shexp",
        },
        "mama",
        MOE | DELTA | MROPE,
        shown="all",
        recurrent=True,
        least=2,
    ),
    Arch(
        "qwen4exp",
        {
            "m": "delta -attn_norm ssm_alpha ssm_beta moe -ffn_norm shared ffn_gate_inp_shexp hc_low",
            "a": "gated_attn -attn_norm moe -ffn_norm shared ffn_gate_inp_shexp hc_low indexer_msa",
        },
        "mama",
        MOE | DELTA | MROPE | INDEXER | STREAMS | {"attention.compress_ratios": [4, 4, 4, 4]},
        shown="none",
        recurrent=True,
        ends="token_embd output output_hc_norm output_hc_down output_hc_up",
    ),
    hybrid(
        "kimi-linear",
        "mene",
        MOE | KDA,
        {
            "m": "kda ssm_g_a ssm_g_b ssm_a!=1,H,1,1 ffn",
            "n": "kda ssm_g_a ssm_g_b ssm_a!=1,H,1,1 moe shared exp_probs_b.b",
            "e": "attn_norm attn_q=E,24*H attn_kv_a_mqa attn_kv_a_norm "
            "attn_k_b attn_v_b attn_output moe shared exp_probs_b.b",
        },
    ),
    hybrid(
        "bailingmoe3",
        "mene",
        MOE | KDA,
        {
            "m": "kda -ssm_f_b ssm_f_a=E,Q ssm_g_a=E,Q ssm_a!=1,H ffn",
            "n": "kda -ssm_f_b ssm_f_a=E,Q ssm_g_a=E,Q ssm_a!=1,H moe shared exp_probs_b.b",
            "e": "mla gate_heads moe shared exp_probs_b.b",
        },
        shown="all",
    ),
    hybrid(
        "kimi-k3",
        "mene",
        MOE
        | KDA
        | {
            "attn_res.block_size": 2,
            "activation.situ_beta": 4.0,
            "activation.situ_linear_beta": 25.0,
            "expert_latent_length": 24,
        },
        {
            "m": "kda ssm_g attn_res_score ffn_res_score ffn",
            "n": "kda ssm_g attn_res_score ffn_res_score latent_moe",
            "e": "mla attn_gate attn_res_score ffn_res_score latent_moe",
        },
        shown="none",
        ends="token_embd output_norm output output_res_score",
    ),
    hybrid(
        "glm5-next",
        "mene",
        MOE
        | KDA
        | INDEXER
        | STREAMS
        | {"rope.dimension_count": 0, "attention.key_length": 32, "attention.compress_ratios": [4, 4, 4, 4]},
        {
            "m": "kda hc ssm_g_a ssm_g_b ffn",
            "n": "kda hc ssm_g_a ssm_g_b moe shared exp_probs_b.b",
            "e": "mla hc indexer moe shared exp_probs_b.b indexer_compressor_ape indexer_compressor_gate",
        },
        shown="none",
    ),
    Arch(
        "deepseek4",
        {
            "a": "dsv4",
            "b": "dsv4 attn_compressor_ape=32,4 attn_compressor_gate=E,32 attn_compressor_kv=E,32 "
            "attn_compressor_norm=16 indexer.attn_q_b indexer.proj indexer_compressor_ape=128,4 "
            "indexer_compressor_gate=E,128 indexer_compressor_kv=E,128 indexer_compressor_norm=64",
            "c": "dsv4 attn_compressor_ape=16,128 attn_compressor_gate=E,16 attn_compressor_kv=E,16 "
            "attn_compressor_norm=16",
        },
        "bcab",
        MOE
        | INDEXER
        | STREAMS
        | CLAMPED
        | {
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": 24,
            "attention.output_group_count": 2,
            "attention.output_lora_rank": 16,
            "attention.compress_ratios": [4, 128, 0, 4],
            "attention.compress_rope_freq_base": 1000.0,
            "hash_layer_count": 0,
            "expert_gating_func": 4,
            "rope.dimension_count": 8,
        }
        | SWA,
        shown="all",
        recurrent=True,
        least=2,
        ends="token_embd output_norm output output_hc_base output_hc_fn output_hc_scale",
    ),
    Arch(
        "minimax-01",
        {"m": "attn_norm attn_qkv=E,3*Q attn_output attn_gate attn_norm_2 moe_wide", "a": "attn moe_wide"},
        "mama",
        NARROW | {"residual_scale": 3.5, "full_attention_interval": 2},
        shown="all",
        recurrent=True,
        least=4,
    ),
]
ARCHS = {repr(arch): arch for arch in DENSE + EXPERTS + STREAMS_OF_THEIR_OWN + RECURRENT + HYBRID}


def draft_reading(*layers: int, **keys: Any) -> Arch:
    """A DFlash draft with random weights that reads these layers of any of them."""
    own = {"block_size": 5, "target_layers": list(layers), "attention.causal": False}
    ends = f"enc.output_norm output_norm fc={len(layers)}*E,E"
    return Arch("dflash", {"a": "attn qk ffn"}, "a", own | keys, ends=ends, note=f"draft{layers}")
