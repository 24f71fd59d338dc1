"""What a Speculator keeps in memory, by device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from .result import SLOTS

KINDS = ("target_weights", "draft_weights", "target_kv", "draft_kv", "target_compute", "draft_compute")


@dataclass(frozen=True, **SLOTS)
class DeviceMemory:
    """Bytes in the memory of one device, as its allocators count them.

    Args:
        device: its name, as devices() lists it. "CPU" is the host's memory, pinned memory of a GPU's driver included.
        target_weights: of the target's weights. Several Speculators on one Model share them.
        draft_weights: of the draft's.
        target_kv: of the target's K/V cache.
        draft_kv: of the draft's.
        target_compute: of the memory that the target's graphs compute in.
        draft_compute: of that of the draft's graphs, their inputs and copies of the target's features.
        mapped: of the weights: mapped from the file; the system can drop these pages and read them again. A mapping
            spans what lies between its tensors, too, even what was laid out anew elsewhere.
    """

    device: str
    target_weights: int = 0
    draft_weights: int = 0
    target_kv: int = 0
    draft_kv: int = 0
    target_compute: int = 0
    draft_compute: int = 0
    mapped: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, kind) for kind in KINDS)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> DeviceMemory:
        """Take what belongs here from the fields of pld_device_memory."""
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True, **SLOTS)
class Graph:
    """A graph of a small batch that is kept, built once.

    Args:
        draft: 0: a verify of the target's; 1: a launch of our own draft graph.
        n_rows: tokens of the batch, or of the draft's block; 0: rows are only written.
        n_injected: draft: rows of the target's features that are written to its cache in the same launch.
        n_hits: how often it was run again since it was built.
        bytes: of its own compute buffers; the draft's graphs share theirs.
    """

    draft: int
    n_rows: int
    n_injected: int
    n_hits: int
    bytes: int


@dataclass(frozen=True, **SLOTS)
class Memory:
    """What is kept between rounds.

    Args:
        devices: bytes by device, the CPU last.
        graphs: each graph kept, the target's first: at most 16 of each, the target's up to 256 MiB.
        n_nodes: nodes of the draft graph launched last. This and the next two are of our own draft graph, and zero
            where llama.cpp's runs.
        n_graph_hits: launches whose graph was there.
        n_graph_misses: launches whose graph had to be built.
        n_prefixes: texts that another prompt displaced and that are kept; see `cache_ram`.
        prefix_bytes: of host memory that they take, beside what the devices' rows say.
    """

    devices: tuple[DeviceMemory, ...]
    graphs: tuple[Graph, ...]
    n_nodes: int
    n_graph_hits: int
    n_graph_misses: int
    n_prefixes: int = 0
    prefix_bytes: int = 0

    @property
    def total(self) -> DeviceMemory:
        """The sum over all devices."""
        return total_of(self.devices)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures in types that JSON has."""
        return {**asdict(self), "total": asdict(self.total)}


@dataclass(frozen=True, **SLOTS)
class MemoryPlan:
    """What opening would take, found by a dry run: no weight is read, nothing is allocated.

    Args:
        n_ctx: context in tokens, the default filled in; None: of the weights alone.
        devices: bytes by device, the CPU last.
        free: bytes that are free on each of these devices; 0 where unknown.
        in_all: bytes that each has; 0 where unknown.
        shortage: what does not fit, in a sentence with the fix; None if all of it fits.
    """

    n_ctx: int | None
    devices: tuple[DeviceMemory, ...]
    free: tuple[int, ...]
    in_all: tuple[int, ...]
    shortage: str | None

    @property
    def fits(self) -> bool:
        """Whether what is free suffices."""
        return self.shortage is None

    @property
    def total(self) -> DeviceMemory:
        """The sum over all devices."""
        return total_of(self.devices)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures in types that JSON has."""
        rows = zip(self.devices, self.free, self.in_all)
        devices = [{**asdict(row), "free": free, "in_all": in_all} for row, free, in_all in rows]
        return {"n_ctx": self.n_ctx, "devices": devices, "shortage": self.shortage}


def total_of(devices: Iterable[DeviceMemory]) -> DeviceMemory:
    """Add devices up."""
    rows = tuple(devices)
    return DeviceMemory("total", **{kind: sum(getattr(row, kind) for row in rows) for kind in (*KINDS, "mapped")})


def beside(first: Iterable[DeviceMemory], *others: Iterable[DeviceMemory]) -> tuple[DeviceMemory, ...]:
    """Add caches and compute buffers of other contexts on the same weights to those of the first, by device."""
    rows = {row.device: row for row in first}
    for other in (row for rows in others for row in rows):
        own = rows.get(other.device, DeviceMemory(other.device))
        more = {kind: getattr(own, kind) + getattr(other, kind) for kind in KINDS if "weights" not in kind}
        rows[other.device] = replace(own, **more)
    return tuple(rows.values())
