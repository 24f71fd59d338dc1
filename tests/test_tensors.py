"""A file's tensors by group: each has one, and none is counted twice."""

from __future__ import annotations

from tiny import Draft, Files

import pyllama_dflash as pd
from pyllama_dflash.models import DRAFT, shipped
from pyllama_dflash.tensors import GROUPS, group_of


def test_a_draft_with_tables_of_its_own_has_their_groups(files: Files) -> None:
    found = pd.inspect(files.path(Draft(reduced=True, rare="rope_freqs", weights="Q8_0")))
    types = {(group.name, group.type) for group in found.tensors}
    assert types >= {("embeddings", "Q8_0"), ("head", "Q8_0"), ("head", "I64"), ("other", "F32"), ("norms", "F32")}
    assert types >= {("convolutions", "Q8_0"), ("convolutions", "F32"), ("backbone", "Q8_0"), ("fc", "Q8_0")}


def test_each_tensor_has_a_group() -> None:
    names = {
        "backbone": ("blk.0.attn_q.weight", "blk.11.ffn_down.weight", "blk.1.attn_q.bias", "blk.2.ssm_conv1d.weight"),
        "norms": ("blk.0.attn_norm.weight", "blk.0.attn_q_norm.weight", "enc.output_norm.weight", "output_norm.weight"),
        "convolutions": ("blk.0.attn_conv_base", "blk.3.ffn_conv_proj.weight"),
        "selector": ("selector_hidden.weight", "selector_predecessor.weight"),
        "fc": ("fc.weight",),
        "embeddings": ("token_embd.weight",),
        "head": ("output.weight", "d2t"),
        "other": ("rope_freqs.weight", "x", ""),
    }
    assert {group: [group_of(name) for name in some] for group, some in names.items()} == {
        group: [group] * len(some) for group, some in names.items()
    }
    assert set(names) == set(GROUPS)


def test_the_bundled_draft() -> None:
    path = shipped(DRAFT)
    assert path is not None
    found = pd.inspect(path)
    groups = {(group.name, group.type): group.n_tensors for group in found.tensors}
    assert groups == {
        ("backbone", "Q4_0"): 35,
        ("fc", "Q4_0"): 1,
        ("selector", "Q4_0"): 2,
        ("selector", "Q8_0"): 1,
        ("convolutions", "Q8_0"): 10,
        ("convolutions", "F32"): 10,
        ("norms", "F32"): 22,
    }
    assert (found.kind, found.mask_text, found.shares) == ("dflash2", "<empty_output>", ("embeddings", "head"))
    assert (found.info.selector_rank, found.info.selector_top_k, found.info.block_size) == (32, 16, 8)
