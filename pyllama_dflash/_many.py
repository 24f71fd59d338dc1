"""Many prompts side by side: as a reply ends, the next prompt takes its place."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import fields, replace
from itertools import count
from operator import index as as_index
from typing import Any, Union

from . import _chat, _log
from ._prompt import Prompt, prompt_ids
from ._reply import Reply
from ._session import Session
from ._slots import Slots, Task
from ._turn import Hold
from .errors import ClosedError
from .params import GenerateParams, check_bool, check_int
from .result import ManyResult
from .stream import Steps

Job = Union[Prompt, _chat.Messages, Mapping[str, Any]]
MAX_PARALLEL = 64
MAX_TOKENS = 1 << 28  # of an engine's sequences together
_AHEAD = 16  # times n_parallel: results that wait for an earlier one, at most
_STEP = 256  # an engine's context grows in steps, so that it serves a later call that needs a little more
_FEW = 4096  # prompts of a list that are all tokenised first, to open no larger a context than they take
_OF_PROMPT = ("prompt", "messages", "chat_template_kwargs")
_OF_CALL = tuple(option.name for option in fields(GenerateParams))


class Many(Steps[ManyResult]):
    """Results of run_many(), one a prompt. Nothing is evaluated before the first is asked for.

    It may be left at any point, as a Stream.

    Attributes:
        n_done: prompts whose result came out.
        n_failed: those of them that have an error.
        predicted_n: tokens of all replies that came out.
    """

    def __init__(
        self, session: Session, prompts: Iterable[Job], options: GenerateParams, n_parallel: int, ordered: bool
    ) -> None:
        _check_prompts(prompts)
        self._n_parallel = check_int("n_parallel", n_parallel, 1, MAX_PARALLEL)
        self._ahead = _AHEAD * n_parallel if check_bool("ordered", ordered) else None
        self._session, self._options = session, options
        self._slots: Slots | None = None
        self.n_done = self.n_failed = self.predicted_n = 0
        super().__init__(_in_order(self._generate(prompts)) if ordered else self._generate(prompts))

    def __next__(self) -> ManyResult:
        result = super().__next__()
        self.n_done += 1
        self.n_failed += result.error is not None
        self.predicted_n += result.result.stats.predicted_n if result.result else 0
        return result

    @property
    def t_ms(self) -> float:
        """Time of all prefills and rounds so far."""
        return self._slots.t_ms if self._slots else 0.0

    @property
    def predicted_per_second(self) -> float:
        """Tokens of all replies per second of prefills and rounds."""
        return 1000.0 * self.predicted_n / self.t_ms if self.t_ms else 0.0

    def _generate(self, prompts: Iterable[Job]) -> Generator[ManyResult, None, None]:
        """Yield results as they are ready."""
        hold, failed = Hold(), None
        try:
            self._session.turn.take(hold, whole=False)
            tasks, n_parallel, n_ctx = self._prepared(prompts)
            self._check_size(n_parallel, n_ctx)
            n_taken, more = 0, True
            while more or (self._slots and self._slots.oldest is not None):
                while more and self._may_take(n_taken):
                    try:
                        task = next(tasks, None)
                    except Exception as error:  # the caller's, from its iterable: what is in flight ends first
                        failed, task = error, None
                    more, n_taken = task is not None, n_taken + 1
                    if isinstance(task, ManyResult):
                        yield task
                    elif task is not None:
                        if self._slots is None:
                            engine = self._session.engine_for(hold, n_parallel, n_ctx)
                            self._slots = Slots(self._session, hold, engine, n_parallel)
                        yield from self._slots.begin(task)
                if self._slots:
                    yield from self._slots.prefill()
                    yield from self._slots.round()
                    _log.drain()
        finally:
            self._session.turn.leave(hold)
            _log.drain()
        if failed is not None:
            raise failed

    def _may_take(self, n_taken: int) -> bool:
        if self._slots is None:
            return True
        oldest = self._slots.oldest
        return self._slots.has_room and not (self._ahead and oldest is not None and n_taken - oldest >= self._ahead)

    def _prepared(self, prompts: Iterable[Job]) -> tuple[Iterator[Task | ManyResult], int, int]:
        """Return tasks, how many go side by side, and the context that each needs."""
        tasks: Iterator[Task | ManyResult] = (self._prepare(*job) for job in enumerate(prompts))
        if not isinstance(prompts, Sized) or len(prompts) > _FEW:
            return tasks, self._n_parallel, self._session.n_ctx
        known = list(tasks)
        needs = [task.n_needed for task in known if isinstance(task, Task)]
        n_ctx = -(-max(needs, default=1) // _STEP) * _STEP
        return iter(known), max(1, min(self._n_parallel, len(needs))), min(n_ctx, self._session.n_ctx)

    def _check_size(self, n_parallel: int, n_ctx: int) -> None:
        """Refuse more tokens than an engine counts; what is asked for here may be less than what the caller said."""
        if n_parallel * n_ctx > MAX_TOKENS:
            raise ValueError(
                f"n_parallel={self._n_parallel} prompts side by side, at n_ctx={self._session.n_ctx}, take "
                f"{n_parallel * n_ctx} tokens of context, more than {MAX_TOKENS}; "
                f"lower n_parallel to {MAX_TOKENS // n_ctx}, or n_ctx"
            )

    def _prepare(self, index: int, job: Any) -> Task | ManyResult:
        try:
            given = job if isinstance(job, Mapping) else {"messages" if _is_chat(job) else "prompt": job}
            unknown = sorted(map(str, set(given) - {*_OF_PROMPT, *_OF_CALL}))
            if unknown:
                raise TypeError(f"a prompt has no {', '.join(unknown)}; use {', '.join((*_OF_PROMPT, *_OF_CALL))}")
            options = replace(self._options, **{name: given[name] for name in _OF_CALL if name in given})
            limits = self._session.limits(options)
            tokens = prompt_ids(self._session.target, *(given.get(name) for name in _OF_PROMPT))
            self._session.check_fits(tokens)
        except ClosedError:
            raise
        except Exception as error:  # whatever a caller's object raises: it is this prompt's
            return ManyResult(index, None, error)
        reply = Reply(self._session.target, len(tokens), options, limits.n_max, self._session.n_ctx)
        return Task(index, tokens, limits, reply, options)


def _check_prompts(prompts: Any) -> None:
    kind = type(prompts).__name__
    if isinstance(prompts, (str, bytes, Mapping)):
        raise TypeError(f"prompts is one {kind}; give a list of prompts, or use run()")
    if not isinstance(prompts, Iterable):
        raise TypeError(f"prompts is of type {kind}; give a list of prompts, or another iterable")
    if not isinstance(prompts, Iterator) and isinstance(prompts, Sized):
        for first in prompts:
            if _is_number(first):
                raise TypeError(f"prompts begins with {first!r}, as the ids of one prompt do; give a list of prompts")
            return


def _is_number(value: Any) -> bool:
    try:
        as_index(value)
    except TypeError:
        return False
    return True


def _in_order(results: Generator[ManyResult, None, None]) -> Generator[ManyResult, None, None]:
    early: dict[int, ManyResult] = {}
    try:
        for index in count():
            while index not in early:
                found = next(results, None)
                if found is None:
                    return
                early[found.index] = found
            yield early.pop(index)
    finally:
        results.close()


def _is_chat(job: Any) -> bool:
    return isinstance(job, Sequence) and bool(job) and isinstance(job[0], Mapping)
