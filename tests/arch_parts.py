"""What the layers of tiny models of many architectures are made of: tensors, their shapes, and what goes together.

A shape is written as in a GGUF file, the row first, in symbols that dims() finds from the model's metadata. A name
ending in ".b" is a bias, one ending in "!" has no suffix, every other name stands for a weight.
"""

from __future__ import annotations

from typing import Any

SHAPES = {
    name: shape
    for shape, names in {
        "E,V": "token_embd output",
        "V": "output.b",
        "E,C": "position_embd",
        "E": "output_norm output_norm.b token_embd_norm token_embd_norm.b attn_norm attn_norm.b attn_norm_2 "
        "attn_norm_2.b ffn_norm ffn_norm.b ffn_norm! ffn_norm_exps post_attention_norm post_ffw_norm "
        "post_attention_norm! post_ffw_norm! attn_output_norm layer_output_norm attn_sub_norm attn_output.b "
        "ffn_down.b ffn_gate_inp_shexp time_mix_ln time_mix_ln.b time_mix_decay time_mix_w0 time_mix_a0 "
        "time_mix_v0 time_mix_k_k time_mix_k_a time_mix_r_k attn_res_score ffn_res_score output_res_score "
        "post_norm altup_router_norm altup_correct_scale laurel_post_norm hrm.z_l_init! enc.output_norm",
        "E,Q": "attn_q attn_gate ssm_g",
        "E,K": "attn_k attn_v",
        "Q,E": "attn_output",
        "E,Q+2*K": "attn_qkv",
        "Q+2*K": "attn_qkv.b",
        "D": "attn_q_norm attn_k_norm",
        "H": "attn_sinks",
        "E,F": "ffn_gate ffn_up channel_mix_key vis_gate vis_up",
        "F,E": "ffn_down channel_mix_value vis_down",
        "F": "ffn_gate.b ffn_up.b ffn_sub_norm",
        "E,X": "ffn_gate_inp ffn_down_exps.b",
        "X": "ffn_gate_inp.b exp_probs_b.b",
        "E,T,X": "ffn_gate_exps ffn_up_exps",
        "T,E,X": "ffn_down_exps",
        "T,X": "ffn_gate_exps.b ffn_up_exps.b",
        "E,T": "ffn_gate_shexp ffn_up_shexp",
        "T,E": "ffn_down_shexp",
        "E,16,2": "ffn_gate_chexps ffn_up_chexps",
        "16,E,2": "ffn_down_chexps",
        "E,24": "attn_q_a ffn_routed_down",
        "24": "attn_q_a_norm ffn_routed_norm hc_attn_base hc_ffn_base",
        "24,E": "ffn_routed_up",
        "24,24*H": "attn_q_b",
        "E,L+P": "attn_kv_a_mqa",
        "L": "attn_kv_a_norm",
        "L,32*H": "attn_kv_b",
        "24-P,L,H": "attn_k_b",
        "L,16,H": "attn_v_b",
        "E,64": "indexer.attn_k indexer.k_proj indexer_compressor_gate laurel_l",
        "64,E": "laurel_r",
        "24,64*4": "indexer.attn_q_b",
        "64": "indexer.k_norm indexer.k_norm.b indexer.q_norm",
        "E,4": "indexer.proj altup_router hc_attn_norm hc_ffn_norm output_hc_norm",
        "64,4": "indexer_compressor_ape",
        "4,I+2*N*S": "ssm_conv1d",
        "I+2*N*S": "ssm_conv1d.b",
        "E,2*I+2*N*S+R": "ssm_in",
        "R": "ssm_dt.b",
        "1,R": "ssm_a! ssm_d!",
        "S": "ssm_b_norm ssm_c_norm ssm_b_norm! ssm_c_norm!",
        "I//N,N": "ssm_norm",
        "I,E": "ssm_out",
        "E,H": "ssm_alpha ssm_beta",
        "4,1,Q,1": "ssm_conv1d_q ssm_conv1d_k ssm_conv1d_v",
        "E,16": "ssm_f_a ssm_g_a inp_gate time_mix_decay_w1",
        "16,E": "proj time_mix_decay_w2",
        "16,Q": "ssm_f_b ssm_g_b",
        "4*E,24": "hc_attn_fn hc_ffn_fn",
        "3": "hc_attn_scale hc_ffn_scale",
        "4*E,4": "output_hc_fn hc_attn_inject hc_ffn_inject",
        "4": "output_hc_base",
        "1": "output_hc_scale layer_output_scale",
        "4*E,8": "hc_attn_down hc_ffn_down output_hc_down",
        "8,4*E": "hc_attn_up hc_ffn_up output_hc_up",
        "3,E": "shortconv.conv",
        "E,3*E": "shortconv.in_proj vis_attn_qkv",
        "E,E": "shortconv.out_proj time_mix_key time_mix_value time_mix_receptance time_mix_gate time_mix_output "
        "channel_mix_receptance vis_attn_output",
        "E,1,1": "time_mix_lerp_x channel_mix_lerp_k channel_mix_lerp_r",
        "E,8": "time_mix_w1 time_mix_a1 time_mix_v1 time_mix_g1",
        "8,E": "time_mix_w2 time_mix_a2 time_mix_v2 time_mix_g2",
        "E,1,1,6": "time_mix_lerp_fused",
        "E,E,3": "altup_proj altup_unembd_proj",
        "4,4": "altup_correct_coef",
        "4,16": "altup_predict_coef",
        "E,16*Y": "per_layer_model_proj",
        "16*Y,V": "per_layer_token_embd",
        "16": "per_layer_proj_norm",
        "D//2": "rope_freqs",
    }.items()
    for name in names.split()
}

