"""The iterator that stream() returns."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from types import TracebackType
from typing import Callable, TypeVar

from ._tally import Tally
from .errors import BusyError
from .result import Chunk, Stats

T = TypeVar("T")


class Stream(Iterator[Chunk]):
    """Chunks of a reply, one a round. Nothing is evaluated before the first is asked for.

    It may be left at any point: the Speculator stays usable, and close(), `with` or garbage collection gives it free
    for other threads.
    """

    def __init__(self, chunks: Generator[Chunk, None, None], tally: Tally) -> None:
        self._chunks = chunks
        self._tally = tally

    def __next__(self) -> Chunk:
        return alone(self._chunks.__next__)

    @property
    def stats(self) -> Stats:
        """Figures so far."""
        return self._tally.stats()

    def close(self) -> None:
        """Stop here. Safe to repeat."""
        alone(self._chunks.close)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def alone(step: Callable[[], T]) -> T:
    """Run a step of a generator; BusyError if another thread is inside it."""
    try:
        return step()
    except ValueError as error:
        if "already executing" not in str(error):
            raise
        raise BusyError("another thread is inside this stream; use one stream per thread") from None
