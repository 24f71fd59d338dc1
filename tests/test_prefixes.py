"""Conversations that take turns on one object keep their speed and their text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from arch_table import ARCHS, draft_reading
from hypothesis import given
from hypothesis import strategies as st
from laws import Models, checked_run
from test_state import LONG, P, assert_equal
from tiny import SAID, Draft, Target

import pyllama_dflash as pd
from pyllama_dflash import _ffi_engine, _prefixes
from pyllama_dflash._prefixes import LEAST_TOKENS, Prefix, Prefixes

TARGET = Target(weights="Q8_0")
DRAFTS = [Draft(), Draft(version=1), Draft(own=True, window=16, block=16)]
X, Y = (LONG * 3)[:600], [(11 * i) % 230 + 3 for i in range(100)]
MEMORIES = ["llama", "gemma3", "qwen35", "jamba", "mamba2", "deepseek4", "minimax-01"]
REPLY: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}

each_draft = pytest.mark.parametrize("draft", DRAFTS, ids=["DFlash2", "DFlash", "own head and window"])
each_graph = pytest.mark.parametrize("fused", [True, False], ids=["our graph", "llama.cpp's"])


def fresh(models: Models, draft: Draft | None, **options: Any) -> pd.Speculator:
    # What was cached came in batches of other sizes than what is evaluated anew. Kernels change at 64 rows.
    return models.fresh(TARGET, draft, **{"n_ubatch": 32, "n_ctx": 1024, **options})


def evaluated(spec: pd.Speculator, prompt: Sequence[int], **options: Any) -> tuple[pd.Result, int]:
    """A reply, and how many tokens its prefill evaluated."""
    before = spec.state.n_prefilled
    result = checked_run(spec, list(prompt), **options)
    return result, spec.state.n_prefilled - before


# one object -----------------------------------------------------------------------------------------------------------


@each_graph
@each_draft
def test_two_conversations_take_turns(models: Models, draft: Draft, fused: bool) -> None:
    """S10 and S18: ten turns of each; a turn evaluates what is new to it, and says what it says alone."""
    options = {"fused_draft": fused}
    with (
        fresh(models, draft, **options) as spec,
        fresh(models, draft, **options) as a,
        fresh(models, draft, **options) as b,
    ):
        texts = [(X, a), (Y, b)]
        said = [list(X), list(Y)]
        for turn in range(20):
            which = turn % 2
            ours, n = evaluated(spec, said[which], **REPLY)
            alone = checked_run(texts[which][1], said[which], **REPLY)
            assert n == (len(texts[which][0]) - 1 if turn < 2 else 3)
            assert_equal(models, said[which], ours, alone)
            assert ours.stats.draft_n_accepted >= 0.7 * alone.stats.draft_n_accepted
            said[which] += [*ours.tokens, 7, turn, 9]
        assert spec.memory.n_prefixes == 1  # the other one is in the cache


@each_draft
def test_a_prefix_with_another_prompt_between(models: Models, draft: Draft) -> None:
    """S11 and S12: P+a, Q, P+b; and drafts stay as good."""
    start = LONG[:160]
    prompts = [[*start, *SAID[:9]], X[300:500], [*start, *SAID[5:17]]]
    with fresh(models, draft) as spec:
        for prompt, n_new in zip(prompts, (168, 199, 11)):
            ours, n = evaluated(spec, prompt, max_tokens=24)
            assert n == n_new
            assert ours.stats.draft_n > 0
            with fresh(models, draft) as other:
                cold = checked_run(other, prompt, max_tokens=24)
            assert_equal(models, prompt, ours, cold)
            assert ours.stats.draft_n_accepted >= 0.7 * cold.stats.draft_n_accepted
        # What was cut to serve another is still there whole.
        spec.prefill(Y)
        assert evaluated(spec, [*prompts[0], 3, 4], max_tokens=4)[1] <= 3


@pytest.mark.parametrize("name", MEMORIES)
@pytest.mark.parametrize("n_max", [4, 0])
def test_every_kind_of_memory_takes_turns(models: Models, name: str, n_max: int) -> None:
    """S9: A then B is B alone; a recurrent state comes back only where the whole of its text does."""
    arch = ARCHS[name]
    draft = draft_reading(1, 3) if n_max else None
    options = {"n_ctx": 512, "n_ubatch": 32}
    with models.fresh(arch, draft, **options) as spec:
        said = [LONG[:150], [5, *LONG[:129]], [9, 9, *LONG[:90]]]
        for turn in range(9):
            which = turn % 3
            ours, n = evaluated(spec, said[which], max_tokens=8, ignore_eos=True)
            assert n == (len(said[which]) - 1 if turn < 3 else 2)
            with models.fresh(arch, draft, **options) as other:
                first = checked_run(other, said[which], max_tokens=8, ignore_eos=True)
            models.assert_same(arch, said[which], ours.tokens, first.tokens)
            said[which] = [*said[which], *ours.tokens, 7, turn]
        half = [*said[0][:100], 1, 2, 3]  # a part of a kept text: only attention can be cut to it
        ours, n = evaluated(spec, half, max_tokens=8, ignore_eos=True)
        assert n == (2 if name == "llama" else 102)
        with models.fresh(arch, draft, **options) as other:
            models.assert_same(arch, half, ours.tokens, checked_run(other, half, max_tokens=8).tokens)
        spec.reset()
        assert evaluated(spec, said[1], max_tokens=1)[1] == len(said[1]) - 1


def test_without_it_nothing_is_kept(models: Models) -> None:
    with fresh(models, Draft(), cache_ram=0) as spec:
        for prompt in (X, Y, X):
            assert evaluated(spec, prompt, **REPLY)[1] == len(prompt) - 1
            assert (spec.memory.n_prefixes, spec.memory.prefix_bytes) == (0, 0)


def test_short_texts_are_evaluated_again(models: Models) -> None:
    """A copy would take longer."""
    n = LEAST_TOKENS
    with fresh(models, Draft()) as spec:
        for prompt, kept in ((X[: n - 1], 0), (Y[:n], 0), (X[: n + 1], 0), (Y[: n + 2], 1), (X[:50], 2)):
            spec.prefill(prompt)
            assert spec.memory.n_prefixes == kept


def test_memory_and_its_limit(models: Models) -> None:
    """The least recently used go first, and what is too long is not kept at all."""
    texts = [[i, *LONG[:199]] for i in range(6)]
    with fresh(models, Draft()) as spec:
        spec.prefill(texts[0])
        one = spec._session.turn.call(lambda: _ffi_engine.state_size(spec._session.engine)) + 4 * 199
        spec._session.kept.limit = 3 * one + 100
        for n, text in enumerate(texts[1:], 1):
            spec.prefill(text)
            memory = spec.memory
            assert memory.n_prefixes == min(n, 3)
            assert memory.prefix_bytes == memory.n_prefixes * one <= spec._session.kept.limit
        # In the cache: 5; kept: 2, 3, 4. Each that comes back makes room for the one that goes.
        for which, n_new in ((2, 0), (3, 0), (0, 199), (5, 0), (4, 199)):
            assert evaluated(spec, texts[which], max_tokens=0)[1] == n_new, which
        spec._session.kept.limit = one - 1
        spec.reset()
        assert spec.memory.prefix_bytes == 0
        for text in texts[:3]:
            spec.prefill(text)
            assert spec.memory.prefix_bytes == 0


def test_the_same_prompt_again_copies_nothing(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    get = _ffi_engine.state_get
    monkeypatch.setattr(_ffi_engine, "state_get", lambda *args: copies.append(args[1]) or get(*args))
    with fresh(models, Draft()) as spec:
        for _ in range(5):
            spec.run(X[:100], max_tokens=80, ignore_eos=True)
        for _ in range(5):
            spec.run([*P, *SAID[:3]], max_tokens=10)
    assert len(copies) <= 2


def test_memory_that_runs_short(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kept texts are the first thing to do without."""
    with fresh(models, Draft()) as spec:
        for prompt in (X, Y):
            spec.prefill(prompt)
        assert spec.memory.n_prefixes == 1

        def none_left(*args: Any) -> Any:
            raise MemoryError("out of memory")

        monkeypatch.setattr(_ffi_engine, "state_get", none_left)
        assert evaluated(spec, [9, *LONG[:149]], max_tokens=2)[1] == 149
        assert spec.memory.n_prefixes == 0


