"""`python -m bench shape`, run in small on the CPU: random pairs that open, and figures that say what is assumed."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from benching import bench, records
from gguf import GGMLQuantizationType as Type

import pyllama_dflash as pd
from bench.gpu import blocks, files, given, pair, shape


def test_shape_measures_a_tiny_pair_and_says_what_is_assumed(tmp_path: Path) -> None:
    small = ["--shape", "tiny", "--ctx", 512, "--tokens", 48, "--prompt", 64, "--depth", 96, "--repeats", 1]
    more = ["--threads", 1, "--gpu-layers", 0, "--bandwidth", 100, "--type-k", "q8_0", "--type-v", "q8_0"]
    code, out, err = bench("shape", "--out", tmp_path, "--models", tmp_path / "models", *small, *more)
    assert code == 0, err
    rows = records(tmp_path / "shape.jsonl")
    kinds = [row["record"] for row in rows]
    assert kinds[:4] == ["provenance", "shape", "opened", "check"]
    assert rows[3]["n_distinct"] > rows[3]["n_rows"] // 4
    widths = {(row["what"], row["width"], row["depth"]) for row in rows if row["record"] == "width"}
    assert widths >= {("bare", 16, 96), ("verify", 8, 0), ("draft", 8, 96), ("bare", 1, 0)}
    runs = {row["loop"]: row for row in rows if row["record"] == "run"}
    assert runs["plain"]["predicted_n"] == runs["ours"]["predicted_n"] == 48
    assert runs["ours"]["draft_n_accepted"] < 10  # random weights agree by chance only
    for row in (row for row in rows if row["record"] == "given"):
        assert abs(row["mean_len"] - row["wanted"]) < 0.7  # of eight to ten rounds
        assert row["n_slips"] <= 1
    assert "acceptance assumed" in out
    assert "acceptance given by hand" in out
    assert "its weights alone" in out


@pytest.mark.parametrize("kind", list(blocks.MAKERS))
def test_random_blocks_have_the_deviation_asked_for(kind: Type) -> None:
    std = 5120**-0.5
    made = blocks.MAKERS[kind](np.random.default_rng(1), 4000, std)
    values = gguf.dequantize(made, kind).ravel()
    assert np.isfinite(values).all()
    assert values.std() == pytest.approx(std, rel=0.02)
    assert abs(values.mean()) < 0.02 * std


def test_types_are_those_of_q4_k_m_and_q4_mix() -> None:
    s = shape.SHAPES["27b"]
    target = {tensor.name: tensor for tensor in pair.target_tensors(s)}
    assert target["output.weight"].kind == Type.Q6_K
    for name in ("attn_v", "ffn_down"):
        assert sum(target[f"blk.{i}.{name}.weight"].kind == Type.Q6_K for i in range(64)) == 32
    draft = {tensor.name: tensor.kind for tensor in pair.draft_tensors(s)}
    assert draft["blk.0.ffn_up.weight"] == Type.Q4_0
    assert draft["fc.weight"] == draft["blk.4.attn_conv_proj.weight"] == Type.Q8_0
    assert draft["blk.0.attn_conv_base"] == Type.F32
    n_bytes = sum(blocks.n_bytes(tensor.kind, tensor.shape) for tensor in target.values())
    assert 14.5e9 < n_bytes < 15.5e9


def test_a_pair_is_written_once(tmp_path: Path) -> None:
    tiny = shape.SHAPES["tiny"]
    first = files.write(tiny, tmp_path, seed=3, pool_bytes=1 << 20)
    written = first.target.stat().st_mtime_ns
    assert files.write(tiny, tmp_path, seed=3, pool_bytes=1 << 20).target.stat().st_mtime_ns == written
    assert files.write(tiny, tmp_path, seed=4, pool_bytes=1 << 20).target != first.target
    assert not list(tmp_path.glob("*.part"))
    with pd.Model(first.target) as model:
        assert model.tokenize(" abcd")[0] == model.tokenize(" ax")[0]  # text falls into pairs of letters


@pytest.mark.parametrize("n_accepted", [0.0, 2.6, 4.25, 7.0])
def test_counts_of_accepted_tokens_have_the_mean_asked_for(n_accepted: float) -> None:
    found = given.counts(n_accepted, 7, 200, np.random.default_rng(0))
    assert set(found) <= set(range(8))
    assert np.mean(found) == pytest.approx(n_accepted, abs=0.05)
