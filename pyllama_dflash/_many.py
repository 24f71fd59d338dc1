"""Many prompts side by side: as a reply ends the next prompt takes its place, and a round is one launch for all."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import count
from time import perf_counter
from types import TracebackType
from typing import Any, Union

from . import _chat, _ffi_engine, _log
from ._ffi import Ints
from ._prompt import Prompt, prompt_ids
from ._reply import Reply
from ._session import Limits, Session
from ._turn import Hold
from .errors import ClosedError, DFlashError, OrderError
from .params import GenerateParams, check_bool, check_int
from .result import ManyResult, Result
from .stream import alone

Job = Union[Prompt, _chat.Messages, Mapping[str, Any]]
NO_DRAFT = _ffi_engine.Drafted([], None, 0)
MAX_PARALLEL = 64
_AHEAD = 16  # times n_parallel: results that wait for an earlier one, at most
_STEP = 256  # an engine's context grows in steps, so that it serves a later call that needs a little more
_OF_PROMPT = ("prompt", "messages", "chat_template_kwargs")
_OF_CALL = tuple(option.name for option in fields(GenerateParams))


@dataclass
class _Task:
    """A prompt that can be answered, and its reply so far."""

    index: int
    tokens: Ints
    limits: Limits
    reply: Reply
    options: GenerateParams
    emitted: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)


class Many(Iterator[ManyResult]):
    """Results of run_many(). It may be left at any point, as a Stream."""

    def __init__(
        self, session: Session, prompts: Iterable[Job], options: GenerateParams, n_parallel: int, ordered: bool
    ) -> None:
        if isinstance(prompts, (str, bytes, Mapping)):
            raise TypeError(f"prompts is one {type(prompts).__name__}; give a list of prompts, or use run()")
        check_int("n_parallel", n_parallel, 1, MAX_PARALLEL)
        check_bool("ordered", ordered)
        self._session, self._options, self._n_parallel = session, options, n_parallel
        waiting = enumerate(iter(prompts))
        prepared = (self._prepare(index, job) for index, job in waiting)
        n_ctx = session.n_ctx
        if isinstance(prompts, Sequence):  # so the context need be no larger than what they take
            known = list(prepared)
            most = max((len(t.tokens) + t.options.max_tokens for t in known if isinstance(t, _Task)), default=1)
            n_ctx, prepared = min(n_ctx, -(-most // _STEP) * _STEP), (task for task in known)
        results = self._results(prepared, n_ctx, _AHEAD * n_parallel if ordered else None)
        self._results_left = _in_order(results) if ordered else results
        self.n_done = 0  # prompts
        self.predicted_n = 0  # tokens, of all replies
        self.t_ms = 0.0  # prefills and rounds

    def __next__(self) -> ManyResult:
        return alone(self._results_left.__next__)

    def close(self) -> None:
        """Stop here. Safe to repeat."""
        alone(self._results_left.close)

    def __enter__(self) -> Many:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def predicted_per_second(self) -> float:
        """Tokens of all replies per second of prefills and rounds."""
        return 1000.0 * self.predicted_n / self.t_ms if self.t_ms else 0.0

    # one prompt -------------------------------------------------------------------------------------------------------

    def _prepare(self, index: int, job: Any) -> _Task | ManyResult:
        try:
            given = job if isinstance(job, Mapping) else {"messages" if _is_chat(job) else "prompt": job}
            unknown = sorted(map(str, set(given) - {*_OF_PROMPT, *_OF_CALL}))
            if unknown:
                raise TypeError(f"prompt {index}: run() has no argument {', '.join(unknown)}")
            options = replace(self._options, **{name: given[name] for name in _OF_CALL if name in given})
            limits = self._session.limits(options)
            tokens = prompt_ids(self._session.target, *(given.get(name) for name in _OF_PROMPT))
            self._session.check_fits(tokens)
        except ClosedError:
            raise
        except Exception as error:  # whatever a caller's object raises: it is this prompt's
            return ManyResult(index, None, error)
        reply = Reply(self._session.target, len(tokens), options, limits.n_max, self._session.n_ctx)
        return _Task(index, tokens, limits, reply, options)

    # all of them ------------------------------------------------------------------------------------------------------

    def _results(
        self, prompts: Iterator[_Task | ManyResult], n_ctx: int, ahead: int | None
    ) -> Generator[ManyResult, None, None]:
        """Yield results as they are ready, none `ahead` places or more from the first that is not."""
        hold, live = Hold(), dict[int, _Task]()
        failed: BaseException | None = None
        try:
            self._session.turn.take(hold, whole=False)
            engine: _ffi_engine.EngineHandle | None = None
            more, n_taken = True, 0
            while more or live:
                for seq in range(self._n_parallel):
                    if not more or seq in live:
                        continue
                    if ahead and live and n_taken - min(task.index for task in live.values()) >= ahead:
                        break
                    try:
                        task = next(prompts, None)
                    except Exception as error:  # the caller's own, from its iterable: those in flight end first
                        failed, task = error, None
                    more, n_taken = task is not None, n_taken + 1
                    if isinstance(task, ManyResult):
                        yield self._done(task)
                    elif task is not None:
                        engine = engine or self._session.engine_for(hold, self._n_parallel, n_ctx)
                        live[seq] = task
                        yield from self._begin(hold, engine, live, seq)
                if live and engine is not None:
                    yield from self._round(hold, engine, live)
        finally:
            self._session.turn.leave(hold)
            _log.drain()
        if failed is not None:
            raise failed

    def _begin(
        self, hold: Hold, engine: _ffi_engine.EngineHandle, live: dict[int, _Task], seq: int
    ) -> Iterator[ManyResult]:
        """Evaluate a prompt, a native call for n_ubatch tokens."""
        task, start = live[seq], perf_counter()
        try:
            n_cached = self._session.step(hold, lambda: _ffi_engine.begin(engine, task.tokens, seq))
            while self._session.step(hold, lambda: _ffi_engine.prefill(engine, seq)):
                pass
        except (DFlashError, MemoryError) as error:
            yield from self._give_up(live, error)
            return
        t_ms = 1000 * (perf_counter() - start)
        self.t_ms += t_ms
        task.reply.tally.add_prefill(len(task.tokens) - n_cached, n_cached, t_ms)
        if task.reply.finish is not None:
            yield self._finished(live.pop(seq))

    def _round(self, hold: Hold, engine: _ffi_engine.EngineHandle, live: dict[int, _Task]) -> Iterator[ManyResult]:
        """One draft and one verify for all live sequences."""
        start, seqs = perf_counter(), sorted(live)
        drafted = dict.fromkeys(seqs, NO_DRAFT)
        wanted = [(seq, live[seq].reply.n_draft, live[seq].limits) for seq in seqs]
        requests = [
            _ffi_engine.DraftRequest(seq, n, min(limits.n_min, n), limits.margin, limits.p_min)
            for seq, n, limits in wanted
            if n > 0
        ]
        try:
            if requests:
                made = self._session.step(hold, lambda: _ffi_engine.draft(engine, requests))
                drafted.update((request.seq, draft) for request, draft in zip(requests, made))
            verifies = [(seq, drafted[seq].tokens) for seq in seqs]
            verified = self._session.step(hold, lambda: _ffi_engine.verify(engine, verifies))
        except (DFlashError, MemoryError) as error:
            yield from self._give_up(live, error)
            return
        t_ms = 1000 * (perf_counter() - start)
        self.t_ms += t_ms
        for seq, verdict in zip(seqs, verified):
            live[seq].reply.add_round(drafted[seq], verdict, t_ms)
            if live[seq].reply.finish is not None:
                yield self._finished(live.pop(seq))
            else:
                self._collect(live[seq])

    def _collect(self, task: _Task) -> None:
        chunk = task.reply.chunk()
        task.text.append(chunk.text)
        task.emitted += chunk.tokens

    def _finished(self, task: _Task) -> ManyResult:
        self._collect(task)
        stats = task.reply.tally.stats()
        self.predicted_n += stats.predicted_n
        result = Result("".join(task.text), tuple(task.emitted), str(task.reply.finish), stats)
        return self._done(ManyResult(task.index, result, None))

    def _give_up(self, live: dict[int, _Task], error: Exception) -> Iterator[ManyResult]:
        """After a native failure the engine was reset: what was in flight is lost, and what comes next starts anew."""
        if isinstance(error, (ClosedError, OrderError)):
            raise error
        lost = [live.pop(seq) for seq in sorted(live)]
        for task in lost:
            yield self._done(ManyResult(task.index, None, error))

    def _done(self, result: ManyResult) -> ManyResult:
        self.n_done += 1
        return result


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
