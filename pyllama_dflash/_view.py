"""What a Speculator says of itself."""

from __future__ import annotations

from . import _ffi_engine
from ._session import ROLLBACK, Session
from .memory import Memory
from .model import Model
from .params import Params
from .result import State


class View:
    """The properties of a Speculator."""

    _session: Session

    @property
    def params(self) -> Params:
        """The options as given."""
        return self._session.params

    @property
    def target(self) -> Model:
        """The target."""
        return self._session.target

    @property
    def draft_model(self) -> Model | None:
        """The draft, or None."""
        return self._session.draft

    @property
    def n_ctx(self) -> int:
        """Size of the context in tokens."""
        return self._session.n_ctx

    @property
    def n_max(self) -> int:
        """Most tokens that verify() takes, and that a round drafts."""
        return self._session.n_max

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._session.turn.closed

    @property
    def state(self) -> State:
        """Where the object stands now."""
        state = self._session.turn.call(lambda: _ffi_engine.state(self._session.engine))
        return State(**{**state._asdict(), "anchor": None if state.anchor < 0 else state.anchor})

    @property
    def fused_draft(self) -> bool:
        """Whether drafts come from our own graph, in one launch; the log says why not."""
        return bool(self._session.engine.info["fused_draft"])

    @property
    def rollback(self) -> str:
        """How rejected tokens leave the target: a "cut" of its cache, "snapshots" or a "checkpoint" of its state."""
        return ROLLBACK[self._session.engine.info["rollback"]]

    @property
    def memory(self) -> Memory:
        """What is kept, in bytes by device, and the graphs."""
        return self._session.memory()
