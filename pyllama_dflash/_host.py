"""How much memory this process may still take from the machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class HostMemory(NamedTuple):
    """Bytes: what can be taken without swapping, and all there is."""

    available: int
    total: int


def host_memory(free: int, total: int, root: Path = Path("/"), mapped: int = 0) -> HostMemory:
    """Return what the machine, its control groups and the limits of the process leave.

    Args:
        free: what the backend says is free; it counts where the system does not tell more.
        total: what the backend says there is.
        root: where /proc and /sys are found.
        mapped: bytes of files to be mapped: they take no memory, but address space, which the process may be short of.
    """
    meminfo = _table(root / "proc/meminfo", 1024)
    available = min(meminfo.get("MemAvailable:", free), free)
    for limit, used in _groups(root):
        total, available = min(total, limit), min(available, limit - used)
    return HostMemory(max(0, min(available, _room(root) - mapped)), total)


def _table(path: Path, unit: int = 1) -> dict[str, int]:
    """Read lines of a name and a number."""
    with suppress(OSError, ValueError):
        lines = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
        return {words[0]: int(words[1]) * unit for words in lines if len(words) > 1 and words[1].isdigit()}
    return {}


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of each control group with a limit that this process is in, of version 2 and 1."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from _group(root / "sys/fs/cgroup", path, "memory.max", "memory.current")
            elif controllers == "memory":
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
                yield from _group(root / "sys/fs/cgroup/memory", path, *names)


def _group(mount: Path, path: str, limit_name: str, used_name: str) -> Iterator[tuple[int, int]]:
    parts = Path(path.strip("/")).parts
    # In a container the mount may show the group itself as its top: what is not there is passed over.
    for depth in range(len(parts) + 1):
        group = mount.joinpath(*parts[:depth])
        with suppress(OSError, ValueError):
            limit = int((group / limit_name).read_text(encoding="ascii"))  # "max" without one
            used = int((group / used_name).read_text(encoding="ascii"))
            stat = _table(group / "memory.stat")
            cached = sum(stat.get(f"{prefix}{name}", 0) for prefix, name in _FILE_PAGES[limit_name])
            yield limit, max(0, used - cached)


# Pages of files are counted as used, but are dropped when something else needs the memory.
_FILE_PAGES = {
    "memory.max": (("", "active_file"), ("", "inactive_file")),
    "memory.limit_in_bytes": (("total_", "active_file"), ("total_", "inactive_file")),
}


def _room(root: Path) -> int:
    """What RLIMIT_AS leaves of the address space."""
    if sys.platform == "win32":
        return sys.maxsize
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    with suppress(OSError, ValueError):
        pages = int((root / "proc/self/statm").read_text(encoding="ascii").split()[0])
        return max(0, limit - pages * os.sysconf("SC_PAGE_SIZE"))
    return limit
