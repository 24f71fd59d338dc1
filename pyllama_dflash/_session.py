"""What a Speculator runs on: its options, its engine, and the native steps that both of its faces share."""

from __future__ import annotations

from functools import partial
from typing import Callable, NamedTuple, TypeVar

from . import _ffi, _ffi_engine, _log
from ._open import open_pair
from ._prefixes import prefixes_of, swap
from ._turn import Hold, Turn
from .errors import ContextFullError, DFlashError
from .memory import DeviceMemory, Graph, Memory, beside
from .model import Model, PathLike
from .params import GenerateParams, Params, check_int

T = TypeVar("T")

ROLLBACK = ("cut", "snapshots", "checkpoint")  # as enum pld_rollback counts


class Limits(NamedTuple):
    """Draft options of one call, the Speculator's own filled in."""

    n_max: int
    n_min: int
    margin: float
    p_min: float


class Session:
    """An engine, its models, and whose turn it is.

    Args:
        target, draft, params: as for Speculator.
    """

    def __init__(self, target: Model | PathLike, draft: Model | PathLike | None, params: Params) -> None:
        opened = open_pair(target, draft, params)
        self.params = params
        self.target, self.draft, self.engine = opened.target, opened.draft, opened.engine
        self.n_ctx: int = self.engine.info["n_ctx"]
        self.n_max: int = self.engine.info["n_max"]
        self._opened = opened
        self._many: _ffi_engine.EngineHandle | None = None
        self.kept = prefixes_of(self)
        self.turn = Turn("Speculator", self._release)
        self.width = 0  # rows of logits that the last verify left

    def _release(self) -> None:
        self.kept.clear()
        if self._many is not None:
            self._many.close()
        self._opened.close()

    def engine_for(self, hold: Hold, n_seq: int, n_ctx: int) -> _ffi_engine.EngineHandle:
        """Return an engine beside our own for at least n_seq sequences of n_ctx tokens; the last one is kept."""
        held = self._many
        if held is None or held.info["n_seq_max"] < n_seq or held.info["n_ctx"] < n_ctx:
            if held is not None:
                self._many = None
                self.step(hold, held.close)
            held = self._many = self.step(hold, lambda: self._opened.open_beside(self.params, n_seq, n_ctx))
        return held

    def prefill(self, hold: Hold, tokens: _ffi.Ints, on_progress: Callable[[int, int], None] | None = None) -> int:
        """Take a prompt and evaluate it, a native call for n_ubatch tokens; return how many were cached."""
        self.width = 0
        if self.kept.limit:
            swap(self, hold, tokens)
        n_cached = self.step(hold, lambda: _ffi_engine.begin(self.engine, tokens))
        n_todo = n_waiting = len(tokens) - 1 - n_cached
        while n_waiting:
            n_waiting = self.step(hold, lambda: _ffi_engine.prefill(self.engine))
            _log.drain()
            if on_progress:
                on_progress(n_todo - n_waiting, n_todo)
        return n_cached

    def propose(self, hold: Hold, limits: Limits, n_max: int, details: bool = False) -> _ffi_engine.Drafted:
        """Draft up to n_max tokens after the anchor."""
        n_min = min(limits.n_min, n_max)  # the end of the reply or of the context may leave room for less
        request = _ffi_engine.DraftRequest(0, n_max, n_min, limits.margin, limits.p_min)
        return self.step(hold, lambda: _ffi_engine.draft(self.engine, [request], details))[0]

    def verify(self, hold: Hold, tokens: list[int]) -> _ffi_engine.Verified:
        """Verify tokens after the anchor."""
        self.width = 0
        verified = self.step(hold, lambda: _ffi_engine.verify(self.engine, [(0, tokens)]))[0]
        self.width = len(tokens) + 1
        return verified

    def reset(self, hold: Hold) -> None:
        """Forget all cached tokens, those of run_many() too, and the texts that are kept; all caches are zeros then."""
        self.width = 0
        self.kept.clear()
        for engine in (self.engine, self._many):
            if engine is not None:
                self.step(hold, partial(_ffi_engine.reset, engine))

    def state(self, hold: Hold) -> _ffi_engine.EngineState:
        """Return where the engine stands."""
        return self.step(hold, lambda: _ffi_engine.state(self.engine))

    def memory(self) -> Memory:
        """Return what is kept between rounds."""

        def read() -> Memory:
            engines = [self.engine, *([self._many] if self._many else [])]
            graphs = [Graph(**graph) for engine in engines for graph in _ffi_engine.graphs(engine)]
            devices = [map(DeviceMemory.of, _ffi_engine.devices(engine)) for engine in engines]
            kept = {"n_prefixes": len(self.kept), "prefix_bytes": self.kept.n_bytes}
            return Memory(beside(*devices), tuple(graphs), **_ffi_engine.memory(self.engine), **kept)

        return self.turn.call(read)

    def step(self, hold: Hold, function: Callable[[], T]) -> T:
        """Run one native call of the holder."""
        try:
            return self.turn.step(hold, function)
        except (DFlashError, MemoryError):
            _log.drain()
            raise

    def alone(self, function: Callable[[Hold], T]) -> T:
        """Run a function that makes several steps as one whole call."""
        hold = Hold()
        try:
            self.turn.take(hold)
            return function(hold)
        finally:
            self.turn.leave(hold)

    def check_fits(self, tokens: _ffi.Ints) -> None:
        """Raise ContextFullError for a prompt that is longer than the context."""
        if len(tokens) > self.n_ctx:
            raise ContextFullError(
                f"the prompt has {len(tokens)} tokens, n_ctx={self.n_ctx}; shorten it or open with a larger n_ctx"
            )

    def limits(self, options: GenerateParams) -> Limits:
        """Fill a call's draft options in and check them."""
        if self.draft is None:
            for name in ("n_max", "n_min", "margin", "p_min"):
                if getattr(options, name):
                    raise ValueError(f"{name}={getattr(options, name)!r} has no effect without a draft; leave it out")
            return Limits(0, 0, 0.0, 0.0)
        n_max = self.n_max if options.n_max is None else options.n_max
        check_int("n_max", n_max, 0, self.n_max, f"n_max={self.n_max} that this Speculator was opened with")
        if not n_max or not options.speculate:
            return Limits(0, 0, 0.0, 0.0)
        n_min = self.params.n_min if options.n_min is None else options.n_min
        check_int("n_min", n_min, 0, n_max, f"n_max={n_max}")
        margin = self.params.margin if options.margin is None else options.margin
        return Limits(n_max, n_min, margin, self.params.p_min if options.p_min is None else options.p_min)
