"""What a verify of each width costs, and a draft: the floor under a round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from pyllama_dflash import Speculator

from . import records
from .records import Record

PROMPT = "A verify of several rows reads each weight once, so it should cost little more than one row."


def verify_ms(spec: Speculator, width: int, repeats: int) -> list[float]:
    """Times of verifies of `width` rows after a short prompt; the rows are tokens that the target will reject."""
    tokens = spec.target.tokenize(PROMPT)
    wrong = [tokens[0]] * (width - 1)
    times = []
    for _ in range(repeats):
        spec.prefill(tokens)
        times.append(spec.verify(wrong).t_ms)
    return times


def draft_ms(spec: Speculator, n_max: int, repeats: int) -> list[float]:
    """Times of drafts of n_max tokens; features of one row are injected with each."""
    spec.prefill(spec.target.tokenize(PROMPT))
    times = []
    for _ in range(repeats):
        spec.verify(())
        times.append(spec.draft(n_max=n_max).t_ms)
    return times


def measure(
    target: Path, draft: Path, widths: Sequence[int], n_threads: int, n_ctx: int, repeats: int
) -> Iterator[Record]:
    """Yield the provenance, then a record for each width, taps and argmax on, widths interleaved."""
    yield records.provenance(target=target, draft=draft)
    sizes = {"n_ctx": n_ctx, "n_threads": n_threads}
    times: dict[tuple[str, int], list[float]] = {}
    with Speculator(target, draft, **sizes) as spec:
        fits = [width for width in widths if width <= spec.n_max + 1]
        for warm in (True, *[False] * 5):
            for width in fits:
                verified = verify_ms(spec, width, repeats)
                drafted = draft_ms(spec, width - 1, repeats) if width > 1 else []
                if not warm:
                    times.setdefault(("verify", width), []).extend(verified)
                    times.setdefault(("draft", width), []).extend(drafted)
    for (what, width), values in times.items():
        if values:
            yield {"record": "width", "what": what, "width": width, "median_ms": median(values), "min_ms": min(values)}


def table(rows: Sequence[Record]) -> str:
    """Median and least time of a verify and of a draft by width."""
    lines = [f"{'width':>5} {'verify ms':>10} {'(least)':>8} {'draft ms':>9} {'(least)':>8}"]
    found = {(row["what"], row["width"]): row for row in rows if row["record"] == "width"}
    for width in sorted({width for _, width in found}):
        cells = [found.get((what, width)) for what in ("verify", "draft")]
        text = [f"{c['median_ms']:9.2f} {c['min_ms']:8.2f}" if c else " " * 18 for c in cells]
        lines.append(f"{width:5}  {text[0]} {text[1]}")
    return "\n".join(lines)
