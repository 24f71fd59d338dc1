"""Own a C handle and free it once, in the process that made it."""

from __future__ import annotations

import os
import weakref
from typing import Any, Callable

from . import errors


def _free(process: int, free: Callable[[Any], None], pointer: Any) -> None:
    if process == os.getpid():
        free(pointer)


class Handle:
    """Own a C handle: free it once, at close() or at garbage collection, whichever comes first.

    Only the process that made it frees it: after a fork its threads, which freeing waits for, are not there.
    """

    __slots__ = ("__weakref__", "_free", "_pointer")

    def __init__(self, pointer: Any, free: Callable[[Any], None]) -> None:
        self._pointer: Any | None = pointer
        self._free = weakref.finalize(self, _free, os.getpid(), free, pointer)
        self._free.atexit = False

    @property
    def pointer(self) -> Any:
        """The C handle; ClosedError after close()."""
        if self._pointer is None:
            raise errors.ClosedError("the handle is closed")
        return self._pointer

    def close(self) -> None:
        """Free the handle; safe to repeat."""
        self._pointer = None
        self._free()
