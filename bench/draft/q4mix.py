"""Quantise an F16 DFlash2 draft by the q4-mix recipe: python bench/draft/q4mix.py IN.gguf OUT.gguf

Backbone Q4_0; fusion layer, selector and convolution projections Q8_0 (small, and acceptance is lost there first);
norms and convolution bases F32, as llama.cpp requires. Needs the `gguf` package.
"""

from __future__ import annotations

import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

Q8 = ("fc.", "selector_", "attn_conv_proj.", "ffn_conv_proj.")


def type_of(name: str, shape: tuple[int, ...]) -> Type:
    """The type of a tensor by its name; `shape` is numpy's, the row last."""
    if len(shape) == 1 or name.endswith("_conv_base"):
        return Type.F32
    bare = name.split(".", 2)[2] if name.startswith("blk.") else name
    wanted = Type.Q8_0 if bare.startswith(Q8) else Type.Q4_0
    block = gguf.GGML_QUANT_SIZES[wanted][0]
    return wanted if shape[-1] % block == 0 else Type.F16


def quantise(source: str, target: str) -> None:
    """Write `target` with the metadata of `source` and its tensors in the types above."""
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, arch)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind, *items = field.types
        if items:
            writer.add_key_value(key, field.contents(), kind, sub_type=items[0])
        else:
            writer.add_key_value(key, field.contents(), kind)
    for tensor in reader.tensors:
        data = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = type_of(tensor.name, data.shape)
        writer.add_tensor(tensor.name, gguf.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    quantise(*sys.argv[1:])
