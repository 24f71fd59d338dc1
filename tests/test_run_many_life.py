"""run_many and what happens around it: turns, threads, interrupts, failures of the engine, the context it keeps."""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Callable

import child
import pytest
from arch_table import ARCHS
from laws import Models
from test_run_many import DRAFTS, OPTIONS, PROMPTS, TARGET, good, solo, tokens
from test_threads import together
from tiny import Files

import pyllama_dflash as pd
from pyllama_dflash import _ffi_engine, _many, _open


@pytest.fixture
def spec(models: Models) -> Iterator[pd.Speculator]:
    """One of the test's own."""
    with models.fresh(TARGET, DRAFTS[1]) as spec:
        yield spec


def endless(n: int = 50) -> Iterator[dict[str, Any]]:
    return ({"prompt": prompt, "max_tokens": n} for prompt in itertools.cycle(PROMPTS))


# turns ----------------------------------------------------------------------------------------------------------------


def leave_by_close(many: Any) -> None:
    many.close()
    many.close()
    assert list(many) == []


def leave_by_dropping(many: Any) -> None:
    pass


def leave_by_raising(many: Any) -> None:
    with pytest.raises(KeyError), many:
        raise KeyError


@pytest.mark.parametrize("n_results", [0, 1, 3])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("leave", [leave_by_close, leave_by_dropping, leave_by_raising])
def test_it_may_be_left_at_any_point(
    spec: pd.Speculator, leave: Callable[[Any], None], ordered: bool, n_results: int
) -> None:
    expected = solo(spec)
    many = spec.run_many(endless(), n_parallel=3, ordered=ordered, ignore_eos=True)
    list(itertools.islice(many, n_results))
    leave(many)
    del many
    gc.collect()
    with ThreadPoolExecutor(1) as other:  # nothing holds the object any longer
        assert other.submit(lambda: solo(spec)).result(60) == expected
        assert other.submit(lambda: tokens(spec.run_many(PROMPTS, n_parallel=3, **OPTIONS))).result(60) == expected


def test_nothing_happens_before_the_first_is_asked_for(spec: pd.Speculator) -> None:
    many = spec.run_many(iter(PROMPTS), **OPTIONS)
    expected = solo(spec)
    assert tokens(many) == expected


@pytest.mark.parametrize("ordered", [True, False])
def test_another_call_of_the_thread_takes_over(spec: pd.Speculator, ordered: bool) -> None:
    expected = solo(spec, PROMPTS[:2])
    calls: list[Callable[[], Any]] = [
        lambda: spec.run("the", max_tokens=2),
        lambda: next(spec.stream("the")),
        lambda: next(spec.run_many(["no"], max_tokens=2)),
    ]
    for call in calls:
        many = spec.run_many(endless(), n_parallel=2, ordered=ordered, ignore_eos=True)
        next(many)
        call()
        with pytest.raises(pd.OrderError, match="taken over"):
            list(many)
        assert list(many) == []
    assert solo(spec, PROMPTS[:2]) == expected


def test_a_call_from_within_the_prompts_takes_over(spec: pd.Speculator) -> None:
    def prompts() -> Iterator[str]:
        yield "the"
        spec.run("no", max_tokens=1)
        yield "an owl"

    with pytest.raises(pd.OrderError):
        list(spec.run_many(prompts(), n_parallel=2, **OPTIONS))

    def own() -> Iterator[str]:
        yield "the"
        next(many)

    many = spec.run_many(own(), n_parallel=1, **OPTIONS)
    next(many)
    with pytest.raises(pd.BusyError):
        next(many)


def test_other_threads_are_shut_out(spec: pd.Speculator) -> None:
    expected = solo(spec)
    with spec.run_many(PROMPTS, n_parallel=2, **OPTIONS) as many:
        first = next(many)
        for error in together([lambda: spec.run("no"), lambda: next(spec.run_many(["no"])), lambda: spec.reset()]):
            assert isinstance(error, pd.BusyError), error
        assert tokens([first, *many]) == expected
    assert together([lambda: spec.run(PROMPTS[0], **OPTIONS).tokens]) == [expected[0]]


def test_two_threads_in_one_iterator(spec: pd.Speculator) -> None:
    expected = sorted(solo(spec))
    many = spec.run_many(PROMPTS, n_parallel=2, **OPTIONS)

    def take() -> list[tuple[int, ...]]:
        got = []
        while True:
            try:
                got.append(good(next(many)).tokens)
            except pd.BusyError:
                continue
            except StopIteration:
                return got

    assert sorted(itertools.chain(*together([take] * 3))) == expected


