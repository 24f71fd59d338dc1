"""Texts that another prompt displaced, kept as bytes in host memory and put back when a prompt goes on with one."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from . import _ffi_engine, _log
from ._returned import Bytes, Ints
from ._turn import Hold
from .errors import DFlashError

if TYPE_CHECKING:
    from ._session import Session

# Copying a text out and back takes 0.02 ms a token, prefill 1 ms and more (a 135M target on two cores). All of it is
# copied to save what is lost.
LEAST_TOKENS, LEAST_PART = 64, 1 / 8
_CUT = 0  # PLD_ROLLBACK_CUT
_ANY = 1 << 31


def is_worth(n_lost: int, n_tokens: int) -> bool:
    """Say whether n_lost tokens to evaluate again are worth a copy of all n_tokens."""
    return n_lost >= LEAST_TOKENS and n_lost >= LEAST_PART * n_tokens


def n_shared(a: Ints, b: Ints) -> int:
    """Return how many tokens two texts have in common from the start."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


@dataclass(frozen=True, eq=False)
class Prefix:
    """A text: its tokens, and the state of a sequence after them."""

    tokens: Ints
    data: Bytes

    @property
    def n_bytes(self) -> int:
        """What it takes."""
        return self.tokens.nbytes + self.data.nbytes


class Prefixes:
    """Texts in the order of their last use.

    Args:
        limit: most bytes that they take.
        most_cut: a text of more tokens can only be used whole: a recurrent state holds all of it at once, and a sliding
            window keeps its end only.
    """

    def __init__(self, limit: int, most_cut: int = _ANY) -> None:
        self.limit, self._most_cut = limit, most_cut
        self._kept: OrderedDict[int, Prefix] = OrderedDict()
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        """Drop all."""
        self._kept.clear()
        self.n_bytes = 0

    def drop(self, prefix: Prefix) -> None:
        """Drop one, if it is there."""
        if self._kept.pop(id(prefix), None) is not None:
            self.n_bytes -= prefix.n_bytes

    def touch(self, prefix: Prefix) -> None:
        """Make it the one used last."""
        self._kept.move_to_end(id(prefix))

    def make_room(self, n_bytes: int) -> bool:
        """Drop those used least recently until so many bytes fit; False if they never will."""
        if n_bytes > self.limit:
            return False
        while self.n_bytes + n_bytes > self.limit:
            self.drop(next(iter(self._kept.values())))
        return True

    def put(self, prefix: Prefix) -> None:
        """Keep a text, for which there is room; shorter ones that it serves as well are dropped."""
        self._kept[id(prefix)] = prefix
        self.n_bytes += prefix.n_bytes
        for other in list(self._kept.values()):
            if other is not prefix and self.serves(prefix, other.tokens):
                self.drop(other)

    def best(self, tokens: Ints) -> tuple[Prefix | None, int]:
        """Return the text of which most serves as a start of tokens, and how much."""
        uses = ((prefix, n_shared(prefix.tokens, tokens)) for prefix in self._kept.values())
        found = [(prefix, n) for prefix, n in uses if n and self._usable(prefix, n)]
        return max(found, key=lambda use: (use[1], -len(use[0].tokens)), default=(None, 0))

    def serves(self, prefix: Prefix, tokens: Ints) -> bool:
        """Say whether all of tokens can be taken from a text."""
        return n_shared(prefix.tokens, tokens) == len(tokens) and self._usable(prefix, len(tokens))

    def covers(self, tokens: Ints) -> bool:
        """Say whether all of tokens can be taken from one of them; that one was used just now, then."""
        for prefix in self._kept.values():
            if self.serves(prefix, tokens):
                self.touch(prefix)
                return True
        return False

    def _usable(self, prefix: Prefix, n: int) -> bool:
        return n == len(prefix.tokens) or len(prefix.tokens) <= self._most_cut


def prefixes_of(session: Session) -> Prefixes:
    """Return the store of a Speculator, by its options and by what its caches can do."""
    models = [session.target, *([session.draft] if session.draft and not session.engine.info["fused_draft"] else [])]
    most_cut = min((model.info.n_swa for model in models if model.info.n_swa), default=_ANY)
    recurrent = session.engine.info["rollback"] != _CUT
    return Prefixes(session.params.cache_ram << 20, 0 if recurrent else most_cut)


def swap(session: Session, hold: Hold, prompt: Ints) -> None:
    """Before a prompt: keep what it would drop of the cache, and put back what it goes on with."""
    kept, before_anchor = session.kept, prompt[:-1]
    here = session.step(hold, lambda: _ffi_engine.tokens(session.engine))
    same = n_shared(here, before_anchor)
    # The end of a reply is taken back even where no more can be: a token after the one that ended it.
    n_here = same if len(here) <= max(kept._most_cut, same + session.n_max) else 0
    found, n_found = kept.best(before_anchor)
    back = found if found and is_worth(n_found - n_here, len(found.tokens)) else None
    if back is not None:
        kept.touch(back)
        if n_found == len(back.tokens):
            kept.drop(back)  # the cache will have it; meanwhile both are in memory
    if is_worth(len(here) - n_here, len(here)) and not kept.covers(here):
        _keep(session, hold, here)
    if back is not None:
        _put_back(session, hold, back)


def _keep(session: Session, hold: Hold, tokens: Ints) -> None:
    try:
        n = session.step(hold, lambda: _ffi_engine.state_size(session.engine))
        if session.kept.make_room(n + tokens.nbytes):
            data = session.step(hold, lambda: _ffi_engine.state_get(session.engine, n))
            session.kept.put(Prefix(tokens, data))
    except MemoryError:
        session.kept.clear()  # it is the first thing to do without


def _put_back(session: Session, hold: Hold, prefix: Prefix) -> None:
    try:
        session.step(hold, lambda: _ffi_engine.state_set(session.engine, prefix.data))
    except (ValueError, DFlashError, MemoryError) as error:
        session.kept.drop(prefix)
        _log.emit(logging.WARNING, f"a kept text of {len(prefix.tokens)} tokens is evaluated again: {error}")
