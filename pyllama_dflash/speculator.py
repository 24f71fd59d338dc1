"""The draft/verify loop.

A round drafts a block of tokens, runs them through the target in one batch, and keeps the longest prefix that the
target would have chosen itself, plus the target's own next token. Whatever was drafted, each emitted token is the
target's argmax: a good draft saves rounds, a bad one cannot change the text. (Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding", 2023, for greedy decoding; the drafts are DFlash and DFlash2 blocks, written in
one pass.)
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from time import perf_counter
from types import TracebackType
from typing import Any, Callable

import numpy as np

from . import _ffi, _ffi_engine, _log
from ._chat import Messages
from ._many import Job, Many
from ._prompt import Prompt, Tokens, prompt_ids, token_ids
from ._reply import Reply
from ._saved import Saving
from ._session import Limits, Session
from ._slots import NO_DRAFT
from ._turn import Hold
from ._view import View
from .errors import OrderError
from .model import Model, PathLike
from .params import GenerateParams, Params, check_int
from .result import Chunk, Draft, Result, Verdict
from .stream import Stream

_P = Params()
_G = GenerateParams()
_NO_DETAILS = (np.empty(0, np.float32), np.empty((0, 0), np.int32), np.empty((0, 0), np.float32))


class Speculator(View, Saving):
    """A target and, if given, its draft, ready to generate.

    Calls from several threads take turns: run() waits for the run() before it; while a stream() is under way in another
    thread, BusyError is raised. In one thread a new call replaces the stream before it.

    Args:
        target: a GGUF file, or an open Model, which is left open by close().
        draft: the same for its DFlash or DFlash2 draft; None: plain decoding on the same path.
        n_ctx, n_ubatch, ...: the options, keyword only; see Params.

    Raises:
        ModelLoadError: a file is missing, damaged or not supported.
        IncompatibleModelsError: the draft does not belong to the target, or the target is itself a draft.
        MemoryError: weights, K/V caches and compute buffers do not fit; the message has the figures.
        ValueError, TypeError: an option is out of range, or would have no effect. GPU layers on a build without a GPU
            backend are only warned of, in the log.
    """

    def __init__(
        self,
        target: Model | PathLike,
        draft: Model | PathLike | None = None,
        *,
        n_ctx: int = _P.n_ctx,
        n_ctx_draft: int = _P.n_ctx_draft,
        n_ubatch: int = _P.n_ubatch,
        n_gpu_layers: int = _P.n_gpu_layers,
        n_gpu_layers_draft: int = _P.n_gpu_layers_draft,
        devices: str | Sequence[str] | None = _P.devices,
        devices_draft: str | Sequence[str] | None = _P.devices_draft,
        split_mode: str = _P.split_mode,
        main_gpu: int = _P.main_gpu,
        tensor_split: Sequence[float] | None = _P.tensor_split,
        use_mmap: bool = _P.use_mmap,
        use_mlock: bool = _P.use_mlock,
        n_threads: int | None = _P.n_threads,
        flash_attn: str | bool = _P.flash_attn,
        type_k: str = _P.type_k,
        type_v: str = _P.type_v,
        type_k_draft: str = _P.type_k_draft,
        type_v_draft: str = _P.type_v_draft,
        kv_unified: bool = _P.kv_unified,
        cache_ram: int = _P.cache_ram,
        cuda_graphs: str | bool = _P.cuda_graphs,
        n_max: int | None = _P.n_max,
        n_min: int = _P.n_min,
        margin: float = _P.margin,
        p_min: float = _P.p_min,
        backend_argmax: bool = _P.backend_argmax,
        fused_draft: bool = _P.fused_draft,
        draft_vocab: bool = _P.draft_vocab,
    ) -> None:
        given = locals()
        params = Params(**{name: given[name] for name in _P.__dataclass_fields__})
        self._session = Session(target, draft, params)

    # one reply --------------------------------------------------------------------------------------------------------

    def run(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_tokens: int = _G.max_tokens,
        stop: str | Sequence[str] | None = _G.stop,
        ignore_eos: bool = _G.ignore_eos,
        n_max: int | None = _G.n_max,
        n_min: int | None = _G.n_min,
        margin: float | None = _G.margin,
        p_min: float | None = _G.p_min,
        speculate: bool = _G.speculate,
    ) -> Result:
        """Generate a reply and return it whole. Arguments and errors are those of stream(), but calls wait in turn."""
        options = GenerateParams(max_tokens, stop, ignore_eos, n_max, n_min, margin, p_min, speculate)
        with self._start(prompt, messages, chat_template_kwargs, options, whole=True) as chunks:
            parts = list(chunks)
        tokens = tuple(token for part in parts for token in part.tokens)
        return Result("".join(part.text for part in parts), tokens, str(parts[-1].finish_reason), chunks.stats)

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_tokens: int = _G.max_tokens,
        stop: str | Sequence[str] | None = _G.stop,
        ignore_eos: bool = _G.ignore_eos,
        n_max: int | None = _G.n_max,
        n_min: int | None = _G.n_min,
        margin: float | None = _G.margin,
        p_min: float | None = _G.p_min,
        speculate: bool = _G.speculate,
    ) -> Stream:
        """Generate a reply round by round. What it shares with the call before is not evaluated again.

        Args:
            prompt: text, sent as it is, or token ids.
            messages: instead of a prompt: mappings with "role" and "content", or a string as the user's one message;
                rendered by the target's chat template.
            chat_template_kwargs: further variables of the template, e.g. {"enable_thinking": False}.
            max_tokens: most tokens to emit; 0: only evaluate the prompt.
            stop: a string, or several, that end the reply and are not part of it.
            ignore_eos: go on after end-of-generation tokens.
            n_max: most tokens drafted in a round; None, here and below: the Speculator's own value.
            n_min: a draft that is shorter is dropped.
            margin: cut a draft before the first token whose top-1 leads top-2 by less.
            p_min: cut a draft before the first token less probable than this, 0 to 1.
            speculate: False: plain decoding on the same path.

        Raises:
            ValueError, TypeError: an argument is out of range.
            ContextFullError: the prompt is longer than n_ctx.
            BusyError: from the first chunk on: another thread is in the middle of a stream.
            OrderError: from a later chunk on: another call of this thread has taken over.
            ClosedError: after close().
        """
        options = GenerateParams(max_tokens, stop, ignore_eos, n_max, n_min, margin, p_min, speculate)
        return self._start(prompt, messages, chat_template_kwargs, options, whole=False)

    def _start(
        self,
        prompt: Prompt | None,
        messages: Messages | None,
        chat_template_kwargs: Mapping[str, Any] | None,
        options: GenerateParams,
        whole: bool,
    ) -> Stream:
        self._session.turn.check_open()
        limits = self._session.limits(options)
        tokens = prompt_ids(self.target, prompt, messages, chat_template_kwargs)
        self._session.check_fits(tokens)
        reply = Reply(self.target, len(tokens), options, limits.n_max, self.n_ctx)
        return Stream(self._generate(tokens, reply, limits, whole), reply.tally)

    def _generate(self, tokens: _ffi.Ints, reply: Reply, limits: Limits, whole: bool) -> Generator[Chunk, None, None]:
        hold = Hold()
        try:
            self._session.turn.take(hold, whole)
            start = perf_counter()
            n_cached = self._session.prefill(hold, tokens)
            reply.tally.add_prefill(len(tokens) - n_cached, n_cached, 1000 * (perf_counter() - start))
            while reply.finish is None:
                start = perf_counter()
                drafted = self._session.propose(hold, limits, reply.n_draft) if reply.n_draft else NO_DRAFT
                verified = self._session.verify(hold, drafted.tokens)
                reply.add_round(drafted, verified, 1000 * (perf_counter() - start))
                if reply.finish is None:
                    yield reply.chunk()
        finally:
            self._session.turn.leave(hold)
        _log.drain()
        yield reply.chunk()

    # many replies -----------------------------------------------------------------------------------------------------

    def run_many(
        self,
        prompts: Iterable[Job],
        *,
        n_parallel: int = 4,
        ordered: bool = True,
        max_tokens: int = _G.max_tokens,
        stop: str | Sequence[str] | None = _G.stop,
        ignore_eos: bool = _G.ignore_eos,
        n_max: int | None = _G.n_max,
        n_min: int | None = _G.n_min,
        margin: float | None = _G.margin,
        p_min: float | None = _G.p_min,
        speculate: bool = _G.speculate,
    ) -> Many:
        """Answer many prompts, n_parallel at a time: each round drafts and verifies for all of them in one launch.

        As a reply ends, the next prompt takes its place. Each text is that of its own run(). The first call opens a
        context for n_parallel sequences beside the Speculator's own, which is kept for later calls.

        Args:
            prompts: an iterable that is read as far as needed. Each is text, token ids, a list of messages, or a
                mapping with arguments of run(), such as {"messages": "Hello", "max_tokens": 16}; they go before those
                given here.
            n_parallel: sequences side by side, 1 to 64.
            ordered: results in the order of prompts; False: as they are ready.
            max_tokens: as for stream(), here and below, for prompts that do not say otherwise.
            stop: strings that end a reply.
            ignore_eos: go on after end-of-generation tokens.
            n_max: most tokens drafted in a round for one sequence.
            n_min: a draft that is shorter is dropped.
            margin: cut a draft before the first token whose top-1 leads top-2 by less.
            p_min: cut a draft before the first token less probable than this, 0 to 1.
            speculate: False: plain decoding, side by side.

        Returns:
            An iterator of ManyResult. A prompt that fails has its error there, and the others go on.

        Raises:
            ValueError, TypeError: an argument is out of range; from the first result on: n_parallel times n_ctx is.
            MemoryError: from the first result on: the context does not fit; lower n_parallel or n_ctx.
            BusyError, OrderError, ClosedError: as for stream().
        """
        self._session.turn.check_open()
        options = GenerateParams(max_tokens, stop, ignore_eos, n_max, n_min, margin, p_min, speculate)
        self._session.limits(options)
        return Many(self._session, prompts, options, n_parallel, ordered)

    # step by step -----------------------------------------------------------------------------------------------------

    def prefill(self, prompt: Prompt, on_progress: Callable[[int, int], None] | None = None) -> int:
        """Take a prompt and evaluate all of it but its last token, the anchor of the first round.

        Args:
            prompt: text, sent as it is, or token ids.
            on_progress: called after each step of n_ubatch tokens with the number of tokens done and of all to do.

        Returns:
            How many of them an earlier call had left in the cache.

        Raises:
            ContextFullError: the prompt is longer than n_ctx; nothing was changed.
        """
        self._session.turn.check_open()
        if on_progress is not None and not callable(on_progress):
            raise TypeError(f"on_progress={on_progress!r} is not callable")
        tokens = prompt_ids(self.target, prompt)
        self._session.check_fits(tokens)
        return self._session.alone(lambda hold: self._session.prefill(hold, tokens, on_progress))

    def draft(
        self,
        *,
        n_max: int | None = None,
        n_min: int | None = None,
        margin: float | None = None,
        p_min: float | None = None,
    ) -> Draft:
        """Draft a block after the anchor; no more tokens than the context has room for, none without a draft model.

        Args:
            n_max: most tokens to draft; None, here and below: the Speculator's own value.
            n_min: a draft that is shorter is dropped.
            margin: cut it before the first token whose top-1 leads top-2 by less.
            p_min: cut it before the first token less probable than this, 0 to 1.

        Raises:
            OrderError: nothing was prefilled.
            ContextFullError: the context is full up to its last token.
        """
        limits = self._session.limits(GenerateParams(n_max=n_max, n_min=n_min, margin=margin, p_min=p_min))

        def step(hold: Hold) -> Draft:
            state = self._session.state(hold)
            position, room = state.n_past, max(0, self.n_ctx - state.n_past - 1)
            if state.anchor < 0 or state.n_pending:
                raise OrderError("draft() needs a prompt; call prefill() first")
            if self._session.draft is None:
                return Draft((), *_NO_DETAILS, position, 0.0)
            drafted = self._session.propose(hold, limits, min(limits.n_max, room), details=True)
            return Draft(tuple(drafted.tokens), *(drafted.details or _NO_DETAILS), position, drafted.t_us / 1000)

        return self._session.alone(step)

    def verify(self, draft: Draft | Tokens) -> Verdict:
        """Run tokens through the target, keep those that it agrees with, roll back the rest.

        Args:
            draft: what draft() returned, or up to n_max token ids of any origin; none: one step of plain decoding.

        Raises:
            OrderError: nothing was prefilled, or the draft was made at another position, as one that was used before.
            ContextFullError: the tokens do not fit into n_ctx; nothing was changed.
        """
        position = draft.position if isinstance(draft, Draft) else None
        ids = token_ids(draft.tokens if isinstance(draft, Draft) else draft, self.target.info.n_vocab)
        tokens: list[int] = ids.tolist()
        check_int(
            "the number of tokens",
            len(tokens),
            0,
            self.n_max,
            f"n_max={self.n_max}; open the Speculator with a larger n_max, or",
        )

        def step(hold: Hold) -> Verdict:
            state = self._session.state(hold)
            if position is not None and position != state.n_past:
                raise OrderError(f"this draft follows position {position}, the text is at {state.n_past}; draft again")
            verified = self._session.verify(hold, tokens)
            return Verdict(
                tuple(tokens[: verified.n_accepted]),
                verified.bonus,
                tuple(verified.chosen),
                verified.margins,
                verified.t_us / 1000,
            )

        return self._session.alone(step)

    def logits(self) -> _ffi.Floats:
        """Return a copy of the last verify's logits, float32 [n + 1, n_vocab] for n tokens. Needs backend_argmax=False.

        Raises:
            ValueError: the Speculator was opened with backend_argmax=True.
            OrderError: nothing was verified since the last prefill.
        """
        if self.params.backend_argmax:
            raise ValueError("backend_argmax=True reads no logits back; open the Speculator with backend_argmax=False")

        def read() -> _ffi.Floats:
            if not self._session.width:
                raise OrderError("nothing was verified since the last prefill; call verify() first")
            return _ffi_engine.logits(self._session.engine, self._session.width)

        return self._session.turn.call(read)

    def reset(self) -> None:
        """Forget all cached tokens, those of run_many() too, and the texts that are kept; all caches are zeros then."""
        self._session.alone(self._session.reset)

    # the object -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the memory, and the models that were opened from paths; waits for a native call in progress."""
        self._session.turn.close()
        _log.drain()

    def __enter__(self) -> Speculator:
        self._session.turn.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        draft = "no draft" if self.draft_model is None else repr(self.draft_model.name)
        state = ", closed" if self.closed else ""
        return f"<Speculator {self.target.name!r}, {draft}, n_ctx={self.n_ctx}, n_max={self.n_max}{state}>"
