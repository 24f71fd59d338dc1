"""What one call leaves behind changes nothing in the next but the work that it saves."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import TINY, Models, assert_near_tie, checked_run, first_difference
from tiny import N_VOCAB, SAID, Draft, Target

import pyllama_dflash as pd

TARGET = Target(weights="Q8_0")
DRAFTS = [Draft(), Draft(version=1), Draft(own=True, window=16, block=16)]
LONG = [(7 * i) % 250 for i in range(200)]
SHORT = LONG[100:110]
P, A, B = LONG[:80], SAID[:9], SAID[5:17]

each_draft = pytest.mark.parametrize("draft", DRAFTS, ids=["DFlash2", "DFlash", "own head and window"])


def fresh(models: Models, draft: Draft | None, **options: Any) -> pd.Speculator:
    # What was cached came in batches of other sizes than what is evaluated anew. Kernels change at 64 rows.
    # Texts that another displaced are for test_prefixes.py.
    return models.fresh(TARGET, draft, **{"n_ubatch": 32, "cache_ram": 0, **options})


def alone(models: Models, draft: Draft | None, prompt: Any, **options: Any) -> pd.Result:
    """The reply of an object that has seen nothing else."""
    with fresh(models, draft) as spec:
        return checked_run(spec, prompt, **options)


def fail_after(n_chunks: int, chunks: pd.Stream) -> None:
    for i, _ in enumerate(chunks):
        if i >= n_chunks:
            raise KeyError(i)


def assert_equal(models: Models, prompt: Any, ours: pd.Result, reference: pd.Result) -> None:
    models.assert_same(TARGET, prompt, ours.tokens, reference.tokens)
    if models.invariant(TARGET):
        assert (ours.text, ours.tokens, ours.finish_reason) == (
            reference.text,
            reference.tokens,
            reference.finish_reason,
        )
        assert ours.stats.histogram == reference.stats.histogram
        assert ours.stats.per_position == reference.stats.per_position


@each_draft
def test_a_long_prompt_then_a_short_one_then_the_long_one(models: Models, draft: Draft) -> None:
    with fresh(models, draft) as spec:
        for prompt in (LONG, SHORT, LONG):
            ours = checked_run(spec, prompt, max_tokens=24)
            assert ours.stats.prompt_n_cached == 0
            assert_equal(models, prompt, ours, alone(models, draft, prompt, max_tokens=24))


@each_draft
def test_a_shared_prefix_is_evaluated_once_and_drafts_stay_as_good(models: Models, draft: Draft) -> None:
    half = [*P[:40], *SAID]
    with fresh(models, draft) as spec:
        for prompt, n_shared in (([*P, *A], 0), (half, 40), ([*P, *B], 40), ([*P, *A], 80), ([*half, 3], 40)):
            ours = checked_run(spec, prompt, max_tokens=24)
            assert ours.stats.prompt_n_cached == n_shared
            assert ours.stats.draft_n > 0
            assert_equal(models, prompt, ours, alone(models, draft, prompt, max_tokens=24))


def test_the_next_turn_evaluates_only_what_is_new(models: Models) -> None:
    with fresh(models, Draft()) as spec:
        first = checked_run(spec, P, max_tokens=20, ignore_eos=True)
        before = spec.state
        turn = [*P, *first.tokens, *B]
        second = checked_run(spec, turn, max_tokens=20, ignore_eos=True)
        # The last token said was never evaluated.
        assert second.stats.prompt_n_cached == len(P) + len(first.tokens) - 1
        assert second.stats.prompt_n == len(B) + 1
        assert spec.state.n_prefilled - before.n_prefilled == len(B)  # the last token is left to the first round
        assert_equal(models, turn, second, alone(models, Draft(), turn, max_tokens=20, ignore_eos=True))


def test_the_same_prompt_again_keeps_all_but_the_anchor(models: Models) -> None:
    with fresh(models, Draft()) as spec:
        first = checked_run(spec, P, max_tokens=20)
        second = checked_run(spec, P, max_tokens=20)
        assert (second.stats.prompt_n, second.stats.prompt_n_cached) == (1, len(P) - 1)
        assert_equal(models, P, second, first)


@each_draft
@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 66, 200])
def test_every_prompt_row_is_injected_before_the_first_draft(models: Models, draft: Draft, n: int) -> None:
    spec = models.get(TARGET, draft)
    before = spec.state
    spec.prefill(LONG[:n])
    state = spec.state
    assert (state.n_past, state.n_past_draft, state.n_pending, state.anchor) == (n - 1, n - 1, 0, LONG[n - 1])
    assert state.n_injected - before.n_injected == n - 1
    assert state.n_prefilled - before.n_prefilled == n - 1
    spec.draft()
    assert spec.state == state  # the block leaves no trace


@each_draft
def test_long_and_short_in_turn(models: Models, draft: Draft) -> None:
    prompts = (LONG, SHORT)
    solo = [alone(models, draft, prompt, max_tokens=16) for prompt in prompts]
    with fresh(models, draft) as spec:
        for turn in range(20):
            prompt = prompts[turn % 2]
            assert_equal(models, prompt, checked_run(spec, prompt, max_tokens=16), solo[turn % 2])


@pytest.mark.parametrize("n_chunks", [0, 1, 3])
@pytest.mark.parametrize("way", ["forgotten", "closed", "left by an exception"])
def test_a_stream_that_was_left(models: Models, n_chunks: int, way: str) -> None:
    reference = alone(models, Draft(), P, max_tokens=16)
    with fresh(models, Draft()) as spec:
        chunks = spec.stream([*P[:50], *A], max_tokens=40, ignore_eos=True)
        if way == "left by an exception":
            with pytest.raises(KeyError):
                fail_after(n_chunks, chunks)
        else:
            for _ in range(n_chunks):
                next(chunks)
            if way == "closed":
                chunks.close()
        assert_equal(models, P, checked_run(spec, P, max_tokens=16), reference)
        if way == "forgotten" and n_chunks:
            with pytest.raises(pd.OrderError, match="taken over"):
                next(chunks)
        assert_equal(models, P, checked_run(spec, P, max_tokens=16), reference)


def test_options_of_one_call_end_with_it(models: Models) -> None:
    reference = alone(models, Draft(), P, max_tokens=24)
    with fresh(models, Draft()) as spec:
        for options in (
            {"n_max": 0},
            {"speculate": False},
            {"n_max": 3},
            {"margin": 50.0},
            {"p_min": 1.0},
            {"n_min": 7},
        ):
            other = checked_run(spec, P, max_tokens=24, **options)
            models.assert_same(TARGET, P, other.tokens, reference.tokens)
            if options in ({"n_max": 0}, {"speculate": False}):
                assert (other.stats.draft_n, other.stats.n_rounds) == (0, other.stats.predicted_n)
            if options == {"n_max": 3}:
                assert len(other.stats.histogram) == 4
                assert other.stats.draft_n > 0
            assert_equal(models, P, checked_run(spec, P, max_tokens=24), reference)


@each_draft
@pytest.mark.parametrize("n_plain", [1, 20, 100])
def test_features_are_kept_while_nothing_is_drafted(models: Models, draft: Draft, n_plain: int) -> None:
    with fresh(models, draft) as spec:
        plain = checked_run(spec, P, max_tokens=n_plain, speculate=False, ignore_eos=True)
        turn = [*P, *plain.tokens, *A]
        ours = checked_run(spec, turn, max_tokens=24)
        assert ours.stats.prompt_n_cached == len(P) + n_plain - 1
        assert ours.stats.draft_n_accepted > 0
        assert_equal(models, turn, ours, alone(models, draft, turn, max_tokens=24))


def test_reset_forgets_everything(models: Models) -> None:
    with fresh(models, Draft()) as spec:
        first = checked_run(spec, P, max_tokens=24)
        spec.reset()
        state = spec.state
        assert (state.n_past, state.n_past_draft, state.n_pending, state.anchor) == (0, 0, 0, None)
        with pytest.raises(pd.OrderError):
            spec.draft()
        second = checked_run(spec, P, max_tokens=24)
        assert second.stats.prompt_n_cached == 0
        assert_equal(models, P, second, first)


@each_draft
@pytest.mark.parametrize("n", [31, 32, 33, 64, 65, 200])
def test_the_size_of_a_prefill_step_changes_nothing(models: Models, draft: Draft, n: int) -> None:
    steps: list[tuple[int, int]] = []
    prompt = LONG[:n]
    small, middle, large = (
        checked_run(models.get(TARGET, draft, n_ubatch=n_ubatch), prompt, max_tokens=24) for n_ubatch in (8, 32, 512)
    )
    assert_equal(models, prompt, small, middle)
    at = first_difference(large.tokens, middle.tokens)
    if at is not None:  # from 64 rows on it is another kernel
        rivals = large.tokens[at], middle.tokens[at]
        assert_near_tie(models.files.path(TARGET), prompt, middle.tokens[:at], rivals, **TINY)
    assert large.stats.draft_n_accepted >= 0.7 * middle.stats.draft_n_accepted
    spec = models.get(TARGET, draft, n_ubatch=32)
    spec.prefill(prompt, on_progress=lambda done, total: steps.append((done, total)))
    assert steps == [(min(done, n - 1), n - 1) for done in range(32, n + 30, 32)]


@pytest.mark.parametrize("draft", [None, *DRAFTS], ids=["no draft", "DFlash2", "DFlash", "own head and window"])
@pytest.mark.parametrize("n", [1, 200, 241, 254, 255, 256])
def test_the_edge_of_the_context(models: Models, draft: Draft | None, n: int) -> None:
    prompt = (LONG * 2)[:n]
    reference = alone(models, None, prompt, max_tokens=257 - n, ignore_eos=True)
    with fresh(models, draft, n_ctx=256) as spec:
        for _ in range(2):
            result = checked_run(spec, prompt, max_tokens=10**6, ignore_eos=True)
            # Each position is used once; the last token said needs none.
            assert len(result.tokens) == 256 - n + 1
            assert spec.state.n_past == spec.n_ctx
            assert result.finish_reason == "length"
            models.assert_same(TARGET, prompt, result.tokens, reference.tokens)
        with pytest.raises(pd.ContextFullError):
            spec.verify([])
        before = spec.state
        with pytest.raises(pd.ContextFullError, match="257 tokens, n_ctx=256"):
            spec.run([1] * 257)
        assert spec.state == before


@each_draft
@pytest.mark.parametrize("cache_ram", [0, 1024])
def test_a_conversation_that_has_filled_the_context_goes_on_without_its_start(
    models: Models, draft: Draft, cache_ram: int
) -> None:
    """S16: nothing moves by itself; what the caller leaves out is evaluated anew from its own start, and drafted."""
    with fresh(models, draft, n_ctx=256, cache_ram=cache_ram) as spec:
        text = list(LONG)
        for _ in range(3):
            full = checked_run(spec, text, max_tokens=10**6, ignore_eos=True)
            text += full.tokens
            assert (full.finish_reason, spec.state.n_past, len(text)) == ("length", 256, 257)
            text = [*text[70:], *A]
            ours = checked_run(spec, text, max_tokens=24, ignore_eos=True)
            assert_equal(models, text, ours, alone(models, draft, text, max_tokens=24, ignore_eos=True))
            assert ours.stats.prompt_n_cached == 0
            assert ours.stats.draft_n_accepted > 0


@settings(max_examples=10)
@given(
    draft=st.sampled_from(DRAFTS),
    calls=st.lists(
        st.tuples(
            st.sampled_from([P, [*P, *A], [*P, *B], [*P[:30], *B], SHORT, LONG, P[:1]]),
            st.fixed_dictionaries(
                {"max_tokens": st.integers(0, 24)},
                optional={
                    "n_max": st.integers(0, 7),
                    "speculate": st.just(False),
                    "stop": st.sampled_from(["th", " a"]),
                    "ignore_eos": st.just(True),
                },
            ),
            st.sampled_from(["run", "run", "leave", "steps", "reset"]),
        ),
        min_size=2,
        max_size=6,
    ),
)
def test_any_order_of_calls_gives_what_each_gives_alone(models: Models, draft: Draft, calls: list[Any]) -> None:
    spec = models.get(TARGET, draft, n_ubatch=32)
    for prompt, options, way in calls:
        if way == "reset":
            spec.reset()
        elif way == "steps":
            spec.prefill(prompt)
            spec.verify(spec.draft(n_max=2))
            spec.verify([N_VOCAB - 1])
        elif way == "leave":
            with spec.stream(prompt, **options) as chunks:
                next(chunks)
        else:
            ours = checked_run(spec, prompt, **options)
            assert_equal(models, prompt, ours, alone(models, draft, prompt, **options))
