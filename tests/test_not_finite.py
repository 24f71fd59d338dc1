"""A text whose numbers overflow ends with itself: what comes after it, or beside it, is what it would be without it.

Attention goes on to read what lies in its unused cells, and multiplies it by zero where it does not go the way of flash
attention: there it takes a reset().
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from arch_models import Arch
from arch_table import ARCHS
from laws import Models
from tiny import EOS, SAID, Draft, File, Target

import pyllama_dflash as pd

HARMLESS = [(7 * i) % 240 for i in range(40)]
SPOILT = [EOS if i % 4 == 1 else token for i, token in enumerate(HARMLESS)]
TEXT = [(11 * i + 3) % 240 for i in range(21)]
OPTIONS: dict[str, Any] = {"max_tokens": 12}

CUT = [ARCHS[name] for name in ("llama", "gemma3", "deepseek2", "minimax-m3")]
RECURRENT = [arch for arch in ARCHS.values() if arch.recurrent]
# Its attention multiplies what it does not choose by zero.
BESIDE = [arch for arch in RECURRENT if arch.name != "glm5-next"]


@dataclass(frozen=True)
class Overflowing:
    """A model whose end of a reply, which is never read back, makes all it touches infinite, or no number."""

    like: Any

    def file(self) -> File:
        out: File = self.like.file()
        out.tensors["token_embd.weight"][EOS] = float("inf")
        return out


def after(spec: pd.Speculator, first: Sequence[int]) -> tuple[int, ...]:
    """The reply to TEXT of an object that has answered another prompt."""
    said = spec.run(first, **OPTIONS).tokens
    assert first is HARMLESS or set(said) == {0}
    return spec.run(TEXT, **OPTIONS).tokens


def beside(spec: pd.Speculator, first: Sequence[int]) -> list[tuple[int, ...]]:
    """Replies to TEXT beside another prompt, and after it in its sequence."""
    results = list(spec.run_many([first, TEXT, TEXT, TEXT], n_parallel=2, **OPTIONS))
    return [result.result.tokens for result in results[1:] if result.result]


@pytest.mark.parametrize("arch", RECURRENT, ids=repr)
def test_a_state_that_is_not_finite_ends_with_its_text(models: Models, arch: Arch) -> None:
    said = []
    for like, first in ((arch, HARMLESS), (Overflowing(arch), SPOILT)):
        with models.fresh(like, cache_ram=0) as spec:
            said.append(after(spec, first))
    assert said[0] == said[1]


@pytest.mark.parametrize("arch", BESIDE, ids=repr)
def test_a_state_that_is_not_finite_is_one_sequences(models: Models, arch: Arch) -> None:
    said = []
    for like, first in ((arch, HARMLESS), (Overflowing(arch), SPOILT)):
        with models.fresh(like) as spec:
            said.append(beside(spec, first))
    assert len(said[0]) == 3
    assert said[0] == said[1]


@pytest.mark.parametrize("arch", [*CUT, *RECURRENT], ids=repr)
def test_reset_forgets_what_attention_multiplies_by_zero(models: Models, arch: Arch) -> None:
    said = []
    for like, first in ((arch, HARMLESS), (Overflowing(arch), SPOILT)):
        with models.fresh(like, flash_attn="off") as spec:
            spec.run(first, **OPTIONS)
            spec.reset()
            said.append(spec.run(TEXT, **OPTIONS).tokens)
    assert said[0] == said[1]


@pytest.mark.parametrize("arch", [*CUT, *RECURRENT], ids=repr)
def test_reset_forgets_it_in_all_sequences(models: Models, arch: Arch) -> None:
    said = []
    for like, first in ((arch, HARMLESS), (Overflowing(arch), SPOILT)):
        with models.fresh(like, flash_attn="off") as spec:
            list(spec.run_many([first, first], n_parallel=2, **OPTIONS))
            spec.reset()
            said.append([result.result.tokens for result in spec.run_many([TEXT, TEXT], **OPTIONS) if result.result])
    assert len(said[0]) == 2
    assert said[0] == said[1]


@pytest.mark.parametrize("fused", [True, False], ids=["own graph", "llama.cpp's"])
@pytest.mark.parametrize("version", [1, 2])
def test_reset_forgets_what_a_draft_has_read(models: Models, version: int, fused: bool) -> None:
    """Its features were no numbers, and so are the keys and values it made of them."""
    found = []
    for like, first in ((Target(), HARMLESS), (Overflowing(Target()), SPOILT)):
        with models.fresh(like, Draft(version=version), flash_attn="off", fused_draft=fused) as spec:
            assert spec.run(first, **OPTIONS).stats.draft_n_accepted or first is SPOILT
            spec.reset()
            found.append(spec.run(SAID[:9], max_tokens=30, ignore_eos=True))
    assert found[0].stats.draft_n_accepted > 0
    assert found[0].tokens == found[1].tokens
    assert found[0].stats.histogram == found[1].stats.histogram


def test_reset_forgets_what_run_many_has_cached(models: Models) -> None:
    with models.fresh(Target()) as spec:

        def cached() -> list[int]:
            found = list(spec.run_many([TEXT, TEXT[::-1]], n_parallel=2, **OPTIONS))
            return [one.result.stats.prompt_n_cached for one in found if one.result]

        assert cached() == [0, 0]
        assert cached() == [len(TEXT) - 1] * 2
        spec.reset()
        assert cached() == [0, 0]
