"""Which CUDA kernels a pair's passes launch, and how many: prefill, verifies of each width, drafts, a whole round.

Captured graphs hide their kernels, so they are switched off here: a round costs as many launches as on a card that
cannot replay graphs.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable

from .. import records
from ..records import Record

PROMPT = "Each kernel that a pass launches costs the processor and the card some microseconds. " * 40


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = commands.add_parser("kernels", help="the CUDA kernels that each pass of a pair launches")
    run.add_argument("--target", type=Path, help="GGUF file; default: the demo pair's")
    run.add_argument("--draft", type=Path)
    run.add_argument("--n-max", type=int, default=7, metavar="N")
    run.add_argument("--ctx", type=int, default=2048)
    for name in ("type-k", "type-v"):
        run.add_argument(f"--{name}", default="f16", help="of the caches of both models (default %(default)s)")
    run.add_argument("--out", type=Path, default=Path("build/bench/kernels.jsonl"))
    run.add_argument("--trace", type=Path, metavar="FILE", help="write all kernels there, for bench sass")


def run(args: argparse.Namespace, target: Path, draft: Path) -> Iterator[Record]:
    """Yield the provenance, then the passes."""
    types = {f"{name}{whose}": getattr(args, name) for name in ("type_k", "type_v") for whose in ("", "_draft")}
    yield records.provenance({"target": target, "draft": draft}, n_max=args.n_max, n_ctx=args.ctx, **types)
    rows = []
    for row in measure(target, draft, args.n_max, {"n_ctx": args.ctx, **types}):
        rows.append(row)
        yield row
    if args.trace:
        args.trace.write_text(json.dumps(trace(rows), indent=0, sort_keys=True), encoding="utf-8")


def measure(target: Path, draft: Path, n_max: int, options: dict[str, Any]) -> Iterator[Record]:
    """Yield a record for each pass: what, width, launches, and the kernels by mangled name.

    Args:
        target: GGUF file.
        draft: GGUF file.
        n_max: widest draft that is verified, beside narrower ones.
        options: of Speculator.
    """
    from pyllama_dflash import Speculator, cuda

    def traced(what: str, width: int, call: Callable[[], object], before: Callable[[], object] = int) -> Record:
        for _ in range(2):  # the first time allocates, and plans
            before()
            call()
        before()
        with cuda.trace() as kernels:
            call()
        return {"record": "pass", "what": what, "width": width, "n_launches": sum(kernels.values()), "kernels": kernels}

    options = {**options, "cuda_graphs": "off"}
    with Speculator(target, draft, **options) as spec:
        n_block = spec.n_max
        tokens = spec.target.tokenize(PROMPT)[:600]
        yield traced("prefill", len(tokens), lambda: spec.prefill(tokens), spec.reset)
        for width in range(1, n_block + 2):
            yield traced("verify", width, lambda: spec.verify(tokens[: width - 1]))  # noqa: B023
        yield traced("draft", n_block, spec.draft)
        yield traced("round", min(n_max, n_block) + 1, lambda: spec.verify(spec.draft(n_max=min(n_max, n_block))))
    of_target = {name: value for name, value in options.items() if not name.endswith("_draft")}
    with Speculator(target, n_max=15, **of_target) as spec:
        spec.prefill(tokens)
        for width in range(n_block + 2, 17):
            yield traced("verify", width, lambda: spec.verify(tokens[: width - 1]))  # noqa: B023


def trace(rows: Sequence[Record]) -> dict[str, int]:
    """All kernels of all passes with their launches: what bench sass reads."""
    found: Counter[str] = Counter()
    for row in rows:
        found.update(row.get("kernels", {}))
    return dict(found)


def table(rows: Sequence[Record]) -> str:
    lines = [f"{'pass':8} {'width':>5} {'launches':>9} {'kernels':>8}"]
    for row in rows:
        if row["record"] == "pass":
            lines.append(f"{row['what']:8} {row['width']:5} {row['n_launches']:9} {len(row['kernels']):8}")
    return "\n".join(lines)
