"""A draft that sees only the last positions of a sequence: which ones, where they lie, what a rollback finds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from laws import Models, compare_drafts
from sequences import Engine
from tiny import D_HEAD, DRAFTS, N_KV, SAID, Draft, Target

import pyllama_dflash as pd
from pyllama_dflash import _ffi_engine, _fit
from pyllama_dflash._open import engine_fields
from pyllama_dflash.params import LoadParams, Params

pytestmark = pytest.mark.skipif(any(device.is_gpu for device in pd.devices()), reason="bounds are those of a CPU")

TARGET = Target()
TOLERANCE = 0.02
RING = 256  # cells of a sequence whose draft sees few positions


def prompt_of(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.choice(SAID) for _ in range(n)]


class Pair:
    """Our graph and the reference with the same window, which take the same calls."""

    def __init__(self, models: Models, draft: Draft, n_ctx_draft: int, tolerance: float = TOLERANCE, **options: Any):
        options = {"n_ctx": 1024, "n_ubatch": 64, **options}
        self.ours = Engine(models, TARGET, draft, n_ctx_draft=n_ctx_draft, **options)
        self.theirs = Engine(models, TARGET, draft, n_ctx_draft=n_ctx_draft, fused_draft=False, **options)
        assert [engine.info["fused_draft"] for engine in (self.ours, self.theirs)] == [1, 0]
        self.tolerance = tolerance

    def begin(self, tokens: list[int]) -> None:
        for engine in (self.ours, self.theirs):
            engine.begin(tokens)

    def rounds(self, n: int, width: int) -> None:
        for i in range(n):
            ours, theirs = (engine.draft(width) for engine in (self.ours, self.theirs))
            compare_drafts(ours, theirs, self.tolerance)
            for engine in (self.ours, self.theirs):
                engine.verify({0: theirs.tokens[: width - i % 3]})

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.ours.close()
        self.theirs.close()


# what it sees ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", DRAFTS, ids=repr)
@pytest.mark.parametrize("n_ctx_draft", [512, 10**6])
def test_a_window_of_everything_changes_nothing(models: Models, draft: Draft, n_ctx_draft: int) -> None:
    with Engine(models, TARGET, draft) as usual, Engine(models, TARGET, draft, n_ctx_draft=n_ctx_draft) as windowed:
        assert usual.info["n_ctx_draft"] == windowed.info["n_ctx_draft"] == 512
        width = usual.info["n_max"]
        for engine in (usual, windowed):
            engine.begin(prompt_of(1, 300))
        for _ in range(10):
            a, b = (engine.draft(width) for engine in (usual, windowed))
            assert a.tokens == b.tokens
            assert np.array_equal(a.scores, b.scores)
            for engine in (usual, windowed):
                engine.verify({0: a.tokens})
        assert _ffi_engine.devices(usual.handle) == _ffi_engine.devices(windowed.handle)


@pytest.mark.parametrize("draft", DRAFTS, ids=repr)
@pytest.mark.parametrize("n_ctx_draft", [1, 20, 100])
def test_a_small_window_through_several_rings(models: Models, draft: Draft, n_ctx_draft: int) -> None:
    with Pair(models, draft, n_ctx_draft) as pair:
        assert pair.ours.info["n_ctx_draft"] == pair.theirs.info["n_ctx_draft"] == n_ctx_draft
        width = pair.ours.info["n_max"]
        for n in (5, 240, 505, 760, 900):  # rounds that begin before, across and after the end of a ring
            pair.begin(prompt_of(2, n))
            pair.rounds(6, width)


def test_what_lies_before_the_window_is_not_seen_and_what_lies_in_it_is(models: Models) -> None:
    prompt = prompt_of(3, 400)
    with Engine(models, TARGET, Draft(), n_ctx=1024) as full:
        full.begin(prompt)
        reference = full.draft()
    for n_ctx_draft, differs in ((8, True), (64, True), (398, True), (399, False), (400, False)):
        with Engine(models, TARGET, Draft(), n_ctx=1024, n_ctx_draft=n_ctx_draft) as windowed:
            windowed.begin(prompt)
            found = windowed.draft()
            same = np.array_equal(np.sort(found.candidates), np.sort(reference.candidates)) and np.allclose(
                found.scores, reference.scores, atol=1e-5
            )
            assert same != differs, n_ctx_draft


def test_unless_told_to_it_sees_no_more_than_it_was_trained_on(models: Models) -> None:
    short, prompt = Draft(keys=(("context_length", 64),)), prompt_of(5, 400)
    found = {}
    for name, draft, n_ctx_draft in (
        ("full", Draft(), 0),
        ("as trained", short, 0),
        ("told", short, 64),
        ("all", short, 1024),
    ):
        with Engine(models, TARGET, draft, n_ctx=1024, n_ctx_draft=n_ctx_draft) as engine:
            engine.begin(prompt)
            found[name] = engine.draft().scores
            assert engine.info["n_ctx_draft"] == {"full": 1024, "all": 1024}.get(name, 64)
    assert np.array_equal(found["as trained"], found["told"])
    assert np.array_equal(found["all"], found["full"])
    assert not np.array_equal(found["told"], found["full"])
    with Pair(models, short, 0) as pair:
        for n in (60, 400, 200):  # the last one goes back by more than it sees
            pair.begin(prompt[:n])
            pair.rounds(4, 7)


@pytest.mark.parametrize("options", [{"type_k_draft": "q8_0", "type_v_draft": "q8_0"}, {"flash_attn": "off"}], ids=repr)
def test_caches_of_other_types(models: Models, options: dict[str, Any]) -> None:
    tolerance = 0.5 if "type_k_draft" in options else TOLERANCE
    with Pair(models, Draft(window=16), 40, tolerance, **options) as pair:
        for n in (250, 600):
            pair.begin(prompt_of(4, n))
            pair.rounds(3, 7)


@pytest.mark.parametrize("n_ubatch", [1, 255, 257, 512, 1000])
def test_a_prefill_step_that_is_longer_than_the_ring(models: Models, n_ubatch: int) -> None:
    with Pair(models, Draft(window=16), 30, n_ubatch=n_ubatch) as pair:
        for n in (256, 257, 300, 700, 1000):
            pair.begin(prompt_of(n, n))
            pair.rounds(2, 7)


def test_several_sequences(models: Models) -> None:
    prompts = [prompt_of(seq, n) for seq, n in enumerate((700, 250, 10))]
    with (
        Engine(models, TARGET, Draft(), 3, n_ctx_draft=50, n_ctx=1024) as ours,
        Engine(models, TARGET, Draft(), 3, n_ctx_draft=50, n_ctx=1024, fused_draft=False) as theirs,
    ):
        for engine in (ours, theirs):
            for seq, prompt in enumerate(prompts):
                engine.begin(prompt, seq)
        for _ in range(12):
            lengths = dict.fromkeys(range(3), 7)
            a, b = ours.drafts(lengths), theirs.drafts(lengths)
            for seq in lengths:
                compare_drafts(a[seq], b[seq], TOLERANCE)
            guesses = {seq: block.tokens for seq, block in b.items()}
            assert [v[:3] for v in ours.verify(guesses).values()] == [v[:3] for v in theirs.verify(guesses).values()]


# a whole reply --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False], ids=["our graph", "llama.cpp's"])
def test_a_reply_that_is_longer_than_the_window_is_drafted_to_its_end(models: Models, fused: bool) -> None:
    """S17: plain decoding's text, and the last tokens are drafted as well as the first."""
    target = Target(weights="Q8_0")
    with models.fresh(target, n_ctx=1024) as spec:
        plain = spec.run(SAID[:5], max_tokens=600, ignore_eos=True)
    with models.fresh(target, Draft(), n_ctx=1024, n_ctx_draft=128, fused_draft=fused) as spec:
        accepted = [0, 0, 0]
        said: list[int] = []
        for chunk in spec.stream(SAID[:5], max_tokens=600, ignore_eos=True):
            accepted[min(2, len(said) // 200)] += len(chunk.tokens) - 1
            said += chunk.tokens
    models.assert_same(target, SAID[:5], said, plain.tokens)
    assert len(said) == 600
    assert min(accepted) > 0.5 * max(accepted)


def test_a_window_takes_less_memory_and_changes_no_text(models: Models) -> None:
    """S40: the draft's share of a long context, and what is left of it with a window."""
    target = Target(weights="Q8_0", n_ctx=32768)
    results, taken = [], []
    for n_ctx_draft in (0, 1024):
        with models.fresh(target, Draft(), n_ctx=32768, n_ctx_draft=n_ctx_draft) as spec:
            results.append(spec.run(prompt_of(9, 300), max_tokens=40, ignore_eos=True))
            taken.append(spec.memory.total)
    row = 2 * 2 * N_KV * D_HEAD * Draft().n_layer
    assert [total.draft_kv for total in taken] == [32769 * row, (1024 + RING + 1) * row]
    assert taken[1].draft_compute < taken[0].draft_compute < 16 << 20
    assert taken[0].target_kv == taken[1].target_kv
    assert results[0].tokens == results[1].tokens
    assert results[0].stats.histogram == results[1].stats.histogram


# rollback -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [690, 600, 525])
def test_a_rollback_within_the_ring_finds_all_of_the_window(models: Models, shared: int) -> None:
    first, second = prompt_of(5, 700), prompt_of(5, shared) + prompt_of(6, 10)
    with Engine(models, TARGET, Draft(), n_ctx_draft=64, n_ctx=1024, n_ubatch=64) as engine:
        engine.begin(first)
        engine.draft()  # the block takes cells: its end is position 707, so 451 is the first that is held
        assert engine.begin(second) == shared
        with Engine(models, TARGET, Draft(), n_ctx_draft=64, n_ctx=1024, n_ubatch=64) as fresh:
            fresh.begin(second)
            for _ in range(3):
                compare_drafts(engine.draft(), fresh.draft(), TOLERANCE)
                for one in (engine, fresh):
                    one.verify({0: [0] * 7})


@pytest.mark.parametrize(("shared", "kept"), [(490, 490), (483, 483), (482, 0), (300, 0), (40, 0)])
def test_a_rollback_beyond_the_ring_goes_on_with_half_of_the_window_or_begins_again(
    models: Models, shared: int, kept: int
) -> None:
    first, second = prompt_of(5, 700), prompt_of(5, shared) + prompt_of(6, 90)
    options: dict[str, Any] = {"n_ctx_draft": 64, "n_ctx": 1024, "n_ubatch": 8}
    with Engine(models, TARGET, Draft(), **options) as engine, Engine(models, TARGET, Draft(), **options) as fresh:
        engine.begin(first)
        engine.draft()
        fresh.begin(second)
        assert engine.begin(second[: shared + 1]) == kept
        assert engine.state().n_past_draft == shared
        engine.draft()
        # Once the window has moved on, nothing is missing.
        assert engine.begin(second) == shared
        compare_drafts(engine.draft(), fresh.draft(), TOLERANCE)
        engine.rounds(5)


@pytest.mark.parametrize(("shared", "kept"), [(476, 476), (475, 475), (474, 0), (300, 0)])
def test_what_injection_alone_overwrote_is_lost(models: Models, shared: int, kept: int) -> None:
    with Engine(models, TARGET, Draft(), n_ctx_draft=64, n_ctx=1024, n_ubatch=100) as engine:
        engine.begin(prompt_of(5, 700))  # 443 is the first position that is held
        assert engine.begin([*prompt_of(5, shared), SAID[0]]) == kept


def test_the_reference_begins_again_where_it_has_lost_the_window(models: Models) -> None:
    first = prompt_of(5, 700)
    for shared, kept in ((680, 680), (640, 0)):  # it holds the last 64 positions
        with Engine(models, TARGET, Draft(), n_ctx_draft=64, n_ctx=1024, fused_draft=False) as engine:
            engine.begin(first)
            engine.draft()
            second = first[:shared] + prompt_of(6, 100)
            assert engine.begin(second) == kept
            with Engine(models, TARGET, Draft(), n_ctx_draft=64, n_ctx=1024) as fresh:
                fresh.begin(second)
                compare_drafts(engine.draft(), fresh.draft(), TOLERANCE)


# sizes ----------------------------------------------------------------------------------------------------------------


def cells_of(engine: Engine, draft: Draft) -> int:
    """Cells in F16 of all sequences, the spare one left out."""
    kv = sum(row["draft_kv"] for row in _ffi_engine.devices(engine.handle))
    cells, spare = divmod(kv, 2 * 2 * N_KV * D_HEAD * draft.n_layer)
    assert spare == 0
    return int(cells)


@pytest.mark.parametrize(
    ("n_ctx", "n_ctx_draft", "n_seq", "cells"),
    [
        (1024, 0, 1, 1024),
        (1024, 100, 1, RING),
        (1024, RING - 8, 1, RING),
        (1024, RING - 7, 1, 2 * RING),
        (1024, 1020, 1, 1024),
        (1024, 100, 4, 4 * RING),
        (1024, 0, 3, 3 * 1280),  # a block that is wider than its sequence asked for has room
        (200, 100, 1, RING),
    ],
)
def test_the_cache_holds_what_is_seen(models: Models, n_ctx: int, n_ctx_draft: int, n_seq: int, cells: int) -> None:
    with Engine(models, TARGET, Draft(), n_seq, n_ctx_draft=n_ctx_draft, n_ctx=n_ctx) as engine:
        assert cells_of(engine, Draft()) == cells + 1


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("n_seq", "n_ctx_draft"), [(1, 100), (4, 0), (4, 100)])
def test_a_dry_run_knows_it(models: Models, fused: bool, n_seq: int, n_ctx_draft: int) -> None:
    options = {"n_ctx": 1024, "fused_draft": fused}
    with Engine(models, TARGET, Draft(), n_seq, n_ctx_draft=n_ctx_draft, **options) as engine:
        found = _ffi_engine.devices(engine.handle)
    plan = planned(models, n_seq, n_ctx_draft, **options)
    for ours, theirs in zip(plan.devices, found):
        for kind in ("target_kv", "draft_kv"):
            assert getattr(ours, kind) == theirs[kind], kind
        assert ours.draft_compute == pytest.approx(theirs["draft_compute"], rel=0.2)


def test_a_dry_run_of_a_long_context(models: Models) -> None:
    row = 2 * 2 * N_KV * D_HEAD * Draft().n_layer
    for n_ctx_draft, cells in ((0, 1 << 18), (1000, 1024), (40000, 40192), (1 << 17, 1 << 17)):
        found = planned(models, 1, n_ctx_draft, n_ctx=1 << 18).devices[-1].draft_kv
        assert found == pytest.approx(row * cells, rel=0.01), n_ctx_draft


@pytest.mark.parametrize(("n_seq", "n_ctx_draft", "cells"), [(1, 0, 1024), (1, 100, RING), (4, 100, 4 * RING)])
def test_a_dry_run_of_a_draft_alone(models: Models, n_seq: int, n_ctx_draft: int, cells: int) -> None:
    fields = {**engine_fields(Params(n_ctx=1024)), "n_seq_max": n_seq, "n_ctx_draft": n_ctx_draft}
    file = _fit.File(str(models.files.path(Draft())).encode(), LoadParams())
    plan = _fit.make_plan(None, file, fields)
    assert plan.devices[-1].draft_kv == 2 * 2 * N_KV * D_HEAD * Draft().n_layer * (cells + 1)


def planned(models: Models, n_seq: int, n_ctx_draft: int, **options: Any) -> _fit.Plan:
    fields = {**engine_fields(Params(n_threads=1, **options)), "n_seq_max": n_seq, "n_ctx_draft": n_ctx_draft}
    files = [_fit.File(str(models.files.path(like)).encode(), LoadParams()) for like in (TARGET, Draft())]
    return _fit.make_plan(files[0], files[1], fields)


@pytest.mark.parametrize(
    ("n_seq", "n_ctx_draft", "n_ctx", "said"),
    [
        (1, -1, 512, r"n_ctx_draft=-1 is negative; 0 lets the draft see as many as it was trained on"),
        (0, 0, 512, r"n_seq_max=0 is out of range, 1 to 64; raise n_seq_max"),
        (65, 0, 512, r"n_seq_max=65 is out of range, 1 to 64; lower n_seq_max"),
        (64, 0, 1 << 23, r"n_ctx=8388608 for each of n_seq_max=64 sequences is more than 268435456 tokens in all"),
    ],
)
def test_sizes_that_make_no_sense(models: Models, n_seq: int, n_ctx_draft: int, n_ctx: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Engine(models, TARGET, Draft(), n_seq, n_ctx_draft=n_ctx_draft, n_ctx=n_ctx)
    fields = {**engine_fields(Params(n_ctx=n_ctx)), "n_seq_max": n_seq, "n_ctx_draft": n_ctx_draft}
    with pytest.raises(ValueError, match=said):
        _fit.make_plan(None, _fit.File(str(models.files.path(Draft())).encode(), LoadParams()), fields)
