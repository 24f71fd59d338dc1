"""Ctrl-C stops a call within a round or a prefill step, and what is left over does not show in the next call."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import child
import pytest
from laws import Models
from tiny import Draft, Target

import pyllama_dflash as pd

PROMPT = "the owl and the cat sat in the sun "
TARGET, DRAFT = Target(weights="Q8_0"), Draft(weights="Q8_0")
# Run a call, have SIGINT sent to the process as a terminal does, say how long the call went on after that, and what the
# same object says then.
INTERRUPTED = """
    import json, os, signal, sys, threading, time
    import pyllama_dflash as pd
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of some shells ignores it
    what, prompt = sys.argv[3:5]
    spec = pd.Speculator(*sys.argv[1:3], n_ctx=8192, n_ubatch=4, n_threads=1)
    spec.run(prompt, max_tokens=4)
    sent, n_seen = [], 0

    def press():
        time.sleep(0.3)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    try:
        if what == "run":
            spec.run(prompt, max_tokens=8000, ignore_eos=True)
        elif what == "stream":
            for chunk in spec.stream(prompt, max_tokens=8000, ignore_eos=True):
                n_seen += len(chunk.tokens)
        elif what == "plain":
            spec.run(prompt, max_tokens=8000, ignore_eos=True, speculate=False)
        elif what == "prefill":
            spec.prefill(prompt * 300)
        else:
            spec.run(prompt * 300, max_tokens=8)
    except KeyboardInterrupt:
        late = time.monotonic() - sent[0]
    else:
        sys.exit("the call ended before the interrupt")
    n_done = spec.state.n_past
    results = []  # of another thread, which would wait if the object still belonged to the call
    other = threading.Thread(
        target=lambda: results.append(spec.run(prompt, max_tokens=24, ignore_eos=True)), daemon=True
    )
    other.start()
    other.join(30)
    (result,) = results
    print(json.dumps([late, n_done, n_seen, list(result.tokens), result.stats.prompt_n_cached]))
"""


@pytest.fixture(scope="module")
def paths(models: Models) -> tuple[Path, Path]:
    return models.files.path(TARGET), models.files.path(DRAFT)


def reference(models: Models, prompt: str, max_tokens: int) -> tuple[int, ...]:
    """What an object that was never interrupted says."""
    with models.fresh(TARGET, DRAFT) as spec:
        return spec.run(prompt, max_tokens=max_tokens, ignore_eos=True).tokens


@pytest.mark.parametrize("what", ["run", "stream", "plain", "prefill", "run in its prefill"])
def test_sigint(models: Models, paths: tuple[Path, Path], what: str) -> None:
    late, n_done, n_seen, tokens, n_cached = json.loads(child.output(INTERRUPTED, *paths, what, PROMPT))
    assert late < 1.0  # a round takes some ms; the rest is room for a busy machine
    assert 0 < n_done < 8000  # it was under way
    assert (n_seen > 0) == (what == "stream")
    assert n_cached > 0
    models.assert_same(TARGET, PROMPT, tokens, reference(models, PROMPT, 24))


@pytest.mark.parametrize("way", ["close", "drop", "keep", "raise", "throw"])
@pytest.mark.parametrize("n_chunks", [0, 1, 3])
def test_abandoned_stream(models: Models, way: str, n_chunks: int) -> None:
    prompt = "in the end an owl sat "
    with models.fresh(TARGET, DRAFT) as spec:
        kept: list[Any] = []
        for _ in range(2):
            stream = spec.stream(PROMPT, max_tokens=60, ignore_eos=True)
            for _ in range(n_chunks):
                next(stream)
            if way == "close":
                stream.close()
                stream.close()
            elif way == "keep":
                kept.append(stream)
            elif way == "raise":
                with pytest.raises(KeyError), stream:
                    raise KeyError
            elif way == "throw":
                with pytest.raises(KeyError):
                    stream._steps.throw(KeyError)
            del stream
            gc.collect()
        with ThreadPoolExecutor(1) as other:  # nothing holds the object, unless a stream that may go on
            call = partial(spec.run, prompt, max_tokens=24, ignore_eos=True)
            result = call() if way == "keep" else other.submit(call).result(60)
        models.assert_same(TARGET, prompt, result.tokens, reference(models, prompt, 24))
        for stream in kept[: n_chunks and 2]:  # one that was begun is over, one that was not may begin
            with pytest.raises((pd.OrderError, StopIteration)):
                next(stream)


# command line ---------------------------------------------------------------------------------------------------------

CLI = """
    import signal, sys
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from pyllama_dflash.__main__ import main
    sys.exit(main(sys.argv[1:]))