def test_threads_that_do_as_they_please(spec: pd.Speculator) -> None:
    """S53: each call has its own results, or says that another thread is at it."""
    expected = solo(spec)

    def many() -> Any:
        return tokens(spec.run_many(PROMPTS, n_parallel=3, **OPTIONS))

    def runs() -> Any:
        return solo(spec)

    for found in together([*(partial(_patient, many),) * 3, *(partial(_patient, runs),) * 2], timeout=120):
        assert found == expected


def _patient(function: Callable[[], Any]) -> Any:
    while True:
        try:
            return function()
        except pd.BusyError:
            continue


@pytest.mark.parametrize("n_results", [0, 1, 4])
def test_close_in_the_middle(models: Models, n_results: int) -> None:
    for closing in (lambda spec: spec.close(), lambda spec: together([spec.close])):
        spec = models.fresh(TARGET, DRAFTS[1])
        many = spec.run_many(endless(), n_parallel=3, ignore_eos=True)
        list(itertools.islice(many, n_results))
        closing(spec)
        with pytest.raises(pd.ClosedError):
            list(many)
        with pytest.raises(pd.ClosedError):
            spec.run_many(PROMPTS)


def test_close_while_another_thread_iterates(models: Models) -> None:
    spec = models.fresh(TARGET, DRAFTS[1])
    started = spec.run_many(endless(), n_parallel=3, ignore_eos=True)
    next(started)
    results = together([lambda: list(started), spec.close])
    assert isinstance(results[0], pd.ClosedError)
    assert results[1] is None


INTERRUPTED = """
    import itertools, json, os, signal, sys, threading, time
    import pyllama_dflash as pd
    signal.signal(signal.SIGINT, signal.default_int_handler)
    spec = pd.Speculator(*sys.argv[1:3], n_ctx=8192, n_ubatch=4, n_threads=1)
    prompts, long = json.loads(sys.argv[3]), sys.argv[4] == "prompt"
    solo = [spec.run(prompt, max_tokens=8, ignore_eos=True).tokens for prompt in prompts]
    sent = []

    def press():
        time.sleep(0.3)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    jobs = ({"prompt": "the owl " * (1500 if long else 1), "max_tokens": 6000} for _ in itertools.count())
    threading.Thread(target=press, daemon=True).start()
    try:
        list(spec.run_many(jobs, n_parallel=3, ignore_eos=True))
    except KeyboardInterrupt:
        assert time.monotonic() - sent[0] < 1
    many = spec.run_many(prompts, n_parallel=3, max_tokens=8, ignore_eos=True)
    found = []
    other = threading.Thread(target=lambda: found.extend(result.result.tokens for result in many), daemon=True)
    other.start()
    other.join(60)
    print(found == solo)
"""


@pytest.mark.parametrize("what", ["rounds", "prompt"])
def test_ctrl_c(files: Files, what: str) -> None:
    paths = files.path(TARGET), files.path(DRAFTS[1])
    assert child.output(INTERRUPTED, *paths, json.dumps(PROMPTS), what) == "True\n"


# failures of the engine -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [pd.DecodeError("out of luck"), pd.DFlashError("a fault"), MemoryError("no room")], ids=repr
)
@pytest.mark.parametrize(("name", "at"), [("verify", 1), ("verify", 7), ("draft", 3), ("prefill", 2), ("begin", 1)])
def test_what_is_in_flight_fails_and_the_rest_goes_on(
    spec: pd.Speculator, monkeypatch: pytest.MonkeyPatch, name: str, at: int, error: Exception
) -> None:
    expected, native, calls = solo(spec), getattr(_ffi_engine, name), itertools.count(1)

    def failing(engine: Any, *args: Any) -> Any:
        if next(calls) == at:
            _ffi_engine.reset(engine)  # as the library does
            raise error
        return native(engine, *args)

    monkeypatch.setattr(_ffi_engine, name, failing)
    results = list(spec.run_many(PROMPTS, n_parallel=2, **OPTIONS))
    lost = [result.index for result in results if result.error is not None]
    assert 1 <= len(lost) <= 2
    assert all(results[index].error is error for index in lost)
    for result, own in zip(results, expected):
        assert result.index in lost or good(result).tokens == own


