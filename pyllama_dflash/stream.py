"""The iterator that stream() returns."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from types import TracebackType
from typing import Any, Callable, TypeVar

from ._tally import Tally
from .errors import BusyError
from .result import Chunk, Stats

T = TypeVar("T")
S = TypeVar("S", bound="Steps[Any]")


class Steps(Iterator[T]):
    """What a generator yields, that may be left at any point: close(), `with` or garbage collection ends it."""

    def __init__(self, steps: Generator[T, None, None]) -> None:
        self._steps = steps

    def __next__(self) -> T:
        return _alone(self._steps.__next__)

    def close(self) -> None:
        """Stop here. Safe to repeat."""
        _alone(self._steps.close)

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Stream(Steps[Chunk]):
    """Chunks of a reply, one a round. Nothing is evaluated before the first is asked for.

    It may be left at any point: the Speculator stays usable, and close(), `with` or garbage collection gives it free
    for other threads.
    """

    def __init__(self, chunks: Generator[Chunk, None, None], tally: Tally) -> None:
        super().__init__(chunks)
        self._tally = tally

    @property
    def stats(self) -> Stats:
        """Figures so far."""
        return self._tally.stats()


def _alone(step: Callable[[], T]) -> T:
    """Run a step of a generator; BusyError if another thread is inside it."""
    try:
        return step()
    except ValueError as error:
        if "already executing" not in str(error):
            raise
        raise BusyError("another thread is inside this stream; use one stream per thread") from None
