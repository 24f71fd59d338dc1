"""Architectures whose layers all attend to what is in a K/V cache."""

from __future__ import annotations

from arch_keys import (
    CLAMPED,
    GRANITE,
    INDEXER,
    LN,
    MLA,
    MOE,
    MROPE,
    NARROW,
    STREAMS,
    SWA,
    SWA_BY_LAYER,
    TIED,
    dense,
    led,
)
from arch_models import Arch, D, G, H

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