# A part is made of tensors and of other parts; "name=shape" is a tensor of another shape than above.
PARTS = {
    "attn": "attn_norm attn_q attn_k attn_v attn_output",
    "fused": "attn_norm attn_qkv attn_output",
    "qk": "attn_q_norm attn_k_norm",
    "qk_all": "attn_q_norm=Q attn_k_norm=K",
    "gate_heads": "attn_gate=E,H",
    "mla": "attn_norm attn_q_a attn_q_a_norm attn_q_b attn_kv_a_mqa attn_kv_a_norm attn_k_b attn_v_b attn_output",
    "indexer": "indexer.attn_k indexer.attn_q_b indexer.k_norm indexer.k_norm.b indexer.proj",
    "indexer_msa": "indexer.k_norm indexer.k_proj indexer.q_norm indexer.q_proj=E,64*H",
    "ffn": "ffn_norm ffn_gate ffn_up ffn_down",
    "swiglu": "ffn_norm ffn_up=E,2*F ffn_down",
    "updown": "ffn_norm ffn_up ffn_down",
    "mlp": "updown ffn_norm.b ffn_up.b ffn_down.b",
    "ln": "attn_norm.b ffn_norm.b",
    "gpt": "fused attn_norm.b attn_qkv.b attn_output.b mlp",
    "post": "post_attention_norm post_ffw_norm",
    "moe": "ffn_norm ffn_gate_inp ffn_gate_exps ffn_up_exps ffn_down_exps",
    "shared": "ffn_gate_shexp ffn_up_shexp ffn_down_shexp",
    "moe_wide": "ffn_norm ffn_gate_inp ffn_gate_exps=E,F,X ffn_up_exps=E,F,X ffn_down_exps=F,E,X",
    "mamba": "attn_norm ssm_in=E,2*I ssm_conv1d=4,I ssm_conv1d.b=I ssm_x=I,R+2*S ssm_dt=R,I ssm_dt.b=I ssm_a!=S,I "
    "ssm_d!=I ssm_out",
    "mamba2": "attn_norm ssm_in ssm_conv1d ssm_conv1d.b ssm_dt.b ssm_a! ssm_d! ssm_norm ssm_out",
    "delta": "attn_norm attn_qkv=E,I+2*N*S attn_gate=E,I ssm_conv1d ssm_dt.b ssm_a!=R ssm_norm=S ssm_out",
    "gated_attn": "attn attn_q=E,2*Q qk",
    "kda": "attn attn_k=E,Q attn_v=E,Q ssm_conv1d_q ssm_conv1d_k ssm_conv1d_v ssm_f_a ssm_f_b ssm_a!=H ssm_dt.b=Q "
    "ssm_beta ssm_norm=D",
    "conv": "attn_norm shortconv.conv shortconv.in_proj shortconv.out_proj",
    "rwkv6": "attn_norm time_mix_w1=E,8*5 time_mix_w2=8,E,5 time_mix_lerp_x time_mix_lerp_fused=E,1,1,5 time_mix_decay "
    "time_mix_decay_w1 time_mix_decay_w2 time_mix_key time_mix_value time_mix_receptance time_mix_gate time_mix_output",
    "rwkv7": "attn_norm time_mix_w0 time_mix_w1 time_mix_w2 time_mix_a0 time_mix_a1 time_mix_a2 time_mix_v0 "
    "time_mix_v1 time_mix_v2 time_mix_g1 time_mix_g2 time_mix_lerp_fused time_mix_k_k time_mix_k_a time_mix_r_k "
    "time_mix_key time_mix_value time_mix_receptance time_mix_output",
    "rwkv_mix": "attn_norm.b attn_norm_2 attn_norm_2.b channel_mix_key channel_mix_lerp_k channel_mix_value "
    "time_mix_ln time_mix_ln.b",
    "latent_moe": "ffn_norm ffn_gate_inp ffn_gate_exps=24,T,X ffn_up_exps=24,T,X ffn_down_exps=T,24,X ffn_routed_down "
    "ffn_routed_norm ffn_routed_up shared exp_probs_b.b",
    "hc": "hc_attn_fn hc_attn_scale hc_attn_base hc_ffn_fn hc_ffn_scale hc_ffn_base",
    "hc_short": "hc hc_attn_fn=4*E,8 hc_attn_scale=2 hc_attn_base=8 hc_ffn_fn=4*E,8 hc_ffn_scale=2 hc_ffn_base=8",
    "hc_low": "hc_attn_norm hc_attn_down hc_attn_up hc_attn_inject hc_ffn_norm hc_ffn_down hc_ffn_up hc_ffn_inject",
    "altup": "altup_correct_coef altup_correct_scale altup_predict_coef altup_router altup_router_norm laurel_l "
    "laurel_r laurel_post_norm inp_gate=E,256 proj=256,E post_norm",
    "dsv4": "attn_norm attn_q_a attn_q_a_norm attn_q_b=24,Q attn_kv=E,K attn_kv_a_norm=D attn_output_a=32,16,2 "
    "attn_output_b=32,E attn_sinks hc moe shared exp_probs_b.b",
}


