"""run_many on models of every kind: each reply is that of its own run()."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from arch_table import ARCHS
from laws import Models, assert_near_tie, check_accounting, first_difference
from tiny import DRAFTS, SAID, Draft, Target

import pyllama_dflash as pd

TARGET = Target(weights="Q8_0")
LENGTHS = (1, 3, 60, 7, 20, 2, 33)
PROMPTS = [[SAID[(i * (at + 1)) % len(SAID)] for i in range(n)] for at, n in enumerate(LENGTHS)]
OPTIONS: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}
RECURRENT = ["qwen35", "qwen3next", "nemotron_h", "jamba", "mamba", "rwkv7", "lfm2", "kimi-linear", "minimax-01"]
OTHERS = ["gemma3", "deepseek2", "qwen2vl", "minimax-m3", "qwen3moe"]


def results_of(spec: pd.Speculator, n_parallel: int, **options: Any) -> list[pd.Result]:
    found = []
    for result in spec.run_many(PROMPTS, n_parallel=n_parallel, **{**OPTIONS, **options}):
        assert result.error is None
        assert result.result is not None
        check_accounting(spec, result.result, **{**OPTIONS, **options})
        found.append(result.result)
    return found


@pytest.mark.parametrize("draft", DRAFTS, ids=str)
def test_every_kind_of_draft(models: Models, draft: Draft) -> None:
    spec = models.get(TARGET, dataclasses.replace(draft, weights="Q8_0"))
    n_accepted = 0
    for prompt, result in zip(PROMPTS, results_of(spec, 3)):
        models.assert_same(TARGET, prompt, result.tokens, models.plain(TARGET, prompt, **OPTIONS).tokens)
        n_accepted += result.stats.draft_n_accepted
    assert n_accepted > 0


@pytest.mark.parametrize("n_max", [0, 1, 3, 7])
@pytest.mark.parametrize(
    "options",
    [
        {"kv_unified": True},
        {"type_k": "q8_0", "type_v": "q8_0", "type_k_draft": "q8_0", "type_v_draft": "q8_0"},
        {"fused_draft": False},
        {"backend_argmax": False, "flash_attn": "off"},
        {"n_ubatch": 4},
        {"n_ctx_draft": 16},
    ],
    ids=str,
)
def test_every_way_to_run_them(models: Models, options: dict[str, Any], n_max: int) -> None:
    spec = models.get(TARGET, Draft(weights="Q8_0"), **options)
    beside = results_of(spec, 4, n_max=n_max)
    for prompt, result in zip(PROMPTS, beside):
        own = spec.run(prompt, n_max=n_max, **OPTIONS)
        if options.keys() & {"type_k", "flash_attn"}:  # sums of a cache in other types, or in another order
            assert len(result.tokens) == len(own.tokens)
        else:
            models.assert_same(TARGET, prompt, result.tokens, own.tokens)
    assert (sum(result.stats.draft_n_accepted for result in beside) > 0) == (n_max > 0)


REFUSED = {("minimax-m3", True)}  # it attends to blocks of one buffer


@pytest.mark.parametrize("unified", [False, True], ids=["split", "unified"])
@pytest.mark.parametrize("name", [*RECURRENT, *OTHERS])
def test_every_kind_of_memory(models: Models, name: str, unified: bool) -> None:
    """States that cannot be cut back, caches with a window, compressed ones, experts."""
    arch = ARCHS[name]
    spec = models.get(arch, kv_unified=unified)
    if (name, unified) in REFUSED:  # one at a time they run
        with pytest.raises((pd.ModelLoadError, ValueError)):
            results_of(spec, 3)
        return
    for prompt, result in zip(PROMPTS, results_of(spec, 3)):
        own = spec.run(prompt, **OPTIONS).tokens
        at = first_difference(result.tokens, own)
        if at is not None:
            rivals = result.tokens[at], own[at]
            assert_near_tie(models.files.path(arch), prompt, own[:at], rivals, n_ctx=512, n_threads=1)
