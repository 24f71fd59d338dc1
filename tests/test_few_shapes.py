"""Rows that nothing reads, so that batches come in few shapes: on for a GPU, forced here, and no text knows of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from arch_table import ARCHS
from laws import Models, assert_near_tie, first_difference
from tiny import SAID, Draft, Files, Target

import pyllama_dflash as pd
from pyllama_dflash import _ffi_engine, _open
from pyllama_dflash._open import engine_fields
from pyllama_dflash.params import Params

TARGET = Target(weights="Q8_0")  # the same products however many rows come together
LENGTHS = (1, 30, 90, 7, 20, 2, 33, 64, 65, 3)
PROMPTS = [[SAID[(i * (at + 1)) % len(SAID)] for i in range(n)] for at, n in enumerate(LENGTHS)]
KINDS: list[Any] = [TARGET, *(ARCHS[name] for name in ("gemma3", "deepseek2", "qwen2vl", "qwen35", "jamba", "plamo2"))]


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    def fields(params: Params) -> dict[str, int]:
        return {**engine_fields(params), "few_shapes": 1}

    monkeypatch.setattr(_open, "engine_fields", fields)


@pytest.fixture
def spec(forced: None, files: Files) -> Iterator[pd.Speculator]:
    with pd.Speculator(
        files.path(TARGET), files.path(Draft(weights="Q8_0")), n_ctx=256, n_threads=1, cache_ram=0
    ) as found:
        yield found


@pytest.mark.parametrize("n_max", [0, 2, 7])
@pytest.mark.parametrize("options", [{}, {"kv_unified": True}, {"fused_draft": False}, {"n_ubatch": 40}], ids=str)
@pytest.mark.parametrize("n_parallel", [2, 3, 8])
def test_texts_are_those_of_each_alone(
    forced: None, files: Files, models: Models, n_parallel: int, options: dict[str, Any], n_max: int
) -> None:
    draft = Draft(weights="Q8_0")
    jobs = [{"prompt": prompt, "max_tokens": 5 + 7 * at} for at, prompt in enumerate(PROMPTS)]
    with pd.Speculator(files.path(TARGET), files.path(draft), n_ctx=256, n_threads=1, cache_ram=0, **options) as spec:
        results = list(spec.run_many(jobs, n_parallel=n_parallel, n_max=n_max, ignore_eos=True))
        many = spec._session._many
        assert many is not None
        assert many.info["few_shapes"] == 1
    own = models.get(TARGET, draft)
    for job, result in zip(jobs, results):
        assert result.result is not None, result.error
        alone = own.run(**job, n_max=n_max, ignore_eos=True)
        models.assert_same(TARGET, job["prompt"], result.result.tokens, alone.tokens)
        stats = result.result.stats
        assert stats.prompt_n + stats.prompt_n_cached == len(job["prompt"])
        assert (stats.draft_n_accepted > 0) == (n_max > 0)


@pytest.mark.parametrize("like", KINDS, ids=repr)
def test_every_kind_of_memory(forced: None, files: Files, models: Models, like: Any) -> None:
    """States that cannot be cut get no such rows; the prompts of others share launches."""
    with pd.Speculator(files.path(like), n_ctx=256, n_threads=1, cache_ram=0) as spec:
        found = list(spec.run_many(PROMPTS, n_parallel=4, max_tokens=20, ignore_eos=True))
        many = spec._session._many
        assert many is not None
        assert many.info["few_shapes"] == int(spec.rollback == "cut")
    for prompt, one in zip(PROMPTS, found):
        assert one.result is not None, one.error
        own = models.get(like).run(prompt, max_tokens=20, ignore_eos=True).tokens
        at = first_difference(one.result.tokens, own)
        if at is not None:
            rivals = one.result.tokens[at], own[at]
            assert_near_tie(files.path(like), prompt, own[:at], rivals, n_ctx=256, n_threads=1)


def test_launches_have_few_shapes(spec: pd.Speculator) -> None:
    """Eight that end one after the other: whole stretches of two, four and eight, and prompts in sixteens."""
    jobs = [{"prompt": prompt, "max_tokens": 12 * (at + 1)} for at, prompt in enumerate(PROMPTS[:8])]
    list(spec.run_many(jobs, n_parallel=8, n_max=3, ignore_eos=True))
    many = spec._session._many
    assert many is not None
    rows = {graph["n_rows"] for graph in _ffi_engine.graphs(many) if not graph["draft"] and graph["n_hits"]}
    ends = {3, 2, 1}  # the last tokens of the last reply are fewer
    assert rows <= {4 * 8, 4 * 4, 4 * 2, 4, 16, 32, 48, 64} | ends, rows


# the engine -----------------------------------------------------------------------------------------------------------


class Engine:
    """Four sequences, driven call by call."""

    def __init__(self, models: Models, like: Any, **fields: int) -> None:
        self._models = [pd.Model(models.files.path(like))]
        draft = Draft(weights="Q8_0") if isinstance(like, Target) else None
        self._models += [pd.Model(models.files.path(draft))] if draft else []
        options = {"n_ctx": 96, "n_threads": 1, "n_seq_max": 4, "backend_argmax": 0, "few_shapes": 1, "n_max": 5}
        handles = [model._handle for model in self._models]
        both = handles[0], handles[1] if draft else None
        self.handle = _ffi_engine.open(*both, engine_fields(Params()) | options | fields)

    def close(self) -> None:
        self.handle.close()
        for model in self._models:
            model.close()

    def begin(self, seq: int, prompt: list[int]) -> None:
        _ffi_engine.begin(self.handle, np.array(prompt, np.int32), seq)

    def verify(self, *requests: tuple[int, list[int]]) -> list[Any]:
        return _ffi_engine.verify(self.handle, requests)

    def pending(self, seq: int) -> int:
        return _ffi_engine.state(self.handle, seq).n_pending

    def logits(self, seq: int) -> Any:
        self.verify((seq, []))
        return _ffi_engine.logits(self.handle, 1)


@pytest.mark.parametrize("few_shapes", [0, 1])
@pytest.mark.parametrize("like", KINDS[:-1], ids=repr)  # the last is run one sequence at a time
def test_a_prompt_goes_along_with_a_verify(models: Models, like: Any, few_shapes: int) -> None:
    """Whatever the memory: as many rows at a time as the others have, and nothing else is different."""
    with closing(Engine(models, like, few_shapes=few_shapes)) as ours, closing(Engine(models, like)) as alone:
        for engine in (ours, alone):
            engine.begin(1, PROMPTS[4])
            while _ffi_engine.prefill(engine.handle, 1):
                pass
        ours.begin(2, PROMPTS[1])
        left = [ours.pending(2)]
        while left[-1]:
            verified = ours.verify((1, [3, 4]), (2, []))
            left.append(verified[1].n_pending)
            assert (verified[1].chosen, verified[1].bonus, verified[0].n_pending) == ([], -1, 0)
            assert verified[0].bonus == alone.verify((1, [3, 4]))[0].bonus
        assert left == [*range(29, 0, -3), 0]
        alone.begin(2, PROMPTS[1])
        while _ffi_engine.prefill(alone.handle, 2):
            pass
        assert _ffi_engine.tokens(ours.handle, 2).tolist() == PROMPTS[1][:-1]
        states = [_ffi_engine.state(engine.handle, 2)._replace(n_injected=0, n_prefilled=0) for engine in (ours, alone)]
        assert states[0] == states[1]
        assert np.abs(ours.logits(2) - alone.logits(2)).max() < (1e-6 if isinstance(like, Target) else 0.01)


def test_prompts_alone_share_a_launch(models: Models) -> None:
    with closing(Engine(models, TARGET, n_ubatch=80)) as engine:
        for seq, n in ((0, 20), (2, 10), (3, 31)):
            engine.begin(seq, PROMPTS[2][:n])
        assert [one.n_pending for one in engine.verify((0, []), (2, []), (3, []))] == [0, 0, 10]  # 80 rows of four
        assert [one.n_pending for one in engine.verify((3, []))] == [0]
        assert _ffi_engine.state(engine.handle).n_prefilled == 19 + 9 + 30
        assert [len(_ffi_engine.tokens(engine.handle, seq)) for seq in range(4)] == [19, 0, 9, 30]


def test_a_full_sequence_in_between_is_left_alone(models: Models) -> None:
    """There is no room for rows after it, so the two beside it have a launch each."""
    with closing(Engine(models, TARGET)) as engine, closing(Engine(models, TARGET)) as alone:
        for seq, n in ((0, 9), (1, 90), (2, 7)):
            for each in (engine, alone):
                each.begin(seq, PROMPTS[2][:n])
                while _ffi_engine.prefill(each.handle, seq):
                    pass
        while _ffi_engine.state(engine.handle, 1).n_past < 96:
            for each in (engine, alone):
                each.verify((1, []))
        for tokens in ([], [5, 6], [7, 8, 9, 3, 4]):
            both = engine.verify((0, tokens), (2, tokens))
            assert [one.bonus for one in both] == [alone.verify((seq, tokens))[0].bonus for seq in (0, 2)]
        assert _ffi_engine.state(engine.handle, 1).n_past == 96


def test_prompts_on_both_sides_of_a_full_sequence(models: Models) -> None:
    """In one buffer for all it has no part in their launch."""
    with closing(Engine(models, ARCHS["llama"], kv_unified=1, n_max=0)) as engine:
        engine.begin(1, PROMPTS[2][:90])
        while _ffi_engine.prefill(engine.handle, 1):
            pass
        while _ffi_engine.state(engine.handle, 1).n_past < 96:
            engine.verify((1, []))
        for seq in (0, 2):
            engine.begin(seq, PROMPTS[6])
        assert [one.n_pending for one in engine.verify((0, []), (2, []))] == [0, 0]
        assert _ffi_engine.tokens(engine.handle, 2).tolist() == PROMPTS[6][:-1]


@pytest.mark.parametrize("value", [-2, 2, 1 << 30])
def test_the_field_is_checked(models: Models, value: int) -> None:
    with pytest.raises(ValueError, match=f"few_shapes={value} is none of -1, 0, 1"):
        Engine(models, TARGET, few_shapes=value)


def test_of_a_waiting_prompt_no_draft_is_verified(models: Models) -> None:
    with closing(Engine(models, TARGET)) as engine:
        engine.begin(0, PROMPTS[1])
        with pytest.raises(pd.OrderError, match="29 tokens still wait"):
            engine.verify((0, [3]))
        with pytest.raises(pd.OrderError, match="needs a prompt"):
            engine.verify((0, []), (1, []))
        assert engine.pending(0) == 29


def test_a_wide_stretch_is_not_run_for_two_at_its_ends(models: Models) -> None:
    """More sequences in vain than another launch would cost; the state of those in between is not touched."""
    fields = {"n_seq_max": 12}
    with closing(Engine(models, TARGET, **fields)) as engine, closing(Engine(models, TARGET, **fields)) as alone:
        for seq in (0, 4, 11):
            for each in (engine, alone):
                each.begin(seq, PROMPTS[6])
                while _ffi_engine.prefill(each.handle, seq):
                    pass
        together = [one.bonus for one in engine.verify((0, [1]), (4, [2]), (11, [3]))]
        assert together == [alone.verify((seq, [tok]))[0].bonus for seq, tok in ((0, 1), (4, 2), (11, 3))]
