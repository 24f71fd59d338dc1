"""What a CUDA build launches: how many kernels a call costs, and which."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from . import _ffi
from .errors import OrderError

_tracing = threading.Lock()


def launches() -> int:
    """Count the kernels and captured graphs that this process has launched; 0 in a build without CUDA."""
    return _ffi.cuda_launches()


@contextmanager
def trace() -> Iterator[dict[str, int]]:
    """Note launches by kernel while the block runs; the mapping is filled when it ends.

    Yields:
        mangled name -> launches, "cudaGraphLaunch" for captured graphs, whose kernels are noted when they are captured.
        One trace at a time, of all threads. Costs a little on each launch.

    Raises:
        OrderError: another trace is running.

    Example:
        with trace() as kernels:
            spec.verify([])
        print(sum(kernels.values()), "launches")
    """
    found: dict[str, int] = {}
    if not _tracing.acquire(blocking=False):
        raise OrderError("another trace is running, and there is one list of launches; end it first")
    try:
        _ffi.cuda_trace(True)
        yield found
        for line in _ffi.cuda_traced().splitlines():
            name, _, count = line.rpartition(" ")
            found[name] = int(count)
    finally:
        _ffi.cuda_trace(False)
        _tracing.release()
