"""Own a C handle and free it once, in the process that made it."""

from __future__ import annotations

import os
import weakref
from typing import Any, Callable

from . import errors


def _free(process: int, free: Callable[[Any], None], place: Any) -> None:
    if process == os.getpid() and place[0]:
        free(place[0])


class Handle:
    """Own a C handle: free it once, at close() or at garbage collection, whichever comes first.

    Only the process that made it frees it: after a fork its threads, which freeing waits for, are not there.

    Args:
        place: where C writes the handle, still empty: Ctrl-C can arrive when the call that opens has just returned.
        free: frees it.
    """

    __slots__ = ("__weakref__", "_free", "_place")

    def __init__(self, place: Any, free: Callable[[Any], None]) -> None:
        self._place: Any | None = place
        self._free = weakref.finalize(self, _free, os.getpid(), free, place)
        self._free.atexit = False

    @property
    def pointer(self) -> Any:
        """The C handle; ClosedError after close()."""
        if self._place is None:
            raise errors.ClosedError("the handle is closed")
        return self._place[0]

    def close(self) -> None:
        """Free the handle; safe to repeat."""
        self._place = None
        self._free()
