"""Memory comes back, objects may go in any order, and a process ends without a word."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import child
import pytest
from tiny import Draft

import pyllama_dflash as pd

Pair = tuple[Path, Path]
SMALL: dict[str, Any] = {"n_ctx": 64, "n_threads": 1}
ROUNDS = """
    import ctypes, sys, psutil
    import pyllama_dflash as pd
    me, trim = psutil.Process(), getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: 0)
    for _ in range(int(sys.argv[3])):
        with pd.Speculator(*sys.argv[1:3], n_ctx=512, n_threads=2) as spec:
            spec.run("the owl", max_tokens=8, ignore_eos=True)
            next(spec.stream("the", max_tokens=20))
        del spec
        trim(0)
        print(me.memory_info().rss, me.num_fds(), me.num_threads())
"""


def say(spec: pd.Speculator) -> tuple[int, ...]:
    return spec.run("the", max_tokens=6, ignore_eos=True).tokens


@pytest.fixture(scope="module")
def said(pair: Pair) -> tuple[int, ...]:
    with pd.Speculator(*pair, **SMALL) as spec:
        return say(spec)


# memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_rounds", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_memory_is_flat(pair: Pair, n_rounds: int) -> None:
    """What a round leaves behind would add up: an engine of this pair takes some MB, its smallest buffers 100 kB.

    Of what is freed the allocator keeps some for itself, more or less each time, until it is told to trim. Then the
    size varies by 0.1 MB; the first rounds, which fill caches, are warm-up. A leak of 100 kB a round shows in 20
    rounds, one of 6 kB in 200.
    """
    lines = [tuple(map(int, line.split())) for line in child.output(ROUNDS, *pair, n_rounds).splitlines()]
    assert len(lines) == n_rounds
    early, late = (min(rss for rss, _, _ in part) for part in (lines[4:8], lines[-4:]))
    assert late - early < 1 << 20
    assert len({n_fds for _, n_fds, _ in lines}) == 1
    assert len({n_threads for _, _, n_threads in lines}) == 1


def test_cycles_are_collected(pair: Pair) -> None:
    """An object that refers to itself is freed by the collector, without close()."""
    spec: Any = pd.Speculator(*pair, **SMALL)
    spec.target.owner = spec
    stream = spec.stream("the", max_tokens=20)
    next(stream)
    spec.target.stream = stream
    gone = [weakref.ref(spec), weakref.ref(spec._session.engine), weakref.ref(spec.target._handle)]
    del spec, stream
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


def test_failed_opening_closes_the_target(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[pd.Model] = []

    class Seen(pd.Model):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            opened.append(self)

    monkeypatch.setattr("pyllama_dflash._open.Model", Seen)
    file = Draft().file()
    del file.tensors["fc.weight"]  # which the header's check leaves to the load
    with pytest.raises(pd.ModelLoadError, match=r"fc\.weight"):
        pd.Speculator(pair[0], file.write(tmp_path / "d.gguf"), **SMALL)
    assert [model.path for model in opened] == [str(pair[0])]
    with pytest.raises(ValueError, match="n_max=8"):
        pd.Speculator(*pair, **SMALL, n_max=8)
    assert [model.closed for model in opened] == [True] * 3


# orders ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["tds", "dts", "tsd", "dst", "std", "sdt"])
def test_closing_in_any_order(pair: Pair, said: tuple[int, ...], order: str) -> None:
    target, draft = (pd.Model(path) for path in pair)
    spec = pd.Speculator(target, draft, **SMALL)
    assert say(spec) == said
    objects: dict[str, Any] = {"t": target, "d": draft, "s": spec}
    for name in order:
        objects[name].close()
        if name == "d" and not spec.closed and not target.closed:
            assert say(spec) == said  # the engine has the draft's weights; its tokenizer is not needed
    assert all(each.closed for each in objects.values())
    with pd.Speculator(*pair, **SMALL) as spec:
        assert say(spec) == said


@pytest.mark.parametrize("order", ["tds", "dts", "sdt"])
def test_dropping_in_any_order(pair: Pair, said: tuple[int, ...], order: str) -> None:
    objects: dict[str, Any] = dict(zip("td", (pd.Model(path) for path in pair)))
    objects["s"] = pd.Speculator(objects["t"], objects["d"], **SMALL)
    for name in order:
        del objects[name]
        gc.collect()
        if "s" in objects:
            assert say(objects["s"]) == said


def test_models_outlive_a_speculator_that_was_given_them(pair: Pair, said: tuple[int, ...]) -> None:
    with pd.Model(pair[0]) as target, pd.Model(pair[1]) as draft:
        for _ in range(3):
            with pd.Speculator(target, draft, **SMALL) as spec:
                assert say(spec) == said
        assert not target.closed
        assert target.tokenize("the")


USES: dict[str, Callable[[pd.Speculator], Any]] = {
    "run": lambda s: s.run("the"),
    "stream": lambda s: s.stream("the"),
    "prefill": lambda s: s.prefill("the"),
    "draft": lambda s: s.draft(),
    "verify": lambda s: s.verify([]),
    "reset": lambda s: s.reset(),
    "state": lambda s: s.state,
    "with": lambda s: s.__enter__(),
    "tokenize": lambda s: s.target.tokenize("the"),
    "meta": lambda s: s.target.meta("general.name"),
    "check_pair": lambda s: s.target.check_pair(s.target),
    "again": lambda s: pd.Speculator(s.target),
}


@pytest.mark.parametrize("use", USES)
def test_use_after_close(pair: Pair, use: str) -> None:
    spec = pd.Speculator(*pair, **SMALL)
    spec.prefill("the")
    for _ in range(2):
        spec.close()  # twice is once
    assert spec.closed
    assert spec.n_ctx == 64  # what needs no handle stays
    assert "Speculator" in repr(spec)
    with pytest.raises(pd.ClosedError, match="closed"):
        USES[use](spec)


def test_closing_inside_a_stream(pair: Pair) -> None:
    spec = pd.Speculator(*pair, **SMALL)
    stream = spec.stream("the", max_tokens=30, ignore_eos=True)
    next(stream)
    spec.close()
    with pytest.raises(pd.ClosedError):
        next(stream)
    stream.close()


def test_closing_inside_a_callback(pair: Pair) -> None:
    """The handle is freed when the call that it is closed from ends."""
    spec = pd.Speculator(*pair, **SMALL, n_ubatch=2)
    with pytest.raises(pd.ClosedError):
        spec.prefill("the owl and the cat", lambda done, todo: spec.close())
    assert spec.closed


# ends of a process ----------------------------------------------------------------------------------------------------

OPEN = "spec = pd.Speculator(*pair, n_ctx=64)\n"
FAIL = """
each = pd.{0}.__new__(pd.{0})
try:
    each.__init__({1})
