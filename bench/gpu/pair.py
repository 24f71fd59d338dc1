"""The outline of a target and its DFlash2 draft: names, shapes and types of all tensors, keys, a synthetic vocabulary.

The target is dense (arch qwen3) with the types that llama.cpp's Q4_K_M gives; the draft has its q4-mix types.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from gguf import GGMLQuantizationType as Type
from gguf import TokenType

from pyllama_dflash.recipes import RECIPES, fitting, type_of

from .shape import Shape

CONTROL = ("<bos>", "<eos>", "<mask>")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
N_TRAINED = 131072  # tokens of context


@dataclass(frozen=True)
class Tensor:
    """A tensor to be written: `shape` is numpy's, the row last; std is that of its values, 0 for ones."""

    name: str
    shape: tuple[int, ...]
    kind: Type
    std: float = 0.0


def _kind(recipe: str, tensor: Tensor, n_layer: int, is_draft: bool) -> Type:
    wanted = type_of(RECIPES[recipe], tensor.name, n_layer, is_draft=is_draft)
    return Type.F32 if wanted is None else Type[fitting(wanted, tensor.shape[-1]).upper()]


def _matrix(name: str, n_out: int, n_in: int, scale: float = 1.0) -> Tensor:
    return Tensor(name, (n_out, n_in), Type.F32, scale / math.sqrt(n_in))


def target_tensors(s: Shape) -> Iterator[Tensor]:
    """Embeddings have deviation 1, matrices 1/sqrt(n_in), norms are 1: activations keep their size."""
    for tensor in _target_tensors(s):
        yield replace(tensor, kind=_kind("q4-k-m", tensor, s.n_layer, is_draft=False))


def _target_tensors(s: Shape) -> Iterator[Tensor]:
    yield Tensor("token_embd.weight", (s.n_vocab, s.n_embd), Type.F32, 1.0)
    yield Tensor("output_norm.weight", (s.n_embd,), Type.F32)
    yield _matrix("output.weight", s.n_vocab, s.n_embd)
    for i in range(s.n_layer):
        yield from _layer(i, s.n_embd, s.n_head, s.n_kv, s.d_head, s.n_ff)


def _layer(i: int, n_embd: int, n_head: int, n_kv: int, d_head: int, n_ff: int) -> Iterator[Tensor]:
    """What a layer of a Qwen3 target and of a draft have in common."""
    for name, n in (("attn_norm", n_embd), ("ffn_norm", n_embd), ("attn_q_norm", d_head), ("attn_k_norm", d_head)):
        yield Tensor(f"blk.{i}.{name}.weight", (n,), Type.F32)
    sizes = {
        "attn_q": (n_head * d_head, n_embd),
        "attn_k": (n_kv * d_head, n_embd),
        "attn_v": (n_kv * d_head, n_embd),
        "attn_output": (n_embd, n_head * d_head),
        "ffn_gate": (n_ff, n_embd),
        "ffn_up": (n_ff, n_embd),
        "ffn_down": (n_embd, n_ff),
    }
    for name, (n_out, n_in) in sizes.items():
        # attention's averages are much the same at all positions, and would take over within sixty layers
        scale = 0.5 if name == "attn_output" else 1.0
        yield _matrix(f"blk.{i}.{name}.weight", n_out, n_in, scale)


def draft_tensors(s: Shape) -> Iterator[Tensor]:
    """Neither embeddings nor a head: it uses the target's."""
    for tensor in _draft_tensors(s):
        yield replace(tensor, kind=_kind("q4-mix", tensor, s.draft_layer, is_draft=True))


def _draft_tensors(s: Shape) -> Iterator[Tensor]:
    yield _matrix("fc.weight", s.n_embd, s.n_embd * s.draft_taps)
    for name in ("enc.output_norm.weight", "output_norm.weight"):
        yield Tensor(name, (s.n_embd,), Type.F32)
    for name in ("selector_predecessor.weight", "selector_successor.weight"):
        yield Tensor(name, (s.n_vocab, s.draft_rank), Type.F32, s.draft_rank**-0.25)
    yield _matrix("selector_hidden.weight", s.draft_rank, s.n_embd)
    n_kernels = 2 * s.draft_conv_taps * (s.n_embd // s.draft_conv_group)
    for i in range(s.draft_layer):
        yield from _layer(i, s.n_embd, s.draft_head, s.draft_kv, s.draft_d_head, s.draft_ff)
        for part in ("attn", "ffn"):
            yield Tensor(f"blk.{i}.{part}_conv_base", (2, s.draft_conv_taps, s.n_embd), Type.F32)
            yield _matrix(f"blk.{i}.{part}_conv_proj.weight", n_kernels, s.n_embd, 0.1)


def target_keys(s: Shape) -> dict[str, Any]:
    return _keys(s.n_layer, s.n_embd, s.n_head, s.n_kv, s.d_head, s.n_ff)


def draft_keys(s: Shape) -> dict[str, Any]:
    keys = _keys(s.draft_layer, s.n_embd, s.draft_head, s.draft_kv, s.draft_d_head, s.draft_ff)
    keys |= {"block_size": s.draft_block, "target_layers": s.target_layers, "attention.causal": False}
    keys |= {"conv_kernel_size": s.draft_conv_taps, "conv_group_size": s.draft_conv_group}
    if s.draft_window:
        keys["attention.sliding_window"] = s.draft_window
        keys["attention.sliding_window_pattern"] = [i < s.draft_layer - 1 for i in range(s.draft_layer)]
    return keys | {"selector_rank": s.draft_rank, "selector_top_k": s.draft_top_k}


def _keys(n_layer: int, n_embd: int, n_head: int, n_kv: int, d_head: int, n_ff: int) -> dict[str, Any]:
    return {
        "context_length": N_TRAINED,
        "embedding_length": n_embd,
        "block_count": n_layer,
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_kv,
        "attention.key_length": d_head,
        "attention.value_length": d_head,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": d_head,
        "rope.freq_base": 1e7,
    }


def tokenizer(n_vocab: int) -> dict[str, Any]:
    """A byte-level vocabulary that splits text into pairs of letters, filled up with words that no text reaches."""
    merges = [f"{a} {b}" for a in LETTERS for b in LETTERS] + [f"Ġ {a}" for a in LETTERS]
    tokens = [*_byte_letters(), *(merge.replace(" ", "") for merge in merges)]
    n_filler = n_vocab - len(tokens) - len(CONTROL)
    assert n_filler >= 0, f"n_vocab={n_vocab} is below the {len(tokens) + len(CONTROL)} tokens that it starts from"
    tokens += [f"w{i}" for i in range(n_filler)]
    kinds = [int(TokenType.NORMAL)] * len(tokens) + [int(TokenType.CONTROL)] * len(CONTROL)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, *CONTROL],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": n_vocab - 3,
        "tokenizer.ggml.eos_token_id": n_vocab - 2,
        "tokenizer.ggml.mask_token_id": n_vocab - 1,
        "tokenizer.ggml.add_bos_token": False,
    }


def _byte_letters() -> list[str]:
    """The printable stand-in of each byte in a byte-level vocabulary."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    stand_in = iter(range(256, 512))
    return [chr(byte if byte in plain else next(stand_in)) for byte in range(256)]
