"""Write draft checkpoints in Hugging Face's layout: random ones, and what a tiny GGUF draft would have been made of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny import (
    CONV_GROUP,
    CONV_TAPS,
    D_HEAD,
    MASK,
    N_EMBD,
    N_FF,
    N_HEAD,
    N_KV,
    N_VOCAB,
    RANK,
    TOP_K,
    Array,
    Draft,
)

import pyllama_dflash as pd

# Names of a GGUF and z-lab's; those of a layer without its number.
TOP = {
    "token_embd.weight": "embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
}
LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj.weight": "attention_conv.kernel_projection.weight",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj.weight": "mlp_conv.kernel_projection.weight",
}


def hf_name(name: str) -> str:
    if not name.startswith("blk."):
        return TOP[name]
    _, layer, rest = name.split(".", 2)
    return f"layers.{layer}.{LAYER[rest]}"


@dataclass
class Checkpoint:
    """A checkpoint before it is written; dtype: safetensors' name of what the floats are stored in."""

    config: dict[str, Any]
    tensors: dict[str, Array]
    dtype: str = "F32"
    prefix: str = ""
    files: dict[str, bytes] = field(default_factory=dict)

    def write(self, folder: Path, parts: int = 1) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        names = (
            [f"model-{i + 1:05}-of-{parts:05}.safetensors" for i in range(parts)]
            if parts > 1
            else ["model.safetensors"]
        )
        weight_map = {}
        for i, name in enumerate(names):
            mine = dict(list(self.tensors.items())[i::parts])
            stored = {self.prefix + key: stored_as(value, self.dtype) for key, value in mine.items()}
            save_file(stored, folder / name)
            if self.dtype == "BF16":
                rename_type(folder / name, "U16", "BF16")
            weight_map.update(dict.fromkeys(stored, name))
        if parts > 1:
            index = {"metadata": {}, "weight_map": weight_map}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        for name, data in self.files.items():
            (folder / name).write_bytes(data)
        return folder


def stored_as(array: Array, dtype: str) -> Array:
    """Floats in a type; bfloat16, which numpy does not know, as its bits, rounded to nearest, ties to even."""
    array = np.ascontiguousarray(array)
    if array.dtype.kind in "ib":
        return array
    if dtype == "BF16":
        bits = array.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return array.astype({"F32": np.float32, "F16": np.float16}[dtype])