"""


def pressed(*args: Any, wait_for_text: bool) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command line after Ctrl-C."""
    with subprocess.Popen(
        child.arguments(CLI, *args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", bufsize=1
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.read(1) if wait_for_text else process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode is not None
        return process.returncode, (first if wait_for_text else "") + out, err


LONG = ("-c", "8192", "-n", "8000", "-t", "1", "--ignore-eos", "--raw", "-p", PROMPT)


def test_command_line_keeps_what_was_said(models: Models, paths: tuple[Path, Path]) -> None:
    code, out, err = pressed("run", "-m", paths[0], "-md", paths[1], *LONG, wait_for_text=True)
    assert code == 130
    assert len(out) > 1
    assert out.endswith("\n")
    assert "tok/s" in err.splitlines()[0]
    assert "Traceback" not in err


def test_command_line_while_it_prepares(paths: tuple[Path, Path]) -> None:
    """From the first line that -v shows, while it opens the models or evaluates the prompt."""
    args = ("run", "-m", paths[0], *LONG[:-1], PROMPT * 220, "-ub", "1", "-v")
    code, out, err = pressed(*args, wait_for_text=False)
    assert code == 130
    assert "Traceback" not in err
    assert len(out) < 100


@pytest.mark.skipif(os.name != "posix", reason="a process of another system has no process group to signal")
def test_interrupt_while_another_thread_works(paths: tuple[Path, Path]) -> None:
    """The main thread waits for a run() of another thread; Ctrl-C ends the wait, and close() waits for a round only."""
    code = """
        import os, signal, sys, threading, time
        import pyllama_dflash as pd
        signal.signal(signal.SIGINT, signal.default_int_handler)
        spec = pd.Speculator(*sys.argv[1:3], n_ctx=8192, n_threads=1)
        closed = []

        def work():
            try:
                spec.run("the", max_tokens=8000, ignore_eos=True)
            except pd.ClosedError:
                closed.append(True)

        worker = threading.Thread(target=work)
        worker.start()
        time.sleep(0.1)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            spec.run("the owl", max_tokens=4)
        except KeyboardInterrupt:
            print("interrupted")
        start = time.monotonic()
        spec.close()
        worker.join(30)
        assert time.monotonic() - start < 5
        print(closed)
    """
    assert child.output(code, *paths) == "interrupted\n[True]\n"


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="counts mappings and threads")
@pytest.mark.parametrize("opener", ["model_open", "__init__"])
def test_an_interrupt_as_soon_as_something_is_open_frees_it(paths: tuple[Path, Path], opener: str) -> None:
    code = """
        import gc, os, sys
        import pyllama_dflash as pd
        from pyllama_dflash import _ffi
        check = _ffi.check

        def pressed(result):
            if sys._getframe(1).f_code.co_name == sys.argv[3]:
                raise KeyboardInterrupt
            return check(result)

        def left():
            mapped = sum(sys.argv[1] in line or sys.argv[2] in line for line in open("/proc/self/maps"))
            return mapped, len(os.listdir("/proc/self/task"))

        with pd.Speculator(*sys.argv[1:3], n_ctx=256, n_threads=2) as spec:
            spec.run("the", max_tokens=2)
        before = left()
        _ffi.check = pressed
        for _ in range(3):
            try:
                pd.Speculator(*sys.argv[1:3], n_ctx=256, n_threads=2)
            except KeyboardInterrupt:
                pass
        gc.collect()
        print(left() == before, before, left())
    """
    assert child.output(code, *paths, opener).startswith("True")
