"""The iterator that stream() returns."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from types import TracebackType

from ._tally import Tally
from .result import Chunk, Stats


class Stream(Iterator[Chunk]):
    """Chunks of a reply, one a round. Nothing is evaluated before the first is asked for.

    It may be left at any point: the Speculator stays usable, and close(), `with` or garbage collection gives it free
    for other threads.
    """

    def __init__(self, chunks: Generator[Chunk, None, None], tally: Tally) -> None:
        self._chunks = chunks
        self._tally = tally

    def __next__(self) -> Chunk:
        return next(self._chunks)

    @property
    def stats(self) -> Stats:
        """Figures so far."""
        return self._tally.stats()

    def close(self) -> None:
        """Stop here. Safe to repeat."""
        self._chunks.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
