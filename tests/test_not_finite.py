"""A text that makes caches and states overflow spoils itself and none after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arch_table import ARCHS
from laws import TINY
from tiny import SAID, Draft, Files, Target

import pyllama_dflash as pd

BAD = 7  # a token whose embedding is no number
RECURRENT = ("mamba", "mamba2", "rwkv7", "jamba", "qwen35", "lfm2", "nemotron_h", "falcon-h1", "kimi-linear")
FINE = [token for token in SAID if token != BAD][:12]
OPTIONS: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}


def spoiled(files: Files, like: Any, folder: Path) -> Path:
    file = like.file()
    embeddings = file.tensors["token_embd.weight"].copy()
    embeddings[BAD] = np.nan
    file.tensors["token_embd.weight"] = embeddings
    if "output.weight" not in file.tensors:
        file.tensors["output.weight"] = like.file().tensors["token_embd.weight"]
    return file.write(folder / "spoiled.gguf")


@pytest.fixture(params=["on", "off"], ids=["flash_attn", "products"])
def flash_attn(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("name", RECURRENT)
def test_a_new_sequence_begins_with_zeros(files: Files, tmp_path: Path, name: str) -> None:
    """Without reset(): what is there of a recurrent state is not multiplied by zero but overwritten."""
    path = spoiled(files, ARCHS[name], tmp_path)
    with pd.Speculator(path, **TINY) as spec:
        own = spec.run(FINE, **OPTIONS).tokens
    with pd.Speculator(path, cache_ram=0, **TINY) as spec:
        assert len(set(spec.run([*FINE[:5], BAD, 3], **OPTIONS).tokens)) == 1  # of no numbers the first is chosen
        assert spec.run(FINE, **OPTIONS).tokens == own
        assert len(set(own)) > 1


@pytest.mark.parametrize("like", [Target(), ARCHS["gemma3"], ARCHS["qwen35"]], ids=repr)
def test_reset_leaves_numbers_in_all_cells(files: Files, tmp_path: Path, like: Any, flash_attn: str) -> None:
    """Attention as a product with a mask reads the cells that are masked, too."""
    path = spoiled(files, like, tmp_path)
    with pd.Speculator(path, flash_attn=flash_attn, **TINY) as spec:
        own = spec.run(FINE, **OPTIONS).tokens
    with pd.Speculator(path, flash_attn=flash_attn, cache_ram=0, **TINY) as spec:
        spec.run([*FINE * 4, BAD, 3], **OPTIONS)
        spec.reset()
        assert spec.run(FINE, **OPTIONS).tokens == own


@pytest.mark.parametrize("fused_draft", [True, False])
def test_so_does_the_drafts(files: Files, tmp_path: Path, flash_attn: str, fused_draft: bool) -> None:
    target, draft = Target(), Draft(weights="Q8_0")
    pair = spoiled(files, target, tmp_path), files.path(draft)
    options = {"flash_attn": flash_attn, "fused_draft": fused_draft, "cache_ram": 0, **TINY}
    with pd.Speculator(*pair, **options) as spec:
        own = spec.run(FINE, **OPTIONS)
    assert own.stats.draft_n_accepted > 0
    with pd.Speculator(*pair, **options) as spec:
        spec.run([*FINE * 4, BAD, 3], **OPTIONS)
        spec.reset()
        found = spec.run(FINE, **OPTIONS)
        assert (found.tokens, found.stats.histogram) == (own.tokens, own.stats.histogram)


def test_reset_forgets_what_run_many_keeps(files: Files) -> None:
    with pd.Speculator(files.path(Target(weights="Q8_0")), **TINY) as spec:

        def cached() -> list[int]:
            found = list(spec.run_many([FINE, FINE[::-1]], n_parallel=2, **OPTIONS))
            return [one.result.stats.prompt_n_cached for one in found if one.result]

        assert cached() == [0, 0]
        assert cached() == [len(FINE) - 1] * 2
        spec.reset()
        assert cached() == [0, 0]
