"""Threads take turns on one object, go side by side on two, and never hang."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Callable

import child
import pytest
from tiny import Draft, Files, Target

import pyllama_dflash as pd
from pyllama_dflash._turn import Gate

Pair = tuple[Path, Path]
PROMPTS = ["the", "an owl sat ", "in the end ", "the owl and the cat sat in the sun"]


def together(functions: Iterable[Callable[[], Any]], timeout: float = 60) -> list[Any]:
    """Run each in a thread of its own from one moment on; what each returned or raised."""
    functions = list(functions)
    results: list[Any] = [None] * len(functions)
    start = threading.Barrier(len(functions))

    def work(index: int, function: Callable[[], Any]) -> None:
        start.wait()
        try:
            results[index] = function()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=each, daemon=True) for each in enumerate(functions)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not [thread for thread in threads if thread.is_alive()], "it hangs"
    return results


def run(spec: pd.Speculator, prompt: str) -> tuple[int, ...]:
    return spec.run(prompt, max_tokens=12, ignore_eos=True).tokens


def run_all(spec: pd.Speculator, prompts: list[str]) -> list[tuple[int, ...]]:
    return [run(spec, prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def pair(files: Files) -> Pair:
    """Of weights with which a row hardly depends on the batch it is in: what is cached changes that."""
    return files.pair(Target(weights="Q8_0"), Draft(weights="Q8_0"))


@pytest.fixture(scope="module")
def solo(pair: Pair) -> dict[str, tuple[int, ...]]:
    said = {}
    for prompt in PROMPTS:
        with pd.Speculator(*pair, n_ctx=128, n_threads=1) as spec:
            said[prompt] = run(spec, prompt)
    return said


def test_a_handle_is_freed_when_no_call_is_inside() -> None:
    """close() of another thread waits for the call, close() from inside of it leaves the work to its end."""
    events: list[str] = []
    gate = Gate("thing", lambda: events.append("freed"))
    inside, closing = threading.Event(), threading.Event()

    def native() -> None:
        inside.set()
        closing.wait(10)
        time.sleep(0.1)
        events.append("done")

    def close() -> None:
        inside.wait(10)
        closing.set()
        gate.close()
        events.append("closed")

    assert together([lambda: gate.call(native), close]) == [None, None]
    assert events[:2] == ["done", "freed"]
    assert set(events[2:]) == {"freed", "closed"} or events[2:] == ["closed"]
    with pytest.raises(pd.ClosedError, match="this thing is closed"):
        gate.call(native)
    events.clear()
    gate = Gate("thing", lambda: events.append("freed"))

    def close_inside() -> None:
        gate.close()
        events.append("done")

    gate.call(close_inside)
    assert events == ["done", "freed"]


def test_one_call_at_a_time_on_a_handle() -> None:
    gate, inside, most = Gate("thing", lambda: None), 0, 0

    def native() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.001)
        inside -= 1

    assert together([lambda: [gate.call(native) for _ in range(10)]] * 4) == [[None] * 10] * 4
    assert most == 1


def test_one_object_in_four_threads(pair: Pair, solo: dict[str, tuple[int, ...]]) -> None:
    with pd.Speculator(*pair, n_ctx=128, n_threads=1) as spec:
        results = together(partial(run_all, spec, [prompt] * 5) for prompt in PROMPTS)
        assert results == [[solo[prompt]] * 5 for prompt in PROMPTS]


def test_stream_shuts_others_out(pair: Pair, solo: dict[str, tuple[int, ...]]) -> None:
    with pd.Speculator(*pair, n_ctx=128, n_threads=1) as spec:
        stream = spec.stream("the", max_tokens=12, ignore_eos=True)
        tokens = list(next(stream).tokens)
        calls = [
            lambda: run(spec, "an owl sat "),
            lambda: next(spec.stream("an owl sat ")),
            lambda: spec.prefill("an owl sat "),
            lambda: spec.draft(),
            lambda: spec.reset(),
        ]
        for error in together(calls):
            assert isinstance(error, pd.BusyError), error
            assert threading.current_thread().name in str(error)
        assert spec.target.tokenize("the")  # the model is not busy
        tokens += [token for chunk in stream for token in chunk.tokens]
        assert tuple(tokens) == solo["the"]
        assert together([lambda: run(spec, "the")]) == [solo["the"]]


def test_stream_that_is_passed_on(pair: Pair, solo: dict[str, tuple[int, ...]]) -> None:
    """The thread that iterates it counts."""
    with pd.Speculator(*pair, n_ctx=128, n_threads=1) as spec, ThreadPoolExecutor(1) as other:
        stream = spec.stream("the", max_tokens=12, ignore_eos=True)
        first = next(stream).tokens
        second = other.submit(lambda: next(stream).tokens).result(60)
        with pytest.raises(pd.BusyError):
            run(spec, "an owl sat ")
        rest = other.submit(lambda: [token for chunk in stream for token in chunk.tokens]).result(60)
        assert (*first, *second, *rest) == solo["the"]
        assert run(spec, "the") == solo["the"]


def test_stream_of_a_dead_thread(pair: Pair, solo: dict[str, tuple[int, ...]]) -> None:
    """One that was left open in a thread that ended does not shut the object for good."""
    with pd.Speculator(*pair, n_ctx=128, n_threads=1) as spec:
        streams = [spec.stream("the owl", max_tokens=12)]
        together([lambda: next(streams[0])])
        assert run(spec, "the") == solo["the"]
        with pytest.raises(pd.OrderError):
            next(streams[0])


def test_two_objects_on_the_same_models(pair: Pair, solo: dict[str, tuple[int, ...]]) -> None:
    with pd.Model(pair[0]) as target, pd.Model(pair[1]) as draft:
        with (
            pd.Speculator(target, draft, n_ctx=128, n_threads=1) as a,
            pd.Speculator(target, n_ctx=128, n_threads=1) as b,
        ):
            plain = {prompt: run(b, prompt) for prompt in PROMPTS}
            results = together([partial(run_all, a, PROMPTS * 4), partial(run_all, b, PROMPTS[::-1] * 4)])
            assert results[0] == [solo[prompt] for prompt in PROMPTS] * 4
            assert results[1] == [plain[prompt] for prompt in PROMPTS[::-1]] * 4


@pytest.mark.parametrize("delay_ms", [0, 1, 5, 20, 60])
def test_close_races_run(pair: Pair, solo: dict[str, tuple[int, ...]], delay_ms: int) -> None:
    """Each run ends well or with ClosedError."""
    spec = pd.Speculator(*pair, n_ctx=128, n_threads=1)

    def close() -> None:
        time.sleep(delay_ms / 1000)
        spec.close()

    results = together([*(partial(run_all, spec, [prompt] * 5) for prompt in PROMPTS), close, close])
    for prompt, result in zip(PROMPTS, results):
        assert isinstance(result, pd.ClosedError) or result == [solo[prompt]] * 5
    assert results[-2:] == [None, None]
    with pytest.raises(pd.ClosedError):
        run(spec, "the")


def test_models_opened_side_by_side(pair: Pair, solo: dict[str, tuple[int, ...]]) -> None:
    def life() -> tuple[int, ...]:
        with pd.Speculator(*pair, n_ctx=128, n_threads=1) as spec:
            return run(spec, "the")

    assert together([life] * 6) == [solo["the"]] * 6


def test_tokenizing_beside_a_run(pair: Pair, solo: dict[str, tuple[int, ...]]) -> None:
    with pd.Speculator(*pair, n_ctx=128, n_threads=1) as spec:
        ids = spec.target.tokenize("the owl")
        results = together(
            [lambda: run(spec, "the"), *([lambda: [spec.target.tokenize("the owl") for _ in range(200)]] * 3)]
        )
        assert results == [solo["the"], *([[ids] * 200] * 3)]


def test_conversations_of_four_threads_on_one_object(pair: Pair, solo: dict[str, tuple[int, ...]], alone: Path) -> None:
    """S53: each goes on with its own text, kept in memory or in a file, whatever the others do between its calls."""

    def talk(spec: pd.Speculator, prompt: str) -> list[Any]:
        file, found = alone / str(PROMPTS.index(prompt)), []
        text = spec.target.tokenize(prompt)
        for _ in range(5):
            found.append(spec.run(text, max_tokens=12, ignore_eos=True).tokens)
            spec.save(file)  # a text of some thread
            start = spec.load(file)
            found.append(any(start[: len(ids)] == ids for ids in starts))
        return found

    with pd.Speculator(*pair, n_ctx=128, n_threads=1) as spec:
        starts = [tuple(spec.target.tokenize(prompt)) for prompt in PROMPTS]
        results = together(partial(talk, spec, prompt) for prompt in PROMPTS)
        assert results == [[solo[prompt], True] * 5 for prompt in PROMPTS]


@pytest.mark.parametrize("more", [2, 4])
def test_more_threads_than_cpus(pair: Pair, more: int) -> None:
    """Threads that wait for each other give way to those that work."""
    code = """
        import os, sys, time
        import pyllama_dflash as pd
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
        with pd.Speculator(*sys.argv[1:3], n_ctx=128, n_threads=int(sys.argv[3])) as spec:
            spec.run("the", max_tokens=4, ignore_eos=True)
            start = time.monotonic()
            result = spec.run("the", max_tokens=12, ignore_eos=True)
            print(len(result.tokens), time.monotonic() - start)
    """
    n_cpus = min(2, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    n_tokens, seconds = child.output(code, *pair, more * n_cpus, timeout=100).split()
    assert int(n_tokens) == 12
    assert float(seconds) < 30