def test_a_text_that_does_not_go_back_is_evaluated(models: Models, caplog: pytest.LogCaptureFixture) -> None:
    with fresh(models, Draft()) as spec:
        for prompt in (X, Y):
            spec.prefill(prompt)
        (kept,) = spec._session.kept._kept.values()
        kept.data[-1] ^= 1
        ours, n = evaluated(spec, [*X, 5], **REPLY)
        assert n == len(X)
        assert "a kept text of 599 tokens is evaluated again: " in caplog.text
        with fresh(models, Draft()) as other:
            assert_equal(models, [*X, 5], ours, checked_run(other, [*X, 5], **REPLY))


def test_reset_and_close_drop_them(models: Models) -> None:
    with fresh(models, Draft()) as spec:
        for prompt in (X, Y):
            spec.prefill(prompt)
        assert spec.memory.n_prefixes == 1
        spec.reset()
        assert (spec.memory.n_prefixes, spec.memory.prefix_bytes) == (0, 0)
        for prompt in (X, Y):
            spec.prefill(prompt)
    assert len(spec._session.kept) == 0


def test_many_prompts_leave_them_alone(models: Models) -> None:
    with fresh(models, Draft()) as spec:
        for prompt in (X, Y):
            spec.prefill(prompt)
        before = spec.memory.prefix_bytes
        assert all(result.error is None for result in spec.run_many([X[50:], Y[20:], X], max_tokens=5))
        assert spec.memory.prefix_bytes == before
        assert evaluated(spec, X, max_tokens=1)[1] == 0


