"""Write a checkpoint as a DFlash2 GGUF in F16 with the target's tokenizer, to be quantised; read a draft's weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch

from .config import Settings

NAMES = {
    "fc": "fc.weight",
    "context_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "predecessor": "selector_predecessor.weight",
    "successor": "selector_successor.weight",
    "selector": "selector_hidden.weight",
}
LAYER = {
    "attn_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "q_norm.weight": "attn_q_norm.weight",
    "k_norm.weight": "attn_k_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "attn_conv.base": "attn_conv_base",
    "ffn_conv.base": "ffn_conv_base",
    "attn_conv.proj": "attn_conv_proj.weight",
    "ffn_conv.proj": "ffn_conv_proj.weight",
}
LEFT_OUT = ("tokenizer.chat_template", "tokenizer.ggml.mask_token_id")


def export(settings: Settings, out: Path) -> Path:
    """Write `out`/draft-f16.gguf from `out`/checkpoint.pt and return its path."""
    master = torch.load(out / "checkpoint.pt", map_location="cpu", weights_only=True)["master"]
    target = gguf.GGUFReader(settings.target)
    arch = target.fields["general.architecture"].contents()

    def of(name: str, default: object = None) -> object:
        field = target.fields.get(f"{arch}.{name}")
        return default if field is None else field.contents()

    shape, heads = settings.draft, of("attention.head_count")
    width = of("embedding_length")
    writer = gguf.GGUFWriter(path := out / "draft-f16.gguf", "dflash")
    writer.add_name(settings.name)
    writer.add_license(settings.license)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ff)
    writer.add_head_count(heads)
    writer.add_head_count_kv(of("attention.head_count_kv"))
    dim = of("attention.key_length", width // heads)  # type: ignore[operator]
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(of("rope.freq_base", 10000.0))
    for key, value in (
        ("block_size", shape.block),
        ("conv_kernel_size", shape.conv_kernel),
        ("conv_group_size", shape.conv_group),
        ("selector_rank", shape.rank),
        ("selector_top_k", shape.top_k),
    ):
        writer.add_uint32(f"dflash.{key}", value)
    writer.add_array("dflash.target_layers", shape.taps)
    if shape.vocabulary:
        writer.add_array("dflash.draft_vocab", frequent(out, shape.vocabulary))
    for key, field in target.fields.items():
        if key.startswith("tokenizer.") and key not in LEFT_OUT:
            kind, *items = field.types
            writer.add_key_value(key, field.contents(), kind, *items)
    writer.add_mask_token_id(shape.mask_token)
    for name, weight in master.items():
        data = weight.float().numpy()
        writer.add_tensor(_name(name), data.astype(np.float16) if data.ndim == 2 else data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    """Read the weights of a draft's file as a checkpoint names them, float32; quantised ones are dequantised."""
    names = {_name(name): name for name in NAMES}
    names |= {f"blk.{index}.{LAYER[part]}": f"layers.{index}.{part}" for index in range(256) for part in LAYER}
    tensors = gguf.GGUFReader(path).tensors
    return {names[t.name]: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy()).float() for t in tensors}


def frequent(out: Path, n: int) -> list[int]:
    """Ids of the n tokens that the target wrote most often, ascending; of equals the lower."""
    counts = np.sum([np.load(path) for path in sorted(out.glob("counts-*.npy"))], axis=0)
    return sorted(np.argsort(-counts, kind="stable")[:n].tolist())


def _name(name: str) -> str:
    if name.startswith("layers."):
        _, index, part = name.split(".", 2)
        return f"blk.{index}.{LAYER[part]}"
    return NAMES[name]
