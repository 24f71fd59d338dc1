"""The table of `python -m bench gpu`: one line for each library, CUDA graphs on or off, and n_max."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .. import tables
from ..records import Record
from . import suite

NAMES = f"{'n_max':>5} {'plain':>8} {'ours':>8} {'ratio':>6} {'mean_len':>8} {'draft':>7} {'verify':>7} {'rest':>6}"
UNITS = f"{'':5} {'tok/s':>8} {'tok/s':>8} {'':6} {'':8} {'ms':>7} {'ms':>7} {'ms':>6}"


def launches(rows: Sequence[Record]) -> str:
    """Kernel launches a round; "-" while no run counts them: a run's own count would be its key n_launches."""
    if not all("n_launches" in row for row in rows):
        return "-"
    return f"{tables.total(rows, 'n_launches') / tables.n_rounds(rows):.1f}"


def speeds(arms: tables.Arms) -> Iterator[str]:
    """Yield the cells of each of our arms."""
    plain = arms.get(("plain", 0), [])
    for (loop, n_max), runs in arms.items():
        if loop != "ours":
            continue
        ours, base = tables.speed(runs), tables.speed(plain)
        ratio = f"{ours / base:6.2f}" if base else f"{'-':>6}"
        parts = [tables.total(runs, f"t_{part}_ms") / tables.n_rounds(runs) for part in ("draft", "verify", "other")]
        times = f"{parts[0]:7.3f} {parts[1]:7.3f} {parts[2]:6.3f}"
        numbers = f"{n_max:5} {base:8.1f} {ours:8.1f} {ratio} {tables.mean_len(runs):8.2f} {times}"
        yield f"{numbers} {launches(runs):>14}"


def groups(rows: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    """Records of each library and setting of the graphs, in the order in which they were measured."""
    found: dict[tuple[str, str], list[Record]] = {}
    for row in rows:
        if "graphs" in row:
            found.setdefault((row["library"], row["graphs"]), []).append(row)
    return found


def table(rows: Sequence[Record]) -> str:
    """All lines, then what failed, and what each library was built with."""
    names = [row["library"] for row in rows if "library" in row]
    wide = max(map(len, ["library", *names]))
    tests = f"{'passed':>6} {'failed':>6} {'skipped':>7}"
    lines = [f"{'library':{wide}} graphs {tests} {NAMES} {'launches/round':>14}", f"{'':{wide}} {'':27} {UNITS}"]
    for (library, graphs), some in groups(rows).items():
        counts = [suite.count(some, *which) for which in (("passed",), ("failed", "error"), ("skipped",))]
        head = f"{library:{wide}} {graphs:6} {counts[0]:6} {counts[1]:6} {counts[2]:7}"
        lines += [f"{head} {cells}" for cells in speeds(tables.by_arm(some)) or ()] or [head]
    return "\n\n".join("\n".join(part) for part in (lines, failures(rows), libraries(rows)) if part)


def where(row: Record) -> str:
    return row.get("library", "") + (f", graphs {row['graphs']}" if "graphs" in row else "")


def failures(rows: Sequence[Record]) -> list[str]:
    """A line for each run and each test that failed."""
    lines = []
    for row in rows:
        if row["record"] == "failed":
            last = row["tail"].strip().rsplit("\n", 1)[-1][:160]
            lines.append(f"failed: {where(row)}: {row['what']}: {row['reason']}; {last}")
        elif row["record"] == "test" and row["outcome"] in ("failed", "error"):
            lines.append(f"{row['outcome']}: {where(row)}: {row['test']}: {row['message'].split(chr(10))[0][:160]}")
    return lines


def libraries(rows: Sequence[Record]) -> list[str]:
    """A line for each library that loaded: size, what it was built with, devices."""
    lines = []
    for row in rows:
        if row["record"] == "provenance" and "graphs" not in row:
            size = row["files"]["library"]["bytes"] / 1e6
            lines.append(f"{row['library']}: {size:.1f} MB, {row['build']['options']}; {', '.join(row['devices'])}")
    return lines
