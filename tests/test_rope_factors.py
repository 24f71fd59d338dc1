"""A target with RoPE factors for a short and for a long context: n_ctx chooses, however many sequences there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import D_HEAD, SAID, Draft, Files, Target

import pyllama_dflash as pd

ORIGINAL = 256
PROMPTS = [[SAID[7 * i % len(SAID)] for i in range(n)] for n in (60, 40, 20)]
REPLY: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = Target(weights="Q8_0").file()
    file.keys |= {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": ORIGINAL}
    file.tensors["rope_factors_short.weight"] = np.ones(D_HEAD // 2, np.float32)
    file.tensors["rope_factors_long.weight"] = np.linspace(1, 40, D_HEAD // 2).astype(np.float32)
    return file.write(tmp_path_factory.mktemp("longrope") / "target.gguf")


def replies(target: Path, n_ctx: int, draft: Path | None = None, **options: Any) -> list[tuple[int, ...]]:
    """What run() says, and run_many() as well, however many go side by side."""
    with pd.Speculator(target, draft, n_ctx=n_ctx, n_threads=1, cache_ram=0, **options) as spec:
        alone = [spec.run(prompt, **REPLY).tokens for prompt in PROMPTS]
        for n_parallel in (1, 2, 3):
            together = spec.run_many(PROMPTS, n_parallel=n_parallel, **REPLY)
            assert [one.result and one.result.tokens for one in together] == alone
    return alone


@pytest.mark.parametrize("options", [{}, {"n_max": 4}, {"kv_unified": True}], ids=str)
def test_texts_side_by_side_are_those_of_each_alone(target: Path, options: dict[str, Any]) -> None:
    """There the context is as large as the prompts need, and has room for drafts."""
    short, long = ([replies(target, n_ctx, **options) for n_ctx in pair] for pair in ((200, 256), (257, 2000)))
    assert short[0] == short[1] != long[0] == long[1]


def test_with_a_draft(target: Path, files: Files) -> None:
    draft = files.path(Draft(weights="Q8_0"))
    for n_ctx in (256, 300):
        assert replies(target, n_ctx, draft) == replies(target, n_ctx)


def test_a_saved_text_goes_on_with_the_same_ones(target: Path, alone: Path) -> None:
    options: dict[str, Any] = {"n_threads": 1, "cache_ram": 0}
    for n_ctx, said in ((256, "up to 256"), (300, "beyond 256")):
        with pd.Speculator(target, n_ctx=n_ctx, **options) as spec:
            spec.run(PROMPTS[0], **REPLY)
            spec.save(alone / "text")
            text = spec.load(alone / "text")
            expected = spec.run([*text, 5], **REPLY).tokens
        with pd.Speculator(target, n_ctx=556 - n_ctx, **options) as spec:
            with pytest.raises(ValueError, match=f"was written with n_ctx {said}, where .*; open with such an n_ctx"):
                spec.load(alone / "text")
        with pd.Speculator(target, n_ctx={256: 200, 300: 2000}[n_ctx], **options) as spec:
            assert spec.load(alone / "text") == text
            assert spec.run([*text, 5], **REPLY).tokens == expected
