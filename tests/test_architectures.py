"""The four laws on tiny random models of every architecture, with drafts that are right up to a place of our choice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from arch_models import Arch
from arch_table import ARCHS, draft_reading
from laws import TINY, Models, checked_run, compare_drafts, first_difference
from tiny import N_VOCAB

import pyllama_dflash as pd

N_MAX, N_TOKENS = 4, 22
PROMPT = [5, 90, 300, 12, 33, 7, 260, 41, 350, 18, 77, 201, 144, 9, 64, 310, 28, 55, 120, 399, 2]  # beyond the windows
UP_TO = [(2, 0, 4, 1, 3), (0, 0, 1, 4, 4), (3, 3, 2)]  # drafted tokens that are right, round by round
DRAFT = draft_reading(1, 3)

archs = pytest.mark.parametrize("arch", ARCHS.values(), ids=repr)


def scripted(text: Sequence[int], at: int, right: int) -> list[int]:
    """The next tokens of a text, one of them wrong."""
    drafted = [*text[at : at + N_MAX], *[0] * N_MAX][:N_MAX]
    if right < N_MAX:
        drafted[right] = (drafted[right] + 1) % N_VOCAB
    return drafted


def check_round(spec: pd.Speculator, drafted: Sequence[int], verdict: pd.Verdict, before: Any, logits: bool) -> None:
    """L1 and L4 of a round."""
    n = len(verdict.accepted)
    assert list(verdict.accepted) == list(drafted[:n]) == list(verdict.chosen[:n])
    assert n == len(drafted) or drafted[n] != verdict.chosen[n]
    assert verdict.bonus == verdict.chosen[n]
    if logits:
        assert list(verdict.chosen) == spec.logits().argmax(axis=1).tolist()
    assert spec.state.anchor == verdict.bonus
    assert spec.state.n_past == before.n_past + n + 1


@archs
def test_text_does_not_depend_on_what_was_drafted(models: Models, arch: Arch) -> None:
    """L1 to L4, and that a wrong token leaves nothing behind: in each round some are right and the next one is not."""
    text = models.plain(arch, PROMPT, max_tokens=N_TOKENS + N_MAX, ignore_eos=True).tokens
    assert len(set(text)) > 3, "a text that says the same thing hides what a wrong state says"
    for on_device in (False, True):
        spec = models.get(arch, n_max=N_MAX, backend_argmax=on_device)
        for up_to in UP_TO[on_device:]:  # each begins with the prompt that the one before has gone on from
            spec.prefill(PROMPT)
            said: list[int] = []
            for right in cycle(up_to):
                same = first_difference(said, text) is None
                drafted, before = scripted(text, len(said), right), spec.state
                verdict = spec.verify(drafted)
                check_round(spec, drafted, verdict, before, logits=not on_device)
                said += [*verdict.accepted, verdict.bonus]
                if same and first_difference(said, text) is None:
                    assert len(verdict.accepted) == right
                if len(said) >= N_TOKENS:
                    break
            models.assert_same(arch, PROMPT, said[:N_TOKENS], text)


@pytest.mark.parametrize("arch", [arch for arch in ARCHS.values() if arch.shown != "none"], ids=repr)
def test_a_draft_that_reads_its_layers_changes_nothing(models: Models, arch: Arch) -> None:
    text = models.plain(arch, PROMPT, max_tokens=N_TOKENS, ignore_eos=True).tokens
    result = checked_run(models.get(arch, DRAFT), PROMPT, max_tokens=N_TOKENS, ignore_eos=True)
    models.assert_same(arch, PROMPT, result.tokens, text)
    assert result.stats.draft_n > 0


@pytest.mark.parametrize("fused", [True, False], ids=["our graph", "llama.cpp's"])
def test_embeddings_that_serve_as_a_head_are_shared(models: Models, tmp_path: Path, fused: bool) -> None:
    """The reference is the same draft with a copy of them as embeddings and head of its own."""
    bitnet = ARCHS["bitnet"]
    own = DRAFT.file()
    own.tensors["token_embd.weight"] = own.tensors["output.weight"] = bitnet.file().tensors["token_embd.weight"]
    shares = models.get(bitnet, DRAFT, fused_draft=fused)
    with pd.Speculator(shares.target.path, own.write(tmp_path / "own.gguf"), fused_draft=fused, **TINY) as owns:
        assert shares.fused_draft is owns.fused_draft is fused
        for spec in (shares, owns):
            spec.prefill(PROMPT)
        drafts = [spec.draft() for spec in (shares, owns)]
        assert len(drafts[0].tokens) == 4
        assert compare_drafts(*drafts, tolerance=1e-5) == 4


def test_a_state_that_the_kernels_overrun_is_refused(tmp_path: Path) -> None:
    """They write 64 numbers at a time, whatever a head's width is."""
    file = ARCHS["rwkv7"].file()
    file.keys["wkv.head_size"] = 16
    with pytest.raises(pd.ModelLoadError, match=r"head_size 16 is no multiple of 64"):
        pd.Model(file.write(tmp_path / "narrow.gguf"))


def test_the_table_has_every_kind_of_state() -> None:
    """As llama.cpp counts them: models with a recurrent state, and those with attention beside it."""
    recurrent = {"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"}
    hybrid = {"jamba", "falcon-h1", "plamo2", "granitehybrid", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe"}
    hybrid |= {"qwen3next", "kimi-linear", "bailingmoe3", "kimi-k3", "glm5-next", "qwen35", "qwen35moe", "qwen4exp"}
    hybrid |= {"deepseek4", "minimax-01"}
    assert {arch.name for arch in ARCHS.values() if arch.recurrent} == recurrent | hybrid
    assert len({arch.name for arch in ARCHS.values()}) >= 115
