"""Sort a file's tensors into groups that people decide about: what is quantised how, what takes the room. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .result import SLOTS

GROUPS = ("backbone", "fc", "selector", "convolutions", "norms", "embeddings", "head", "other")
_EMBEDDINGS = ("token_embd", "position_embd", "token_types")
_HEAD = ("output", "d2t")


@dataclass(frozen=True, **SLOTS)
class TensorGroup:
    """The tensors of one group that have the same type.

    Args:
        name: "backbone" (the layers' attention and feed-forward), "fc" (fuses the target's layers into one row),
            "selector", "convolutions", "norms", "embeddings", "head", or "other".
        type: how they are stored, as "Q4_0".
        n_tensors: how many there are.
        n_params: their weights.
        n_bytes: their size in the file.
    """

    name: str
    type: str
    n_tensors: int
    n_params: int
    n_bytes: int


def group_of(tensor: str) -> str:
    """Return the group of GROUPS that a tensor of this name belongs to."""
    stem = tensor.rsplit(".", 1)[0] if tensor.endswith((".weight", ".bias")) else tensor
    last = stem.rsplit(".", 1)[-1]
    if last.endswith("norm"):
        return "norms"
    if last.endswith(("_conv_base", "_conv_proj")):
        return "convolutions"
    if last.startswith("selector_"):
        return "selector"
    if stem.startswith("blk."):
        return "backbone"
    for group, names in (("fc", ("fc",)), ("embeddings", _EMBEDDINGS), ("head", _HEAD)):
        if stem in names:
            return group
    return "other"


def counted(types: Iterable[str]) -> str:
    """Count the tensors of each type, as "F32 61, Q4_0 28"."""
    return ", ".join(f"{name} {n}" for name, n in sorted(Counter(kind.upper() for kind in types).items()))


def grouped(tensors: Iterable[Mapping[str, Any]]) -> tuple[TensorGroup, ...]:
    """Add up tensors (name, type, n_params, n_bytes) by group and type: in the order of GROUPS, the largest first."""
    sums: dict[tuple[str, str], list[int]] = {}
    for tensor in tensors:
        key = group_of(tensor["name"]), str(tensor["type"]).upper()
        row = sums.setdefault(key, [0, 0, 0])
        for i, n in enumerate((1, tensor["n_params"], tensor["n_bytes"])):
            row[i] += n
    groups = (TensorGroup(*key, *row) for key, row in sums.items())
    return tuple(sorted(groups, key=lambda group: (GROUPS.index(group.name), -group.n_bytes, group.type)))
