"""Refuse what will not fit before it is opened, with the figures."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _ffi, _ffi_engine
from ._host import HostMemory, host_memory
from ._load import load_fields
from .errors import DFlashError, IncompatibleModelsError
from .memory import KINDS, DeviceMemory
from .params import LoadParams, Params

if TYPE_CHECKING:
    from .model import ModelInfo

GIB = float(1 << 30)
# Files so small, compared with what is free, are opened without a dry run, which reads their vocabulary once more.
_SMALL = 4
_SHORTEST = 64  # context that is worth naming
_WIDE = [_ffi.kv_type(name) for name in ("f32", "f16", "bf16")]  # types of a cache that could be halved
_WORDS = {
    "target_weights": "the target's weights",
    "draft_weights": "the draft's weights",
    "target_kv": "the target's K/V cache",
    "draft_kv": "the draft's K/V cache",
    "target_compute": "the target's compute buffers",
    "draft_compute": "the draft's compute buffers",
}


class File(NamedTuple):
    """A model's file, how it is loaded, and whether it already is."""

    path: bytes
    params: LoadParams
    loaded: bool = False


class Plan(NamedTuple):
    """What opening would take, and what is free, by device."""

    n_ctx: int
    devices: list[DeviceMemory]
    free: list[HostMemory]


def make_plan(target: File | None, draft: File | None, options: dict[str, int] | None) -> Plan:
    """Find out what opening would take; weights that are loaded already are left out.

    Args:
        target: the target's file; None: the draft's weights and, with an n_ctx, its K/V cache.
        draft: the draft's file; None: the target alone.
        options: the fields of pld_engine_params; None: the weights alone.

    Raises:
        DFlashError, ValueError: as opening would.
    """
    n_ctx, rows = _ffi_engine.plan(target and _arguments(target), draft and _arguments(draft), options)
    for row in rows:
        for file, kind in ((target, "target_weights"), (draft, "draft_weights")):
            if file and file.loaded:
                row[kind] = 0
    mapped = size_of(file for file in (target, draft) if file and not file.loaded and file.params.use_mmap)
    return Plan(n_ctx, [DeviceMemory.of(row) for row in rows], [_free(row, mapped) for row in rows])


def _arguments(file: File) -> tuple[bytes, dict[str, Any]]:
    fields = load_fields(file.params)
    return file.path, {**fields, "use_mmap": 0} if file.loaded else fields


def size_of(files: Iterable[File]) -> int:
    """Add up the sizes of files; 0 for what is none, for which opening has the better words."""
    size = 0
    for file in files:
        with suppress(OSError, ValueError):
            size += Path(os.fsdecode(file.path)).stat().st_size
    return size


def _free(row: dict[str, Any], mapped: int = 0) -> HostMemory:
    free, total = row["memory_free"], row["memory_total"]
    return host_memory(free, total, mapped=mapped) if row["is_host"] else HostMemory(free, total)


def check_files(target: File, draft: File | None, options: dict[str, int] | None) -> None:
    """Raise MemoryError before weights are read that do not fit, alone or with the context that they are opened for."""
    size = size_of(file for file in (target, draft) if file and not file.loaded)
    if size * _SMALL > least_free():
        _refuse(target, draft, options)


def check_context(target: File, draft: File | None, options: dict[str, int], most: int) -> None:
    """Raise MemoryError for a context that does not fit beside what is loaded.

    Args:
        target: the target's file.
        draft: the draft's.
        options: the fields of pld_engine_params.
        most: bytes that it surely does not exceed; a dry run follows only where these are not free.
    """
    if most > least_free():
        _refuse(target, draft, options)


