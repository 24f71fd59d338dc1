"""Architectures with a recurrent state, alone or beside attention."""

from __future__ import annotations

from arch_keys import (
    CLAMPED,
    DELTA,
    GRANITE,
    INDEXER,
    KDA,
    LN,
    MOE,
    MROPE,
    NARROW,
    RWKV6,
    RWKV7,
    SSM,
    STREAMS,
    SWA,
    dense,
    hybrid,
)
from arch_models import Arch

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
            "m": "attn_norm ssm_in=E,2*I ssm_conv1d ssm_x=I,64+2*S ssm_dt=64,R ssm_dt.b ssm_a!=R ssm_d!=R "
            "ssm_dt_norm!=64 ssm_b_norm! ssm_c_norm! ssm_out swiglu post_attention_norm! post_ffw_norm!",
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
