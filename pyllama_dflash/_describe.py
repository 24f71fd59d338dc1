"""An Inspection as people read it: names and values, then tables of tensors and of memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ._fit import gib
from ._table import columns

if TYPE_CHECKING:
    from .inspection import Inspection
    from .memory import MemoryPlan
    from .model import ModelInfo
    from .tensors import TensorGroup

KINDS = {
    "target": "target (an ordinary model)",
    "dflash": "DFlash draft",
    "dflash2": "DFlash2 draft",
    "dspark": "DSpark draft, which is not run here",
    "other": "draft of another kind, which is not run here",
}
_MEMORY = ("target weights", "draft weights", "target K/V", "draft K/V", "compute", "total", "free")


def describe(facts: Inspection) -> str:
    """Return lines of text without the last newline."""
    parts = [columns(_rows(facts), right=False), columns(_tensors(facts.tensors))]
    if facts.memory is not None:
        parts.append(columns(_memory(facts.memory)))
        parts += [[f"does not fit: {facts.memory.shortage}"]] if facts.memory.shortage else []
    return "\n\n".join("\n".join(lines) for lines in parts)


def size_of(info: ModelInfo) -> str:
    """Say how many parameters a file has, and how much room they take."""
    return f"{info.n_params / 1e6:.1f} M parameters, {gib(info.n_bytes)}"


def _rows(facts: Inspection) -> list[tuple[str, str]]:
    info = facts.info
    rows = [
        ("file", facts.path),
        ("kind", KINDS[facts.kind]),
        ("architecture", facts.architecture),
        ("name", facts.name or "-"),
        ("size", size_of(info)),
        ("layers", f"{info.n_layer} of width {info.n_embd}"),
        ("vocabulary", f"{info.n_vocab} tokens"),
        ("trained context", f"{info.n_ctx_train} tokens" + (f", window {info.n_swa}" if info.n_swa else "")),
    ]
    if info.block_size:
        sees = "each sees those before it" if info.causal else "each sees the whole block"
        rows += [
            ("block", f"{info.block_size} tokens, {info.block_size - 1} of them drafted; {sees}"),
            ("reads", f"inputs of target layers {', '.join(map(str, info.target_layers))}"),
            ("mask token", f"{info.mask_token} {facts.mask_text!r}"),
        ]
    if info.n_vocab_draft != info.n_vocab:
        rows.append(("drafted vocabulary", f"{info.n_vocab_draft} of {info.n_vocab} tokens"))
    if info.selector_top_k:
        rows.append(("selector", f"top {info.selector_top_k}, rank {info.selector_rank}"))
    if facts.shares or info.is_draft:
        rows.append(("shared with target", ", ".join(facts.shares) or "nothing"))
    if facts.problem is not None:
        rows.append(("cannot be run", facts.problem))
    if facts.pairs is not None:
        label = "pairs with draft" if facts.target is None else "pairs with target"
        rows += [(label, "yes")] if facts.pairs else [(label, f"no: {facts.mismatches[0]}")]
        rows += [("", f"no: {text}") for text in facts.mismatches[1:]]
    return rows


def _tensors(groups: Iterable[TensorGroup]) -> list[tuple[str, ...]]:
    rows = [
        (group.name, group.type, str(group.n_tensors), f"{group.n_params / 1e6:.2f} M", _size(group.n_bytes))
        for group in groups
    ]
    return [("tensors", "type", "count", "parameters", "size"), *rows]


def _size(n: int) -> str:
    return gib(n) if n >= 100 << 10 else f"{n / 1024:.1f} KiB"


def _memory(memory: MemoryPlan) -> list[tuple[str, ...]]:
    title = "memory of the weights" if memory.n_ctx is None else f"memory at n_ctx={memory.n_ctx}"
    rows: list[tuple[str, ...]] = [(title, *_MEMORY)]
    for row, free in zip(memory.devices, memory.free):
        sizes = [row.target_weights, row.draft_weights, row.target_kv, row.draft_kv]
        sizes += [row.target_compute + row.draft_compute, row.total, free]
        rows.append((row.device, *(gib(n) if n else "-" for n in sizes)))
    return rows
