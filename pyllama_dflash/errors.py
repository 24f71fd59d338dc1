"""Exceptions of the library. A bad argument is a ValueError or TypeError, a failed allocation a MemoryError."""

from __future__ import annotations

__all__ = [
    "BusyError",
    "ClosedError",
    "ContextFullError",
    "DFlashError",
    "DecodeError",
    "IncompatibleModelsError",
    "ModelLoadError",
    "OrderError",
]


class DFlashError(Exception):
    """Base of every error that this library raises for other reasons than a bad argument.

    Args:
        message: what went wrong, with the value, the limit and the fix where there is one.
        status: code of `enum pld_status` in native/pld.h, or 0 when the error comes from Python.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ModelLoadError(DFlashError):
    """A model file, or one of save(), is missing, damaged or of a kind that is not supported."""


class IncompatibleModelsError(DFlashError):
    """The draft does not belong to the target, or a draft was given where a target is needed."""


class ContextFullError(DFlashError):
    """The tokens do not fit into n_ctx. Nothing was changed."""


class DecodeError(DFlashError):
    """The library could not evaluate a batch. The cached tokens are gone; the next call starts afresh."""


class ClosedError(DFlashError):
    """The object was used after close()."""


class OrderError(DFlashError):
    """A call came out of order: draft before prefill, a draft verified twice, a stream that another call replaced."""


class BusyError(DFlashError):
    """Another thread is in the middle of a stream() from this object."""
