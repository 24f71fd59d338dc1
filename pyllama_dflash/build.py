"""Facts about the shared library and the devices that it found."""

from __future__ import annotations

from dataclasses import dataclass

from . import _ffi, _log
from .result import SLOTS

FACTS = ("version", "upstream_commit", "patches", "options", "system_info")


@dataclass(frozen=True, **SLOTS)
class Device:
    """A device that models can run on.

    Args:
        name: short name, e.g. "CPU" or "CUDA0".
        description: what the backend says it is.
        backend: name of the backend.
        is_gpu: whether it is a GPU.
        memory_free: bytes; 0 where unknown.
        memory_total: bytes; 0 where unknown.
    """

    name: str
    description: str
    backend: str
    is_gpu: bool
    memory_free: int
    memory_total: int


def build_info() -> dict[str, str]:
    """Return what the library was built from: version, upstream_commit, patches, options, system_info."""
    facts = {name: _ffi.build_info(name) for name in FACTS}
    return {name: value for name, value in facts.items() if value is not None}


def supports_gpu() -> bool:
    """Say whether there is a GPU, and a backend for it in the library."""
    return _ffi.supports_gpu()


def devices() -> list[Device]:
    """List the devices."""
    _log.sync_level()
    _ffi.init()
    found = _ffi.devices()
    _log.drain()
    return [Device(**{**fields, "is_gpu": bool(fields["is_gpu"])}) for fields in found]