def expand(spec: str) -> dict[str, str]:
    """Shapes, in symbols, of the tensors that a description names; what comes later stands, "-name" takes one out."""
    out: dict[str, str] = {}
    for item in spec.split():
        name, _, shape = item.partition("=")
        if name.startswith("-"):
            del out[name[1:]]
        elif name in PARTS:
            out |= expand(PARTS[name])
        else:
            out[name] = shape or SHAPES[name]
    return out


def dims(keys: dict[str, Any], n_vocab: int) -> dict[str, int]:
    """What the symbols stand for in a model with this metadata."""

    def most(key: str) -> int:
        value = keys.get(key, 0)
        return max(value, default=0) if isinstance(value, list) else value

    latent = "attention.kv_lora_rank" in keys
    out = {
        "E": most("embedding_length"),
        "V": n_vocab,
        "Y": most("block_count"),
        "C": most("context_length"),
        "F": most("feed_forward_length"),
        "H": most("attention.head_count"),
        "D": 16 if latent else most("attention.key_length"),
        "L": most("attention.kv_lora_rank"),
        "P": most("rope.dimension_count"),
        "X": most("expert_count"),
        "T": most("expert_feed_forward_length"),
        "I": most("ssm.inner_size"),
        "S": most("ssm.state_size"),
        "R": most("ssm.time_step_rank"),
        "N": most("ssm.group_count"),
        "W": most("wkv.head_size"),
    }
    out["Q"], out["K"] = out["H"] * out["D"], most("attention.head_count_kv") * out["D"]
    return out


def shape_of(shape: str, symbols: dict[str, int]) -> tuple[int, ...]:
    """A shape in numbers, the row first."""
    return tuple(int(eval(dim, {}, symbols)) for dim in shape.split(",") if dim)  # noqa: S307  our own text


def name_of(tensor: str) -> str:
    """A tensor's name as the file has it, without its layer."""
    if tensor.endswith("!"):
        return tensor[:-1]
    return tensor[:-2] + ".bias" if tensor.endswith(".b") else tensor + ".weight"