except (pd.ModelLoadError, ValueError) as error:
    kept = error
"""
ENDS = {
    "only imported": "",
    "unclosed": OPEN + "spec.run('the', max_tokens=4)",
    "unclosed models": "models = [pd.Model(path) for path in pair]\nspec = pd.Speculator(*models, n_ctx=64)",
    "in a stream": OPEN + "stream = spec.stream('the')\nnext(stream)",
    "in a cycle": OPEN + "spec.target.owner = spec",
    "in a module": OPEN + "sys.spec = sys.modules['spec'] = spec",
    "failed to open": FAIL.format("Speculator", "'gone.gguf'"),
    "failed to open the draft": FAIL.format("Speculator", "pair[0], 'gone.gguf'"),
    "failed options": FAIL.format("Speculator", "*pair, n_ctx=-1"),
    "failed model": FAIL.format("Model", "'gone.gguf'"),
    "closed at exit": OPEN + "import atexit\natexit.register(spec.close)",
    "used at exit": OPEN + "import atexit\natexit.register(lambda: spec.run('the', max_tokens=4))",
    "thread in a call": """
import threading, time
spec = pd.Speculator(*pair, n_ctx=8192)
work = lambda: spec.run("the", max_tokens=8000, ignore_eos=True)
threading.Thread(target=work, daemon=True).start()
time.sleep(0.3)
assert spec.state.n_past
""",
}


@pytest.mark.parametrize("way", ENDS)
def test_end_of_the_process(pair: Pair, way: str) -> None:
    code = f"import sys\nimport pyllama_dflash as pd\npair = sys.argv[1:]\n{ENDS[way]}"
    assert child.output(code, *pair) == ""


def test_nothing_is_printed(pair: Pair, tmp_path: Path) -> None:
    """Neither by a life in good order nor by files that llama.cpp complains about."""
    (tmp_path / "cut.gguf").write_bytes(pair[0].read_bytes()[:9000])
    (tmp_path / "text.gguf").write_text("not a model")
    code = """
        import sys
        import pyllama_dflash as pd
        for target, draft in (sys.argv[1:3], sys.argv[3:5], sys.argv[2:0:-1]):
            try:
                with pd.Speculator(target, draft, n_ctx=64, n_threads=2) as spec:
                    spec.run("the", max_tokens=8)
                    spec.run(messages="the", max_tokens=8, speculate=False)
            except pd.DFlashError:
                pass
    """
    assert child.output(code, *pair, tmp_path / "cut.gguf", tmp_path / "text.gguf") == ""


def test_a_closed_object_says_so(pair: Pair) -> None:
    with pd.Speculator(*pair, **SMALL) as spec:
        assert "closed" not in repr(spec)
        assert "closed" not in repr(spec.target)
    assert repr(spec).endswith(", closed>")
    assert repr(spec.target).endswith("(closed)>")


# logs -----------------------------------------------------------------------------------------------------------------


class Failing(logging.Handler):
    """A handler that fails on each line."""

    def __init__(self) -> None:
        super().__init__()
        self.n_lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.n_lines += 1
        raise RuntimeError("a fault of the caller's handler")


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("pyllama_dflash")
    level, handlers = logger.level, list(logger.handlers)
    yield logger
    logger.setLevel(level)
    logger.handlers = handlers


def test_log_lines_arrive(pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "pyllama_dflash"), pd.Speculator(*pair, **SMALL) as spec:
        say(spec)
    lines = [record for record in caplog.records if record.name == "pyllama_dflash.llama_cpp"]
    assert len(lines) > 50
    ours = [record.message for record in caplog.records if record.name == "pyllama_dflash"]
    assert any("memory on CPU: weights" in line for line in ours)
    assert len(ours) < 10
    assert {record.levelno for record in lines} <= {logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR}
    assert any(pair[0].name in record.message for record in lines)
    assert any(pair[1].name in record.message for record in lines)
    caplog.clear()
    (tmp_path / "cut.gguf").write_bytes(pair[0].read_bytes()[:9000])
    with caplog.at_level(logging.WARNING, "pyllama_dflash"):
        with pytest.raises(pd.ModelLoadError):
            pd.Model(tmp_path / "cut.gguf")
        pd.Model(pair[0]).close()
    assert all(record.levelno >= logging.WARNING for record in caplog.records)


def test_no_line_is_lost_at_exit(pair: Pair) -> None:
    """What waits in the ring when the program ends is handed on."""
    code = """
        import logging, sys
        logging.basicConfig(stream=sys.stdout, level=logging.DEBUG, format="%(message)s")
        import pyllama_dflash as pd
        pd.speculator._log.drain = lambda: None  # as if the program ended right after the native call
        pd.Model(sys.argv[1])
        print("-- end", flush=True)
    """
    before, after = child.output(code, *pair).split("-- end\n")
    assert pair[0].name not in before
    assert pair[0].name in after


def test_handler_that_fails(pair: Pair, said: tuple[int, ...], logger: logging.Logger) -> None:
    handler = Failing()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    with pd.Speculator(*pair, **SMALL) as spec:
        assert say(spec) == said
    assert handler.n_lines > 50


def test_handler_that_uses_the_object(pair: Pair, said: tuple[int, ...], logger: logging.Logger) -> None:
    """A log handler may call back into the library, even close what logs."""
    opened: list[pd.Speculator] = []

    class Closing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            for spec in opened:
                spec.close()

    logger.addHandler(Closing())
    logger.setLevel(logging.DEBUG)
    spec = pd.Speculator(*pair, **SMALL)
    opened.append(spec)
    spec.target.tokenize("the")
    pd.Model(pair[0]).close()  # logs
    assert spec.closed
