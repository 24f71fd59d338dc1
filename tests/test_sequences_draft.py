"""Drafts of several sequences in one launch: each as if it were alone, whatever the others do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import Models, compare_drafts
from sequences import Block, Engine
from tiny import DRAFTS, N_VOCAB, SAID, Draft, Target

import pyllama_dflash as pd

# A GPU multiplies other numbers of rows in other precisions.
pytestmark = pytest.mark.skipif(any(device.is_gpu for device in pd.devices()), reason="bounds are those of a CPU")

TARGET = Target()
TOLERANCE = 0.02  # of what an F16 cache makes of sums in another order
EXACT: dict[str, Any] = {"type_k_draft": "f32", "type_v_draft": "f32", "flash_attn": "off"}
N_SEQ = 4


def prompt_of(rng: random.Random, n: int) -> list[int]:
    return [rng.choice(SAID) for _ in range(n)]


class Group:
    """One engine of several sequences and an engine for each of them alone, which take the same calls."""

    def __init__(
        self, models: Models, draft: Draft, tolerance: float = TOLERANCE, solo: Any = None, **options: Any
    ) -> None:
        self.stack = ExitStack()
        enter = self.stack.enter_context
        self.all = enter(Engine(models, TARGET, draft, N_SEQ, **options))
        self.alone = [enter(Engine(models, TARGET, draft, **{**options, **(solo or {})})) for _ in range(N_SEQ)]
        self.tolerance, self.n_compared = tolerance, 0

    def begin(self, seq: int, prompt: list[int]) -> None:
        assert self.all.begin(prompt, seq) == self.alone[seq].begin(prompt)
        self.check_states()

    def drafts(self, lengths: dict[int, int]) -> dict[int, Block]:
        """Draft, and compare each with what the sequence's own engine makes of a block of the same width."""
        found, width = self.all.drafts(lengths), max(lengths.values())
        for seq, n in lengths.items():
            assert len(found[seq].tokens) == n
            self.n_compared += compare_drafts(found[seq], self.alone[seq].draft(width).cut(n), self.tolerance)
        return found

    def verify(self, guesses: dict[int, list[int]]) -> None:
        for seq, ours in self.all.verify(guesses).items():
            theirs = self.alone[seq].verify({0: guesses[seq]})[0]
            assert ours[:3] == theirs[:3]
        self.check_states()

    def check_states(self) -> None:
        for seq, alone in enumerate(self.alone):
            ours, theirs = self.all.state(seq), alone.state()
            assert (ours.n_past, ours.anchor, ours.n_past_draft) == (theirs.n_past, theirs.anchor, theirs.n_past_draft)

    def rounds(self, n: int, rng: random.Random) -> None:
        """Rounds of some sequences, with drafts of different lengths, some spoilt or cut; now and then a new prompt."""
        n_max = self.all.info["n_max"]
        for _ in range(n):
            live = sorted(rng.sample(range(N_SEQ), rng.randint(1, N_SEQ)))
            width = rng.randint(1, n_max)
            guesses = {
                seq: block.tokens for seq, block in self.drafts({seq: rng.randint(1, width) for seq in live}).items()
            }
            for guess in guesses.values():
                if rng.random() < 0.4:
                    guess[rng.randrange(len(guess))] = rng.randrange(N_VOCAB)
            left = {seq: guess[: rng.randint(0, len(guess))] for seq, guess in guesses.items() if rng.random() < 0.9}
            if left:
                self.verify(left)
            if rng.random() < 0.2:
                self.begin(rng.randrange(N_SEQ), prompt_of(rng, rng.randint(1, 50)))

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()


@pytest.fixture
def begun(models: Models, request: pytest.FixtureRequest) -> Iterator[Group]:
    """Sequences of different lengths; parameters: a draft and options."""
    draft, options = request.param
    with Group(models, draft, n_ubatch=16, **options) as group:
        rng = random.Random(1)
        for seq, n in enumerate((30, 1, 70, 12)):
            group.begin(seq, prompt_of(rng, n))
        yield group


def of_every_kind(**options: Any) -> Any:
    return pytest.mark.parametrize("begun", [(draft, options) for draft in DRAFTS], ids=repr, indirect=True)


# as if alone ----------------------------------------------------------------------------------------------------------


@of_every_kind()
def test_rounds_of_every_kind(begun: Group) -> None:
    begun.rounds(16, random.Random(2))
    assert begun.n_compared >= (40 if begun.all.info["n_max"] > 1 else 10)


@of_every_kind(tolerance=1e-3, **EXACT)
def test_rounds_of_every_kind_closely(begun: Group) -> None:
    begun.rounds(10, random.Random(3))
    assert begun.n_compared >= (30 if begun.all.info["n_max"] > 1 else 5)


@of_every_kind(fused_draft=False)
def test_the_reference_keeps_sequences_apart_too(begun: Group) -> None:
    begun.rounds(8, random.Random(4))
    assert not begun.all.info["fused_draft"]


@of_every_kind(solo={"fused_draft": False})
def test_our_graph_agrees_with_the_reference(begun: Group) -> None:
    assert (begun.all.info["fused_draft"], begun.alone[0].info["fused_draft"]) == (1, 0)
    begun.rounds(10, random.Random(5))


