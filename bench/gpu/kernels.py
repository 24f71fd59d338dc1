"""Which CUDA kernels a pair's passes launch, and how many: prefill, verifies of each width, drafts, a whole round.

Captured graphs hide their kernels, so they are switched off here: a round costs as many launches as on a card that cannot
replay graphs.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable

from ..records import Record

GRAPHS = "GGML_CUDA_DISABLE_GRAPHS"
PROMPT = "Each kernel that a pass launches costs the processor and the card some microseconds. " * 40


def measure(target: Path, draft: Path, n_max: int, options: dict[str, Any]) -> Iterator[Record]:
    """Yield a record for each pass: what, width, launches, and the kernels by mangled name.

    Args:
        target, draft: GGUF files.
        n_max: widest draft that is verified, beside narrower ones.
        options: of Speculator.
    """
    os.environ[GRAPHS] = "1"  # before the library looks
    from pyllama_dflash import Speculator, cuda

    def traced(what: str, width: int, call: Callable[[], object], before: Callable[[], object] = int) -> Record:
        for _ in range(2):  # the first time allocates, and plans
            before()
            call()
        before()
        with cuda.trace() as kernels:
            call()
        return {"record": "pass", "what": what, "width": width, "n_launches": sum(kernels.values()), "kernels": kernels}

    with Speculator(target, draft, **options) as spec:
        n_block = spec.n_max
        tokens = spec.target.tokenize(PROMPT)[:600]
        yield traced("prefill", len(tokens), lambda: spec.prefill(tokens), spec.reset)
        for width in range(1, n_block + 2):
            yield traced("verify", width, lambda: spec.verify(tokens[: width - 1]))  # noqa: B023
        yield traced("draft", n_block, spec.draft)
        yield traced("round", min(n_max, n_block) + 1, lambda: spec.verify(spec.draft(n_max=min(n_max, n_block))))
    with Speculator(target, n_max=15, **options) as spec:
        spec.prefill(tokens)
        for width in range(n_block + 2, 17):
            yield traced("verify", width, lambda: spec.verify(tokens[: width - 1]))  # noqa: B023


def trace(rows: Sequence[Record]) -> dict[str, int]:
    """All kernels of all passes with their launches: what bench sass reads."""
    found: Counter[str] = Counter()
    for row in rows:
        found.update(row.get("kernels", {}))
    return dict(found)


def write_trace(path: Path, rows: Sequence[Record]) -> None:
    path.write_text(json.dumps(trace(rows), indent=0, sort_keys=True), encoding="utf-8")


def table(rows: Sequence[Record]) -> str:
    lines = [f"{'pass':8} {'width':>5} {'launches':>9} {'kernels':>8}"]
    for row in rows:
        if row["record"] == "pass":
            lines.append(f"{row['what']:8} {row['width']:5} {row['n_launches']:9} {len(row['kernels']):8}")
    return "\n".join(lines)