def test_no_room_for_the_context(spec: pd.Speculator, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = solo(spec)

    def failing(*_: Any) -> Any:
        raise MemoryError("nothing is left")

    monkeypatch.setattr(_open, "_open_engine", failing)
    with pytest.raises(MemoryError, match=r"nothing is left; for 4 sequences of 512 tokens: lower n_parallel or n_ctx"):
        list(spec.run_many(iter(PROMPTS), **OPTIONS))
    monkeypatch.undo()
    assert tokens(spec.run_many(PROMPTS, **OPTIONS)) == expected


def test_a_context_that_cannot_fit_is_refused_before_it_is_tried(models: Models) -> None:
    with (
        models.fresh(TARGET, n_ctx=1 << 20) as spec,
        pytest.raises(MemoryError, match=r"=1048576 needs .* lower n_parallel"),
    ):
        list(spec.run_many(iter(PROMPTS), n_parallel=64))


def test_more_tokens_than_an_engine_counts(models: Models) -> None:
    """A recurrent state takes no memory for its context, so that nothing else is in the way."""
    with models.fresh(ARCHS["mamba2"], n_ctx=1 << 23) as spec:
        took = (
            "at n_ctx=8388608, take 536870912 tokens of context, more than 268435456; lower n_parallel to 32, or n_ctx"
        )
        with pytest.raises(ValueError, match=f"^n_parallel=64 prompts side by side, {took}$"):
            list(spec.run_many(iter(PROMPTS), n_parallel=64))
        long = [{"prompt": [5, 6], "max_tokens": (1 << 23) - 600}] * 40
        with pytest.raises(ValueError, match=r"^n_parallel=50 .* at n_ctx=8388608, take 335523840 tokens .* to 32, or"):
            list(spec.run_many(long, n_parallel=50))
        assert len(tokens(spec.run_many(PROMPTS, n_parallel=64, max_tokens=4))) == len(PROMPTS)


# the context that is kept ---------------------------------------------------------------------------------------------


def test_the_context_is_as_large_as_it_must_be_and_kept(
    models: Models, spec: pd.Speculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, native = list[tuple[int, int]](), _open.Opened.open_beside

    def noted(self: Any, params: Any, n_seq: int, n_ctx: int) -> Any:
        opened.append((n_seq, n_ctx))
        return native(self, params, n_seq, n_ctx)

    monkeypatch.setattr(_open.Opened, "open_beside", noted)
    for _ in range(2):
        list(spec.run_many(PROMPTS[:2], n_parallel=8, max_tokens=4))
    assert opened == [(2, 256)]
    list(spec.run_many(PROMPTS[:1], n_parallel=2, max_tokens=4))
    assert opened[1:] == []
    list(spec.run_many(PROMPTS, n_parallel=3, max_tokens=4))
    list(spec.run_many(["a tree " * 60], n_parallel=3, max_tokens=256))
    assert opened[1:] == [(3, 256), (1, 512)]
    list(spec.run_many(iter(PROMPTS), n_parallel=5, max_tokens=4))
    assert opened[3:] == [(5, 512)]
    list(spec.run_many([None, "", 5.5], n_parallel=5, max_tokens=4))  # type: ignore[list-item]
    assert len(opened) == 4
    with models.fresh(TARGET, n_ctx=300) as small:
        list(small.run_many(["a tree " * 60], max_tokens=1000))
    assert opened[4:] == [(1, 300)]
    monkeypatch.setattr(_many, "_FEW", 3)  # more are not looked at first
    list(spec.run_many(PROMPTS, n_parallel=9, max_tokens=4))
    assert opened[5:] == [(9, 512)]


def test_what_the_own_context_holds_stays(spec: pd.Speculator) -> None:
    spec.run("the owl and the cat sat ", max_tokens=4, ignore_eos=True)
    before = spec.state
    list(spec.run_many(PROMPTS, **OPTIONS))
    assert spec.state == before
    assert spec.run("the owl and the cat sat ", max_tokens=4, ignore_eos=True).stats.prompt_n == 1


def test_close_frees_it(models: Models) -> None:
    spec = models.fresh(TARGET, DRAFTS[1])
    list(spec.run_many(PROMPTS, max_tokens=4))
    engine = spec._session._many
    assert engine is not None
    assert engine.pointer
    spec.close()
    with pytest.raises(pd.ClosedError):
        engine.pointer  # noqa: B018 - reading it is the test


def test_it_counts_as_memory(models: Models) -> None:
    with models.fresh(TARGET, DRAFTS[1]) as spec:
        alone = spec.memory.total
        list(spec.run_many(iter(PROMPTS), n_parallel=3, max_tokens=4))
        beside = spec.memory
        assert beside.total.target_weights == alone.target_weights
        assert beside.total.draft_weights == alone.draft_weights
        assert beside.total.target_kv >= 4 * alone.target_kv
        assert beside.total.draft_kv >= 3 * alone.draft_kv
        assert any(graph.n_rows > spec.n_max + 1 for graph in beside.graphs)
        assert len(beside.devices) == len({row.device for row in beside.devices})
