"""Tables of what `python -m bench shape` measured: costs are measured, acceptance is assumed, and they say so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from .. import tables, widths
from ..records import Record

ASSUMED = (
    "cost measured, acceptance assumed: mean_len x plain's ms a token / ms of a round in which nothing was accepted"
)
GIVEN = "cost measured, acceptance given by hand: drafts paid for, known tokens verified in their place"


def one(rows: Sequence[Record], kind: str) -> Record:
    return next(row for row in rows if row["record"] == kind)


def pair_table(rows: Sequence[Record]) -> list[str]:
    """The pair's sizes, and the time in which the device could read its weights."""
    shape, options = one(rows, "shape"), one(rows, "provenance")["options"]
    lines = [", ".join(f"{name} {value}" for name, value in shape["shape"].items())]
    sizes = [f"{name} {shape[name]['bytes'] / 1e9:.2f} GB" for name in ("target", "draft")]
    lines.append(f"random weights: {', '.join(sizes)}; written in {shape['write_s']:.0f} s")
    check = one(rows, "check")
    choices = f"{check['n_distinct']} different choices in {check['n_rows']} rows"
    lines.append(
        f"logits are finite, deviation {check['std']:.2f}; {choices}; opened in {one(rows, 'opened')['ms']:.0f} ms"
    )
    for name, what in (("target", "a verify"), ("draft", "a draft, the target's head included,")):
        gigabytes = shape[name]["bytes_read"] / 1e9
        floor = f": {1000 * gigabytes / options['bandwidth']:.2f} ms at least" if options["bandwidth"] else ""
        lines.append(f"{what} reads {gigabytes:.2f} GB of weights{floor}")
    return lines


def widths_tables(rows: Sequence[Record]) -> Iterator[list[str]]:
    """Yield verifies and drafts by width, after the prompt and at depth, with the floor beside c(1)."""
    bandwidth = one(rows, "provenance")["options"]["bandwidth"]
    megabytes = one(rows, "shape")["target"]["bytes_read"] / 1e6
    for depth in sorted({row["depth"] for row in rows if row["record"] == "width"}):
        some = [row for row in rows if row.get("depth") == depth]
        least = min(widths.costs(some)["bare", 1])
        floor = f", its weights alone {megabytes / bandwidth:.2f} ms" if bandwidth else ""
        last = f"c(1) {least:.2f} ms at least: its weights at {megabytes / least:.0f} GB/s{floor}"
        yield [f"after {one(some, 'prefill')['n']} tokens", *widths.table(some).splitlines(), last]


def prefill_table(rows: Sequence[Record]) -> list[str]:
    """Prefill by length of the prompt, without a draft and with one that takes its features."""
    lines = [f"{'prefill':8} {'tokens':>6} {'ms':>9} {'tok/s':>8}"]
    for loop, n in sorted({(row["loop"], row["n"]) for row in rows if row["record"] == "prefill"}):
        some = [row for row in rows if row["record"] == "prefill" and (row["loop"], row["n"]) == (loop, n)]
        ms = median(row["ms"] for row in some)
        lines.append(f"{loop:8} {n:6} {ms:9.1f} {1000 * n / ms:8.0f}")
    return lines


def rounds_table(arms: tables.Arms) -> list[str]:
    """What was run: tokens a second, rounds a second, and a round's parts."""
    lines = ["as run; random weights accept next to nothing"]
    lines.append(
        f"{'arm':10} {'n_max':>5} {'tok/s':>8} {'rounds/s':>8} {'round ms':>9} {'mean_len':>8}  draft + verify + rest"
    )
    for (loop, n_max), runs in arms.items():
        ms = round_ms(runs)
        parts = ""
        if loop == "ours":
            each = [tables.total(runs, f"t_{part}_ms") / tables.n_rounds(runs) for part in ("draft", "verify", "other")]
            parts = " + ".join(f"{part:.2f}" for part in each)
        length = tables.mean_len(runs) if n_max else 1.0
        cells = f"{tables.speed(runs):8.1f} {1000 / ms:8.1f} {ms:9.3f} {length:8.2f}"
        lines.append(f"{loop:10} {n_max:5} {cells}  {parts}".rstrip())
    return lines


def round_ms(runs: Sequence[Record]) -> float:
    return tables.total(runs, "predicted_ms") / tables.n_rounds(runs)


def assumed_table(arms: tables.Arms, mean_lens: Sequence[float]) -> list[str]:
    """Speeds at each mean_len, if every round cost what one does in which nothing is accepted."""
    loops = [key for key in arms if key[0] != "plain"]
    base = round_ms(arms["plain", 0])
    heads = " ".join(f"{loop + ' tok/s':>15} {'to plain':>8}" for loop, _ in loops)
    lines = [ASSUMED, f"{'mean_len':>8} {heads}" + (" ours/upstream" if len(loops) > 1 else "")]
    for mean_len in mean_lens:
        times = {loop: round_ms(arms[loop, n_max]) / mean_len for loop, n_max in loops}
        cells = " ".join(f"{1000 / ms:15.1f} {base / ms:8.2f}" for ms in times.values())
        ratio = f" {times['upstream'] / times['ours']:13.2f}" if "upstream" in times else ""
        lines.append(f"{mean_len:8.2f} {cells}{ratio}")
    return lines


def given_table(rows: Sequence[Record], arms: tables.Arms) -> list[str]:
    """Speeds of the rounds with acceptance given by hand; "slips" are rounds in which a near tie turned."""
    base = tables.speed(arms["plain", 0])
    names = f"{'wanted':>8} {'mean_len':>8} {'tok/s':>8} {'to plain':>8} {'round ms':>9} {'slips':>9}"
    lines = [GIVEN, f"{names}  draft + verify + rest"]
    for wanted in sorted({row["wanted"] for row in rows if row["record"] == "given"}):
        some = [row for row in rows if row["record"] == "given" and row["wanted"] == wanted]
        n_rounds, n_tokens = tables.total(some, "n_rounds"), tables.total(some, "predicted_n")
        ms = tables.total(some, "predicted_ms")
        parts = [tables.total(some, f"t_{part}_ms") / n_rounds for part in ("draft", "verify", "other")]
        slips = f"{tables.total(some, 'n_slips'):.0f}/{n_rounds:.0f}"
        speed = 1000 * n_tokens / ms
        cells = f"{n_tokens / n_rounds:8.2f} {speed:8.1f} {speed / base:8.2f} {ms / n_rounds:9.3f} {slips:>9}"
        lines.append(f"{wanted:8.2f} {cells}  {' + '.join(f'{part:.2f}' for part in parts)}")
    return lines


def table(rows: Sequence[Record]) -> str:
    """All tables of a file."""
    arms = tables.by_arm(rows)
    mean_lens = one(rows, "provenance")["options"]["mean_lens"]
    parts = [pair_table(rows), *widths_tables(rows), prefill_table(rows), rounds_table(arms)]
    if ("plain", 0) in arms:  # or the run was cut off before
        parts += [assumed_table(arms, mean_lens), given_table(rows, arms)]
    parts += [[f"failed: {row['what']}: {row['reason'][-500:]}"] for row in rows if row["record"] == "failed"]
    return "\n\n".join("\n".join(part) for part in parts)