@pytest.mark.parametrize(
    "begun",
    [
        (draft, {**options, "tolerance": 0.5})  # a step of rounding more or less
        for draft in (Draft(), Draft(version=1, window=16))
        for options in ({"type_k_draft": "q8_0", "type_v_draft": "q8_0"}, {"kv_unified": True})
    ],
    ids=repr,
    indirect=True,
)
def test_other_caches(begun: Group) -> None:
    begun.rounds(8, random.Random(6))


@settings(max_examples=8)
@given(draft=st.sampled_from(DRAFTS), seed=st.integers(0, 999), n_ubatch=st.sampled_from([1, 7, 64]))
def test_any_order_of_prompts_and_rounds(models: Models, draft: Draft, seed: int, n_ubatch: int) -> None:
    rng = random.Random(seed)
    shared = prompt_of(rng, 60)
    with Group(models, draft, n_ubatch=n_ubatch) as group:
        for seq in range(N_SEQ):
            group.begin(seq, prompt_of(rng, rng.randint(1, 60)))
        for _ in range(4):
            group.rounds(rng.randint(0, 4), rng)
            group.begin(rng.randrange(N_SEQ), shared[: rng.randint(1, 60)] + prompt_of(rng, rng.randint(0, 9)))


@pytest.mark.parametrize("live", [(0,), (3,), (0, 3), (1, 2), (0, 1, 3), (0, 2)])
@pytest.mark.parametrize("begun", [(Draft(), {}), (Draft(version=1, causal=True), {})], ids=repr, indirect=True)
def test_sequences_with_holes_between_them(begun: Group, live: tuple[int, ...]) -> None:
    for _ in range(3):
        begun.verify({seq: block.tokens for seq, block in begun.drafts(dict.fromkeys(live, 7)).items()})
    begun.drafts(dict.fromkeys(range(N_SEQ), 7))  # nothing was done to the others


@pytest.mark.parametrize("begun", [(Draft(), {}), (Draft(block=16, window=16), {})], ids=repr, indirect=True)
def test_rows_that_wait_go_with_the_next_launch_of_any_sequence(begun: Group) -> None:
    begun.verify({seq: block.tokens for seq, block in begun.drafts(dict.fromkeys(range(N_SEQ), 5)).items()})
    begun.drafts({2: 7})  # takes the rows of all
    begun.drafts(dict.fromkeys(range(N_SEQ), 3))
    for seq in (1, 3):
        begun.verify({seq: []})  # and the next batch of the target's finds none that wait
    begun.begin(0, prompt_of(random.Random(7), 20))
    begun.drafts(dict.fromkeys(range(N_SEQ), 7))


def test_a_sequence_that_is_reset_leaves_the_others_alone(models: Models) -> None:
    for fused in (True, False):
        with Group(models, Draft(), fused_draft=fused) as group:
            for seq in range(N_SEQ):
                group.begin(seq, prompt_of(random.Random(seq), 20))
            group.verify({seq: block.tokens for seq, block in group.drafts(dict.fromkeys(range(N_SEQ), 7)).items()})
            group.all.reset(1)
            group.alone[1].reset()
            group.check_states()
            assert group.all.state(1)[:3] == (0, 0, -1)
            group.drafts({0: 7, 2: 7, 3: 7})
            group.begin(1, prompt_of(random.Random(9), 5))
            group.drafts(dict.fromkeys(range(N_SEQ), 7))


@pytest.mark.parametrize("n_ctx", [255, 256])
@pytest.mark.parametrize("fused", [True, False])
def test_a_wide_block_beside_one_at_the_end_of_its_context(models: Models, fused: bool, n_ctx: int) -> None:
    rng = random.Random(8)
    prompts = prompt_of(rng, 20), prompt_of(rng, n_ctx - 2)
    with Engine(models, TARGET, Draft(), 2, n_ctx=n_ctx, fused_draft=fused) as both:
        for seq, prompt in enumerate(prompts):
            both.begin(prompt, seq)
        first = both.drafts({0: 7, 1: 2})
        assert [len(first[seq].tokens) for seq in (0, 1)] == [7, 2]
        both.verify({1: []})
        both.drafts({0: 7, 1: 1})
        both.verify({1: []})  # the positions of the first cells are still theirs
        with Engine(models, TARGET, Draft(), n_ctx=n_ctx, fused_draft=fused) as alone:
            for seq in (1, 0):
                prompt = prompts[seq][:20] + prompt_of(random.Random(9), 20)
                assert both.begin(prompt, seq) == 19 + seq
                alone.begin(prompt)
                compare_drafts(both.draft(7, seq), alone.draft(7), TOLERANCE)


def test_graphs_are_kept_for_the_sequences_that_are_there(models: Models) -> None:
    from pyllama_dflash import _ffi_engine

    with Engine(models, TARGET, Draft(), N_SEQ) as engine:
        for seq in range(N_SEQ):
            engine.begin(prompt_of(random.Random(seq), 20 + seq), seq)

        def rounds(n: int) -> int:
            before = _ffi_engine.memory(engine.handle)["n_graph_misses"]
            for _ in range(n):
                guesses = engine.drafts(dict.fromkeys(range(N_SEQ), 7))
                engine.verify({seq: block.tokens[:seq] + [0] * (7 - seq) for seq, block in guesses.items()})
            return _ffi_engine.memory(engine.handle)["n_graph_misses"] - before

        rounds(10)
        assert rounds(10) <= 3  # rows that are kept come in fours
        kept = [graph for graph in _ffi_engine.graphs(engine.handle) if graph["draft"]]
        assert max(graph["n_rows"] for graph in kept) == 8 * N_SEQ
        assert len(kept) <= 48
