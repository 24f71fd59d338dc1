"""One reply while it is generated: what was emitted, when it ends, and its figures. Makes no native calls."""

from __future__ import annotations

from ._ffi_engine import Drafted, Verified
from ._tally import Tally
from ._text import TextAssembler
from .model import Model
from .params import GenerateParams
from .result import Chunk


class Reply:
    """A reply that grows by rounds.

    Args:
        model: the target.
        n_prompt: tokens of the prompt.
        options: of the call.
        n_max: most tokens that a round drafts.
        n_ctx: size of the context in tokens.
    """

    def __init__(self, model: Model, n_prompt: int, options: GenerateParams, n_max: int, n_ctx: int) -> None:
        self.tally = Tally(n_max)
        self.finish: str | None = None if options.max_tokens else "length"
        self._model, self._ignore_eos = model, options.ignore_eos
        self._text = TextAssembler(options.stops)
        self._n_max, self._n_ctx = n_max, n_ctx
        self._n_past, self._left = n_prompt - 1, options.max_tokens
        self._emitted: tuple[int, ...] = ()

    @property
    def n_draft(self) -> int:
        """Most tokens to draft in the next round: beyond the reply's or the context's end none is of use."""
        return min(self._n_max, self._left - 1, self._n_ctx - self._n_past - 1)

    def add_round(self, drafted: Drafted, verified: Verified, t_ms: float) -> None:
        """Take what a round of t_ms brought."""
        kept = [*drafted.tokens[: verified.n_accepted], verified.bonus]
        self._emitted, self.finish = self._emit(kept)
        self._n_past, self._left = self._n_past + len(kept), self._left - len(self._emitted)
        if self.finish is None and (not self._left or self._n_past == self._n_ctx):
            self.finish = "length"
        n_emitted = len(self._emitted)
        self.tally.add_round(len(drafted.tokens), verified.n_accepted, n_emitted, drafted.t_us, verified.t_us, t_ms)

    def chunk(self) -> Chunk:
        """Return what the last round emitted; once the reply is over, with its figures."""
        if self.finish is None:
            return Chunk(self._text.take(), self._emitted)
        return Chunk(self._text.take() + self._text.finish(), self._emitted, self.tally.stats(), self.finish)

    def _emit(self, tokens: list[int]) -> tuple[tuple[int, ...], str | None]:
        """Add tokens to the text up to one that ends the reply; return those emitted and the reason to stop."""
        for index, token in enumerate(tokens):
            piece, is_eog = self._model._entry(token)
            if is_eog and not self._ignore_eos:
                return tuple(tokens[:index]), "stop"
            if self._text.push(piece):
                return tuple(tokens[: index + 1]), "stop"
        return tuple(tokens), None
