"""What a verify of each width costs, and a draft: the floor under a round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from . import records, startup
from .records import Record, Sizes

if TYPE_CHECKING:
    from pyllama_dflash import Speculator

# About as long as a conversation of the benchmark's is half way: what attention costs depends on it.
PROMPT = "A verify of several rows reads each weight once, so it should cost little more than one row. " * 6


def verify_ms(spec: Speculator, width: int, repeats: int, tokens: Sequence[int] = ()) -> list[float]:
    """Times of verifies of `width` rows after `tokens`, or PROMPT; the rows are tokens that the target will reject."""
    tokens = tokens or spec.target.tokenize(PROMPT)
    wrong = [tokens[0]] * (width - 1)
    times = []
    for _ in range(repeats):
        spec.prefill(tokens)
        times.append(spec.verify(wrong).t_ms)
    return times


def turn_ms(spec: Speculator, width: int, repeats: int, tokens: Sequence[int] = ()) -> tuple[list[float], list[float]]:
    """Times of verifies of `width` rows and of drafts, in turn: each finds the other's weights in the caches."""
    tokens = tokens or spec.target.tokenize(PROMPT)
    spec.prefill(tokens)
    verified, drafted = [], []
    for _ in range(repeats):
        verified.append(spec.verify([tokens[0]] * (width - 1)).t_ms)
        drafted.append(spec.draft(n_max=width - 1).t_ms)
    return verified, drafted


def block(spec: Speculator, widths: Sequence[int], repeats: int, tokens: Sequence[int] = ()) -> Iterator[Record]:
    """Yield the times, in ms, of a few verifies of each width, alone and in turn with drafts, and of the drafts.

    Taps and argmax are on. A Speculator without a draft has no taps: its verifies alone, as "bare".
    """
    has_draft = spec.draft_model is not None
    for width in widths:
        base = {"record": "width", "width": width}
        yield {**base, "what": "verify" if has_draft else "bare", "ms": verify_ms(spec, width, repeats, tokens)}
        if width > 1 and has_draft:
            verified, drafted = turn_ms(spec, width, repeats, tokens)
            yield {**base, "what": "turn", "ms": verified}
            yield {**base, "what": "draft", "ms": drafted}


def measure(target: Path, draft: Path, widths: Sequence[int], repeats: int, sizes: Sizes) -> Iterator[Record]:
    """Yield the provenance, then records of five passes, widths interleaved, after one to warm up."""
    yield records.provenance({"target": target, "draft": draft}, repeats=repeats, **vars(sizes))
    with startup.open_ours(target, draft, sizes) as spec:
        fits = [width for width in widths if width <= spec.n_max + 1]
        for warm in (True, *[False] * 5):
            rows = list(block(spec, fits, repeats))
            if not warm:
                yield from rows


def costs(rows: Sequence[Record]) -> dict[tuple[str, int], list[float]]:
    """Times in ms of all blocks by ("verify", "bare", "turn" or "draft", width)."""
    found: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        if row["record"] == "width":
            found.setdefault((row["what"], row["width"]), []).extend(row["ms"])
    return found


TITLES = {"verify": "verify", "bare": "no taps", "turn": "in turn", "draft": "draft"}


def table(rows: Sequence[Record]) -> str:
    """Median and least time in ms, by width, of a verify, alone and in turn with drafts, and of a draft."""
    found = costs(rows)
    whats = [what for what in TITLES if any(what == key[0] for key in found)]
    lines = [f"{'width':>5}  " + " ".join(f"{TITLES[what] + ' ms':>10} {'(least)':>8}" for what in whats)]
    for width in sorted({width for _, width in found}):
        cells = [found.get((what, width)) for what in whats]
        text = [f"{median(times):10.2f} {min(times):8.2f}" if times else " " * 19 for times in cells]
        lines.append(f"{width:5}  {' '.join(text)}".rstrip())
    return "\n".join(lines)
