"""Decide who may use an object with a native handle, and when the handle is freed. Pure.

A Gate lets one native call in at a time and frees the handle only when no call is inside. A Turn adds who the next
call belongs to: whole calls queue, a stream that is under way shuts other threads out, a new call of the same thread
replaces it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from contextlib import ExitStack
from typing import Callable, TypeVar

from .errors import BusyError, ClosedError, OrderError

T = TypeVar("T")
_PAUSE = 0.002  # seconds between looks at whether it is one's turn


class Gate:
    """Serialise the native calls on one handle.

    Args:
        name: what the object is called in messages.
        release: frees the handle; may be called more than once.
    """

    def __init__(self, name: str, release: Callable[[], None]) -> None:
        self._name = name
        self._release = release
        self._lock = threading.RLock()
        self._depth = 0
        self._closed = False
        self._process = os.getpid()

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._closed

    def check_open(self) -> None:
        """Raise ClosedError after close(), and in a child process, where the library's threads do not exist."""
        if self._closed:
            raise ClosedError(f"this {self._name} is closed; open a new one")
        if self._process != os.getpid():
            raise ClosedError(f"this {self._name} was opened before a fork; open a new one in this process")

    def call(self, function: Callable[[], T]) -> T:
        """Run a function that makes native calls; ClosedError after close()."""
        with self._lock:
            self.check_open()
            self._depth += 1
            try:
                return function()
            finally:
                self._depth -= 1
                if self._closed and not self._depth:
                    self._release()

    def close(self) -> None:
        """Wait for the call in progress, then free the handle.

        From inside a call of the same thread (a signal handler, a log handler) the handle is freed when that call ends.
        After a fork a child gives it up as it is: threads that freeing waits for, or that hold the lock, are not there.
        """
        self._closed = True
        if self._process != os.getpid():
            return
        with self._lock:
            if not self._depth:
                self._release()


def call_both(a: Gate, b: Gate, function: Callable[[], T]) -> T:
    """Run a function that uses both handles. The locks are taken in one order, whoever comes first in the call."""
    with ExitStack() as stack:
        for gate in sorted((a, b), key=id):
            stack.enter_context(gate._lock)
        return a.call(lambda: b.call(function))


class Hold:
    """One caller's claim on a Turn. Make it before `try` and take it inside, so that `finally` gives it back.

    A Turn knows its holder by a weak reference: where an interrupt keeps `finally` from doing its work, the claim ends
    with the frame that made it.
    """

    __slots__ = ("__weakref__", "thread", "whole")

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.whole = True


class Turn(Gate):
    """Serialise whole calls and streams on one handle."""

    def __init__(self, name: str, release: Callable[[], None]) -> None:
        super().__init__(name, release)
        # A lock of C: an interrupt cannot fall between its release and what surrounds it, as in a Condition's.
        self._choice = threading.Lock()
        self._ref: weakref.ref[Hold] | None = None

    @property
    def _holder(self) -> Hold | None:
        return self._ref() if self._ref else None

    def take(self, hold: Hold, whole: bool = True) -> None:
        """Make `hold` the one whose calls are let in.

        Args:
            hold: the claim.
            whole: False for a stream, which pauses while its caller works: others are refused, they do not wait.

        Raises:
            BusyError: another thread is in the middle of a stream.
            ClosedError: after close().
        """
        me = threading.current_thread()
        while True:
            self.check_open()
            with self._choice:
                holder = self._holder
                if holder is None or holder.thread is me or not holder.thread.is_alive():
                    hold.thread, hold.whole = me, whole
                    self._ref = weakref.ref(hold)
                    return
            if not holder.whole:
                raise BusyError(
                    f"this {self._name} is streaming in thread {holder.thread.name!r}; "
                    "finish or close that stream, or use one object per thread"
                )
            del holder
            time.sleep(_PAUSE)

    def leave(self, hold: Hold) -> None:
        """Give a claim back; no effect if it is not, or no longer, the holder."""
        with self._choice:
            if self._holder is hold:
                self._ref = None

    def step(self, hold: Hold, function: Callable[[], T]) -> T:
        """Run one native step of the holder; OrderError if another call has taken over since."""

        def guarded() -> T:
            if self._holder is not hold:
                raise OrderError(f"a later call has taken over this {self._name}; start a new stream")
            # A stream may be passed on: the thread that iterates it counts, not the one that made it.
            hold.thread = threading.current_thread()
            return function()

        return self.call(guarded)