def most_of_context(infos: Iterable[ModelInfo], params: Params, n_ctx: int) -> int:
    """Return more bytes than a context of these models takes: its heads twice as wide as the model, and not fused."""
    value = 4 if "f32" in (params.type_k, params.type_v, params.type_k_draft, params.type_v_draft) else 2
    rows, most = max(params.n_ubatch, 256), 0
    for info in infos:
        cache = 2 * value * 2 * info.n_embd * info.n_layer * n_ctx
        attention = 8 * rows * n_ctx * (1 + info.n_embd // 32)
        most += cache + attention + 1024 * rows * info.n_embd + 8 * rows * info.n_vocab
    return most


def least_free() -> int:
    """Return what is free on the device that has least."""
    rows = [{**row, "is_host": not row["is_gpu"]} for row in _ffi.devices() if row["memory_total"]]
    free = [_free(row).available for row in rows]
    return min(free, default=0)


def _refuse(target: File, draft: File | None, options: dict[str, int] | None) -> None:
    try:
        text = lack(make_plan(target, draft, options), target, draft, options)
    except IncompatibleModelsError:
        raise  # before all of a large draft is read as a target
    except (DFlashError, ValueError):
        return  # opening has the better words for what is wrong with a file or an option
    if text is not None:
        raise MemoryError(text)


def lack(plan: Plan, target: File | None, draft: File | None, options: dict[str, int] | None) -> str | None:
    """Say in a sentence with the fix what of a plan does not fit; None if all of it does. Arguments: as make_plan()."""
    at = shortage(plan)
    if at is None:
        return None
    near, half = plan, None
    if options is not None and plan.n_ctx >= 2:
        half = make_plan(target, draft, {**options, "n_ctx": plan.n_ctx // 2})
        named = fitting(plan, half, at)
        if _SHORTEST <= named < plan.n_ctx // 4:  # far from where it was measured: what does not grow counts for more
            near, half = (make_plan(target, draft, {**options, "n_ctx": n}) for n in (2 * named, named))
    return message(plan, at, half, wide=options is not None and options["type_k"] in _WIDE, near=near)


def need(row: DeviceMemory) -> int:
    """Return the bytes that must be free: pages of a mapped file can be dropped again."""
    return row.total - min(row.mapped, row.target_weights + row.draft_weights)


def shortage(plan: Plan) -> int | None:
    """Return the index of the device that is short of most, None if all have enough."""
    missing = {}
    for i, (row, free) in enumerate(zip(plan.devices, plan.free)):
        if free.total and (need(row) > free.available or row.mapped > free.total):
            missing[i] = max(need(row) - free.available, row.mapped - free.total)
    return max(missing, key=missing.__getitem__) if missing else None


def fitting(plan: Plan, half: Plan, at: int) -> int:
    """Return the n_ctx that a device has room for, by what two of them take; 0 if none."""
    row, free = plan.devices[at], plan.free[at].available
    slope = (need(row) - need(half.devices[at])) / (plan.n_ctx - half.n_ctx)
    return max(0, int(plan.n_ctx - (need(row) - free) / slope)) if slope > 0 else 0


def message(plan: Plan, at: int, half: Plan | None, wide: bool, near: Plan | None = None) -> str:
    """Say what does not fit on a device, how much there is, and what would help.

    Args:
        plan: what opening would take.
        at: index of the device.
        half: the same at half the n_ctx, or at half that of `near`; None for weights alone.
        wide: whether the K/V cache could be of a smaller type.
        near: the same at an n_ctx that is nearer to what fits.
    """
    row, free = plan.devices[at], plan.free[at]
    parts = {kind: getattr(row, kind) for kind in KINDS}
    if row.mapped > free.total:
        text = f"weights of {gib(row.mapped)} are to be mapped and {row.device} has {gib(free.total)} in all"
        return f"{text}; use a smaller quantisation"
    parts["target_weights"] -= min(row.mapped, parts["target_weights"])
    listed = ", ".join(f"{_WORDS[kind]} {gib(n)}" for kind, n in parts.items() if n >= need(row) / 100)
    what = f"n_ctx={plan.n_ctx}" if half else "the model"
    text = f"{what} needs {gib(need(row))} on {row.device} ({listed}) and {gib(free.available)} are free"
    return f"{text}; {_fix(near or plan, at, half, wide)}"


def _fix(plan: Plan, at: int, half: Plan | None, wide: bool) -> str:
    row = plan.devices[at]
    smaller = "use a smaller quantisation"
    if row.device != "CPU":
        smaller = f"lower n_gpu_layers or {smaller}"
    if half is None:
        return smaller
    n_ctx = fitting(plan, half, at)
    if n_ctx < _SHORTEST:
        return f"lower n_ubatch, or {smaller}"
    step = 10 ** max(0, len(str(int(n_ctx))) - 2)
    fix = f"lower n_ctx to about {n_ctx // step * step}"
    if row.target_compute > row.target_kv:
        return f"{fix}, or lower n_ubatch"
    return f"{fix}, or use type_k='q8_0' and type_v='q8_0'" if wide else fix


def gib(n: int) -> str:
    """Write a number of bytes as people read it."""
    return f"{n / GIB:.1f} GiB" if n >= GIB else f"{n / (1 << 20):.1f} MiB"