def rename_type(path: Path, old: str, new: str) -> None:
    """Change the type of all tensors of a safetensors file that have one, and not a byte of their data."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + size].replace(f'"dtype":"{old}"'.encode(), f'"dtype":"{new}"'.encode())
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + size :])


def noise(seed: int, *shape: int) -> Array:
    """Numbers between -1/8 and 1/8 that are the same everywhere: a hash of their places, exact in float32."""
    x = np.arange(np.prod(shape), dtype=np.uint64) + np.uint64(seed << 32)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return ((x >> np.uint64(41)).astype(np.int64) - (1 << 22)).astype(np.float32).reshape(shape) / np.float32(1 << 25)


def shapes(version: int, n_layer: int, n_taps: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a draft of the tiny size, as z-lab names them."""
    yield "fc.weight", (N_EMBD, n_taps * N_EMBD)
    yield from ((name, (N_EMBD,)) for name in ("hidden_norm.weight", "norm.weight"))
    if version == 2:
        yield "candidate_selector.predecessor_codebook", (N_VOCAB, RANK)
        yield "candidate_selector.successor_codebook", (N_VOCAB, RANK)
        yield "candidate_selector.hidden_projection.weight", (RANK, N_EMBD)
    for i in range(n_layer):
        q, kv = (N_HEAD * D_HEAD, N_EMBD), (N_KV * D_HEAD, N_EMBD)
        for name, shape in (("q_proj", q), ("k_proj", kv), ("v_proj", kv), ("o_proj", (N_EMBD, q[0]))):
            yield f"layers.{i}.self_attn.{name}.weight", shape
        for name in ("q_norm", "k_norm"):
            yield f"layers.{i}.self_attn.{name}.weight", (D_HEAD,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"layers.{i}.{name}.weight", (N_EMBD,)
        for name, shape in (("gate", (N_FF, N_EMBD)), ("up", (N_FF, N_EMBD)), ("down", (N_EMBD, N_FF))):
            yield f"layers.{i}.mlp.{name}_proj.weight", shape
        for name in ("attention_conv", "mlp_conv") if version == 2 else ():
            yield f"layers.{i}.{name}.base_kernel", (2, CONV_TAPS, N_EMBD)
            yield f"layers.{i}.{name}.kernel_projection.weight", (2 * CONV_TAPS * (N_EMBD // CONV_GROUP), N_EMBD)


def decoder(n_layer: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "vocab_size": N_VOCAB,
        "hidden_size": N_EMBD,
        "intermediate_size": N_FF,
        "num_hidden_layers": n_layer,
        "num_attention_heads": N_HEAD,
        "num_key_value_heads": N_KV,
        "head_dim": D_HEAD,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
    }


SECOND = {
    "conv_kernel_size": CONV_TAPS,
    "conv_group_size": CONV_GROUP,
    "selector_rank": RANK,
    "selector_top_k": TOP_K,
}


def zlab_config(version: int = 2, n_layer: int = 1, ids: tuple[int, ...] = (0,), block: int = 8) -> dict[str, Any]:
    """z-lab's config.json; ids: of the target's layers whose output is read."""
    own = {
        "block_size": block,
        "mask_token_id": MASK,
        "target_layer_ids": list(ids),
        **(SECOND if version == 2 else {}),
    }
    name = "DFlash2DraftModel" if version == 2 else "DFlashDraftModel"
    return {"architectures": [name], "dflash_config": own, **decoder(n_layer)}


def speculators_config(
    version: int = 2, n_layer: int = 1, ids: tuple[int, ...] = (0,), block: int = 8
) -> dict[str, Any]:
    """The same draft as the speculators library describes it."""
    return {
        "architectures": ["DFlash2DraftModel" if version == 2 else "DFlashDraftModel"],
        "speculators_model_type": "dflash2" if version == 2 else "dflash",
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "tiny", "architectures": []}},
        "transformer_layer_config": decoder(n_layer),
        "aux_hidden_state_layer_ids": [i + 1 for i in ids],
        "draft_vocab_size": N_VOCAB,
        "block_size": block,
        "mask_token_id": MASK,
        "sample_from_anchor": False,
        **(SECOND if version == 2 else {}),
    }


def random(version: int = 2, n_layer: int = 1, ids: tuple[int, ...] = (0,), dtype: str = "F32") -> Checkpoint:
    """A checkpoint by z-lab whose tensors are noise."""
    found = enumerate(shapes(version, n_layer, len(ids)))
    return Checkpoint(zlab_config(version, n_layer, ids), {name: noise(i, *shape) for i, (name, shape) in found}, dtype)


def of_draft(like: Draft, style: str = "z-lab") -> Checkpoint:
    """The checkpoint that a tiny draft would have been converted from."""
    file = like.file()
    ids = tuple(layer - 1 for layer in like.layers)
    make = zlab_config if style == "z-lab" else speculators_config
    config = make(like.version, like.n_layer, ids, like.block)
    inner = config.get("transformer_layer_config", config)
    inner["rope_parameters"] = {"rope_theta": 10.0, "rope_type": "default"}
    tensors = {hf_name(name): array for name, array in file.tensors.items() if name != "d2t"}
    if style == "speculators":  # in the way of older ones, which have the target's
        tensors["verifier_lm_head.weight"] = noise(9, N_VOCAB, N_EMBD)
    if like.reduced:
        kept = file.tensors["d2t"]
        known = np.zeros(N_VOCAB, bool)
        known[kept] = True
        tensors |= {"d2t": kept - np.arange(len(kept)), "t2d": known}
        config["draft_vocab_size"] = len(kept)
    return Checkpoint(config, tensors)


def refused(folder: Path, out: Path, target: Path, kind: type[BaseException], message: str, **options: Any) -> None:
    """Converting fails with one sentence, and the folder of the output is as it was."""
    before = sorted(out.parent.iterdir())
    with pytest.raises(kind, match=message) as caught:
        pd.convert(folder, out, target=target, **options)
    assert "\n" not in str(caught.value)
    assert sorted(out.parent.iterdir()) == before