# the store ------------------------------------------------------------------------------------------------------------


def text(*tokens: int, n_bytes: int = 10) -> Prefix:
    return Prefix(np.array(tokens, np.int32), np.zeros(n_bytes, np.uint8))


@given(
    limit=st.integers(0, 120),
    most_cut=st.sampled_from([0, 2, _prefixes._ANY]),
    steps=st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 1), min_size=1, max_size=5)), max_size=30),
)
def test_the_store(limit: int, most_cut: int, steps: list[tuple[bool, list[int]]]) -> None:
    """Never more than the limit; best() is the longest start that can be used; what is used last goes last."""
    store, model = Prefixes(limit, most_cut), list[Prefix]()
    for put, tokens in steps:
        new = text(*tokens)
        if put:
            if not store.covers(new.tokens) and store.make_room(new.n_bytes):
                store.put(new)
                assert list(store._kept.values())[-1] is new
        else:
            found, n = store.best(new.tokens)
            usable = [
                _prefixes.n_shared(kept.tokens, new.tokens)
                for kept in store._kept.values()
                if len(kept.tokens) <= most_cut or list(kept.tokens) == list(new.tokens[: len(kept.tokens)])
            ]
            assert n == max(usable, default=0)
            assert (found is None) == (n == 0)
        model = list(store._kept.values())
        assert store.n_bytes == sum(kept.n_bytes for kept in model) <= max(limit, 0)
        texts = [tuple(kept.tokens) for kept in model]
        assert len(set(texts)) == len(texts)


def test_the_store_drops_the_one_used_least_recently() -> None:
    a, b, c, d = (text(i, i, i, n_bytes=88) for i in range(4))
    store = Prefixes(300)
    for each in (a, b, c):
        assert store.make_room(100)
        store.put(each)
    assert store.covers(a.tokens[:2])
    assert store.make_room(100)
    store.put(d)
    assert list(store._kept.values()) == [c, a, d]
    assert not store.make_room(301)
    assert len(store) == 3


@pytest.mark.parametrize("value", [-1, 2**31, "1", 1.5, None, True])
def test_wrong_limits(models: Models, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="cache_ram"):
        pd.Params(cache_ram=value)


def test_what_is_shared() -> None:
    for a, b, n in (([], [], 0), ([1], [], 0), ([1, 2], [1, 3], 1), ([1, 2, 3], [1, 2], 2), ([4, 4], [4, 4], 2)):
        assert _prefixes.n_shared(np.array(a, np.int32), np.array(b, np.int32)) == n
