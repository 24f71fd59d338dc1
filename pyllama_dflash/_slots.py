"""The sequences of an engine side by side, each with a reply that grows. A round is one launch for all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Callable, TypeVar

from . import _ffi_engine
from ._ffi import Ints
from ._reply import Reply
from ._session import Limits, Session
from ._turn import Hold
from .errors import ClosedError, DFlashError, OrderError
from .params import GenerateParams
from .result import ManyResult, Result

T = TypeVar("T")
NO_DRAFT = _ffi_engine.Drafted([], None, 0)
_SHORT = 64  # tokens of prompts that are evaluated side by side
_ROUNDS = 4  # in which a prompt may go along with others' rounds: its own launch takes as long as one or two, of all


@dataclass(eq=False)
class Task:
    """A prompt that can be answered, and its reply so far."""

    index: int
    tokens: Ints
    limits: Limits
    reply: Reply
    options: GenerateParams
    n_cached: int = 0
    n_waiting: int = 1  # tokens of the prompt that are still to be evaluated; not known before it begins
    prompt_ms: float = 0.0
    emitted: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)

    @property
    def n_needed(self) -> int:
        """Size of a context in which this reply ends as in a larger one."""
        return len(self.tokens) + self.options.max_tokens

    @property
    def over(self) -> bool:
        """Whether the reply is complete."""
        return not self.n_waiting and self.reply.finish is not None

    def result(self) -> ManyResult:
        """Return the reply that is over."""
        self._collect()
        stats = self.reply.tally.stats()
        return ManyResult(
            self.index, Result("".join(self.text), tuple(self.emitted), str(self.reply.finish), stats), None
        )

    def request(self, seq: int) -> _ffi_engine.DraftRequest:
        """Return what is to be drafted next."""
        n, limits = self.reply.n_draft, self.limits
        return _ffi_engine.DraftRequest(seq, n, min(limits.n_min, n), limits.margin, limits.p_min)

    def add_round(self, drafted: _ffi_engine.Drafted, verified: _ffi_engine.Verified, t_ms: float) -> None:
        """Take what a round of t_ms brought."""
        self.reply.add_round(drafted, verified, t_ms)
        if not self.over:
            self._collect()

    def add_chunk(self, n_waiting: int, t_ms: float) -> None:
        """Take note that a step of t_ms left so many tokens of the prompt."""
        self.n_waiting, self.prompt_ms = n_waiting, self.prompt_ms + t_ms
        if not n_waiting:
            self.reply.tally.add_prefill(len(self.tokens) - self.n_cached, self.n_cached, self.prompt_ms)

    def _collect(self) -> None:
        chunk = self.reply.chunk()
        self.text.append(chunk.text)
        self.emitted += chunk.tokens


class Slots:
    """Tasks by sequence. Each step returns the results of the tasks that it ended.

    A native failure resets the engine: all tasks in flight end with it, and what comes next begins afresh.

    Args:
        session, hold: whose steps these are.
        engine: has at least n sequences.
        n: most tasks side by side.
    """

    def __init__(self, session: Session, hold: Hold, engine: _ffi_engine.EngineHandle, n: int) -> None:
        self._session, self._hold, self._engine = session, hold, engine
        self._tasks: dict[int, Task] = {}
        self._n = n
        self.t_ms = 0.0  # of all steps

    @property
    def has_room(self) -> bool:
        """Whether a task may begin."""
        return len(self._tasks) < self._n

    @property
    def oldest(self) -> int | None:
        """Index of the first prompt that is in flight; None: none is."""
        return min((task.index for task in self._tasks.values()), default=None)

    def begin(self, task: Task) -> list[ManyResult]:
        """Give a task the lowest free sequence, and what the one before has left there of its prompt."""
        seq = next(seq for seq in range(self._n) if seq not in self._tasks)  # low: neighbours share a launch
        self._tasks[seq] = task

        def step() -> None:
            start = perf_counter()
            task.n_cached = self._call(lambda: _ffi_engine.begin(self._engine, task.tokens, seq))
            task.add_chunk(len(task.tokens) - 1 - task.n_cached, 1000 * (perf_counter() - start))

        return self._ended(step)

    def prefill(self) -> list[ManyResult]:
        """Evaluate prompts, no more than n_ubatch tokens or a chunk of one, for which the rounds of others wait."""

        def step() -> None:
            left = n_ubatch = self._engine.info["n_ubatch"]
            with_a_round = self._going_along()
            for seq, task in sorted(self._tasks.items()):
                if task.n_waiting and seq not in with_a_round and (left == n_ubatch or task.n_waiting <= left):
                    left -= min(task.n_waiting, n_ubatch)
                    start = perf_counter()
                    n_waiting = self._call(partial(_ffi_engine.prefill, self._engine, seq))
                    task.add_chunk(n_waiting, 1000 * (perf_counter() - start))

        return self._ended(step)

    def round(self) -> list[ManyResult]:
        """Draft and verify for all whose prompt is evaluated; short prompts go along."""
        ready = {seq: task for seq, task in sorted(self._tasks.items()) if not task.n_waiting}
        prompts = self._going_along()

        def step() -> None:
            start = perf_counter()
            requests = [task.request(seq) for seq, task in ready.items()]
            drafts = dict.fromkeys([*ready, *prompts], NO_DRAFT)
            if any(request.n_max for request in requests):
                drafts.update(zip(ready, self._call(lambda: _ffi_engine.draft(self._engine, requests))))
            pairs = [(seq, drafts[seq].tokens) for seq in sorted(drafts)]
            verdicts = dict(zip(sorted(drafts), self._call(lambda: _ffi_engine.verify(self._engine, pairs))))
            t_ms = 1000 * (perf_counter() - start)
            for seq, task in ready.items():
                task.add_round(drafts[seq], verdicts[seq], t_ms)
            for seq, task in prompts.items():
                task.add_chunk(verdicts[seq].n_pending, t_ms)

        return self._ended(step) if ready or prompts else []

    def _going_along(self) -> dict[int, Task]:
        """Return whose prompt is evaluated in rows beside those of a round, or of each other."""
        if not self._engine.info["few_shapes"]:
            return {}
        widths = [1 + task.reply.n_draft for task in self._tasks.values() if not task.n_waiting]
        most = _ROUNDS * max(widths) if widths else _SHORT
        return {seq: task for seq, task in self._tasks.items() if 0 < task.n_waiting <= most}

    def _call(self, function: Callable[[], T]) -> T:
        return self._session.step(self._hold, function)

    def _ended(self, step: Callable[[], None]) -> list[ManyResult]:
        failed: Exception | None = None
        start = perf_counter()
        try:
            step()
        except (ClosedError, OrderError):
            raise
        except (DFlashError, MemoryError) as error:
            failed = error
        self.t_ms += 1000 * (perf_counter() - start)
        ended = []
        for seq, task in sorted(self._tasks.items()):
            if task.over or failed:
                ended.append(task.result() if task.over else ManyResult(task.index, None, failed))
                del self._tasks[seq]
        return ended
