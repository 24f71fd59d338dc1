"""Bring the library's log lines into Python's logging: ours to the logger "pyllama_dflash", llama.cpp's to its child.

No Python callback is given to C: lines wait in a ring there and are fetched after native calls.
"""

from __future__ import annotations

import atexit
import contextlib
import logging

from . import _ffi

logger = logging.getLogger("pyllama_dflash")
llama_cpp = logger.getChild("llama_cpp")
# Without a handler of its own, logging would print warnings to stderr.
logger.addHandler(logging.NullHandler())

_PYTHON_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
_LINES_A_DRAIN = 10000  # a bound, so that a thread that logs all the time cannot hold another one here


class _Seen:
    """What the ring was last told, and how many lost lines were reported."""

    level = -1
    dropped = 0


def sync_level() -> None:
    """Tell the library which lines are wanted, when the logger's level has changed."""
    wanted = min(logger.getEffectiveLevel(), llama_cpp.getEffectiveLevel())
    level = next((ggml for ggml, python in _PYTHON_LEVELS.items() if python >= wanted), 4)
    if level != _Seen.level:
        _ffi.log_set_level(level)
        _Seen.level = level


def drain() -> None:
    """Hand all waiting lines to the logger."""
    for _ in range(_LINES_A_DRAIN):
        line = _ffi.log_next()
        if line is None:
            break
        level, ours, text = line
        if not text.strip(" ."):  # a row of dots goes on after a warning, and at its level
            continue
        emit(_PYTHON_LEVELS.get(level, logging.INFO), text.rstrip(), logger if ours else llama_cpp)
    dropped = _ffi.log_dropped()
    if dropped > _Seen.dropped:
        lost, _Seen.dropped = dropped - _Seen.dropped, dropped
        emit(logging.WARNING, f"{lost} log lines were dropped: they came faster than they were read")
    sync_level()


def emit(level: int, message: str, to: logging.Logger = logger) -> None:
    """Log a message; an exception in a handler is dropped with it."""
    with contextlib.suppress(Exception):  # of the user's handler: its fault must not end a generation
        to.log(level, "%s", message)


atexit.register(drain)
