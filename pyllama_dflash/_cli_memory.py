"""What opening files would take, as the info command shows it."""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from . import _fit
from ._cli_options import DEFAULTS, OF_DRAFT, SWITCHES, VALUES, given
from ._fit import gib
from ._open import engine_fields, load_of_draft, load_of_target
from .errors import DFlashError
from .params import Params

OPTIONS = tuple(name for name in (*VALUES, *SWITCHES) if name not in ("n_threads", "n_min", "margin", "p_min"))
_COLUMNS = ("target weights", "draft weights", "target K/V", "draft K/V", "compute", "total", "free")


def estimate(args: argparse.Namespace, target: str | None, draft: str | None) -> dict[str, Any] | None:
    """Return what a pair, a target alone, or the weights of a draft alone would take; None where that is not known.

    Raises:
        ValueError: an option is out of range, or has no effect here.
    """
    changed = [name for name in OPTIONS if getattr(args, name) != DEFAULTS[name]]
    params = Params(**given(args, OPTIONS))
    if target is None and changed:
        raise ValueError(f"{changed[0]}={getattr(args, changed[0])!r} has no effect on a draft alone; add --target")
    if draft is None:
        for name in changed:
            if name in OF_DRAFT and name != "n_max":  # which any draft, by hand, too, takes memory for
                raise ValueError(f"{name}={getattr(args, name)!r} has no effect without a draft; add --draft")
    fields = None if target is None else engine_fields(params)
    file = _fit.File(os.fsencode(target or draft or ""), load_of_target(params))
    other = _fit.File(os.fsencode(draft), load_of_draft(params, None)) if target and draft else None
    with suppress(DFlashError):  # a file of a kind that is not run here
        plan = _fit.make_plan(file, other, fields)
        devices = [
            {**asdict(row), "free": free.available, "in_all": free.total} for row, free in zip(plan.devices, plan.free)
        ]
        return {"n_ctx": plan.n_ctx or None, "devices": devices}
    return None


def table(memory: dict[str, Any], is_draft: bool) -> list[str]:
    """Return the lines of a table, a device in each; is_draft: the weights are those of a draft alone."""
    title = f"memory at n_ctx={memory['n_ctx']}" if memory["n_ctx"] else "memory of the weights"
    cells = [[title, *_COLUMNS]]
    for row in memory["devices"]:
        weights = [row["target_weights"], row["draft_weights"]]
        sizes = [*(reversed(weights) if is_draft else weights), row["target_kv"], row["draft_kv"]]
        sizes.append(row["target_compute"] + row["draft_compute"])
        cells.append([row["device"], *map(_size, [*sizes, sum(sizes), row["free"]])])
    widths = [max(map(len, column)) for column in zip(*cells)]
    return ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in cells]


def _size(n: int) -> str:
    return gib(n) if n else "-"
