"""Tables of what `python -m bench round` measured: arms, our round against its floor, ratios, kinds, start-up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median, quantiles

from . import widths
from .records import Record

Key = tuple[str, int]  # loop and n_max
Turn = tuple[int, int]  # prompt and repeat
Arms = dict[Key, list[Record]]
LOOPS = ("plain", "ours", "upstream", "upstream-pinned", "xllamacpp")


def steady(row: Record) -> Record:
    """The row without its head, where its first tokens were measured apart."""
    return {**row, **{key: row[key] - value for key, value in row.get("head", {}).items()}}


def by_arm(rows: Iterable[Record]) -> Arms:
    """Runs of each arm, by n_max and in the order of LOOPS."""
    arms: Arms = {}
    for row in rows:
        if row["record"] == "run":
            arms.setdefault((row["loop"], row["n_max"]), []).append(steady(row))
    return dict(sorted(arms.items(), key=lambda item: (item[0][1], LOOPS.index(item[0][0]))))


def total(rows: Iterable[Record], key: str) -> float:
    return float(sum(row[key] for row in rows))


def speed(rows: Sequence[Record]) -> float:
    """Tokens a second, token-weighted; 0 without a token."""
    ms = total(rows, "predicted_ms")
    return 1000 * total(rows, "predicted_n") / ms if ms > 0 else 0.0


def n_rounds(rows: Sequence[Record]) -> float:
    """Rounds; each emits the accepted tokens and one more, which gives those of the other programs too."""
    if "n_rounds" in rows[0]:
        return total(rows, "n_rounds")
    return max(1.0, total(rows, "predicted_n") - total(rows, "draft_n_accepted"))


def mean_len(rows: Sequence[Record]) -> float:
    """Tokens a round."""
    return 1 + total(rows, "draft_n_accepted") / n_rounds(rows)


def same_text(rows: Sequence[Record], others: Sequence[Record]) -> str:
    """On how many runs of all the texts agree, as far as the shorter goes: near ties turn with other arithmetic."""
    texts = {(row["prompt"], row["repeat"]): row["text"].rstrip("\ufffd\n ") for row in others}
    pairs = [(row["text"].rstrip("\ufffd\n "), texts[row["prompt"], row["repeat"]]) for row in rows]
    return f"{sum(a.startswith(b) or b.startswith(a) for a, b in pairs)}/{len(pairs)}"


def best(arms: Arms, loop: str) -> Key | None:
    """The loop's fastest arm."""
    return max((key for key in arms if key[0] == loop), key=lambda key: speed(arms[key]), default=None)


def ratio(ours: Sequence[Record], theirs: Sequence[Record]) -> str:
    """Ratio of the speeds, and in brackets the quartiles of the prompts' own ratios."""
    if not speed(theirs):
        return "-"
    each = []
    for prompt in sorted({row["prompt"] for row in ours}):
        ones = [speed([row for row in rows if row["prompt"] == prompt]) for rows in (ours, theirs)]
        if all(one > 0 for one in ones):
            each.append(ones[0] / ones[1])
    low, _, high = quantiles(each, n=4, method="inclusive") if len(each) > 1 else (each or [0.0]) * 3
    return f"{speed(ours) / speed(theirs):.2f} [{low:.2f} {high:.2f}]"


def arms_table(arms: Arms) -> list[str]:
    """Speed, tokens a round, acceptance and time of a round of every arm.

    "text" counts the prompts whose text is plain decoding's; "others" is other programs' share of the CPUs meanwhile.
    """
    names = f"{'tok/s':>8} {'to plain':>8} {'mean_len':>8} {'acceptance':>10} {'round ms':>9} {'text':>7} {'others':>6}"
    lines = [f"{'arm':15} {'n_max':>5} {names}"]
    plain = speed(arms["plain", 0])
    for (loop, n_max), rows in arms.items():
        lengths = " " * 19
        if n_max:
            lengths = f"{mean_len(rows):8.2f} {total(rows, 'draft_n_accepted') / max(1, total(rows, 'draft_n')):10.3f}"
        times = f"{total(rows, 'predicted_ms') / n_rounds(rows):9.2f} {same_text(rows, arms['plain', 0]):>7}"
        times += f" {total(rows, 'others') / len(rows):6.0%}"
        lines.append(f"{loop:15} {n_max:5} {speed(rows):8.1f} {speed(rows) / plain:8.2f} {lengths} {times}")
    return lines


def floor(costs: dict[tuple[str, int], list[float]], n_max: int) -> tuple[float, float]:
    """Median ms of a verify and of a draft by themselves, for n_max tokens."""
    return median(costs["verify", n_max + 1]), median(costs["draft", n_max + 1])


def round_table(arms: Arms, rows: Sequence[Record]) -> list[str]:
    """Our round, its parts and its floor: c(W) of a verify of W = n_max + 1 rows alone, and a draft alone.

    "of loop" is the sum of the parts against the time of the loop as its caller sees it; "outside" the part of a round
    that is neither the verify's nor the draft's time alone.
    """
    names = ("round", "draft", "verify", "other", "of loop", "c(W)", "draft alone", "x floor", "outside")
    lines = ["our round, ms", " ".join(["n_max", *[f"{name:>{max(7, len(name))}}" for name in names]])]
    costs = widths.costs(rows)
    for (loop, n_max), runs in arms.items():
        if loop != "ours":
            continue
        whole = total(runs, "predicted_ms") / n_rounds(runs)
        parts = [total(runs, f"t_{part}_ms") / n_rounds(runs) for part in ("draft", "verify", "other")]
        verify, draft = floor(costs, n_max)
        cells = [whole, *parts, sum(parts) * n_rounds(runs) / total(runs, "loop_ms"), verify, draft]
        cells += [whole / (verify + draft), 1 - (verify + draft) / whole]
        text = [f"{cell:{max(7, len(name))}.{3 if name == 'of loop' else 2}f}" for name, cell in zip(names, cells)]
        lines.append(" ".join([f"{n_max:5}", *text]))
    return lines


def ratio_table(arms: Arms) -> list[str]:
    """Our speed against each other loop's at the same n_max, then each at its own best."""
    others = [loop for loop in LOOPS if loop != "ours" and any(key[0] == loop for key in arms)]
    lines = ["ours / theirs, in brackets the quartiles over prompts"]
    lines.append(" ".join(["n_max", *[f"{loop:>18}" for loop in others]]))
    for n_max in sorted(n_max for loop, n_max in arms if loop == "ours"):
        theirs = [arms[loop, n_max if loop != "plain" else 0] for loop in others]
        lines.append(" ".join([f"{n_max:5}", *[f"{ratio(arms['ours', n_max], rows):>18}" for rows in theirs]]))
    tops = {loop: key for loop in ("ours", *others) if (key := best(arms, loop))}
    cells = [f"{ratio(arms[tops['ours']], arms[tops[loop]]):>18}" for loop in others]
    lines.append(" ".join([" best", *cells]))
    return [*lines, "best n_max: " + ", ".join(f"{loop} {n_max}" for loop, n_max in tops.values() if n_max)]


def kind_table(arms: Arms) -> list[str]:
    """Our speed against plain decoding by kind of prompt; a star marks the best n_max of all prompts."""
    kinds = list(dict.fromkeys(row["kind"] for row in arms["plain", 0]))
    lines = ["ours / plain by kind", " ".join(["n_max ", *[f"{kind:>6}" for kind in kinds]])]
    top = best(arms, "ours")
    for key, rows in arms.items():
        if key[0] != "ours":
            continue
        pairs = [[[r for r in runs if r["kind"] == kind] for runs in (rows, arms["plain", 0])] for kind in kinds]
        cells = [f"{speed(mine) / speed(plain):6.2f}" for mine, plain in pairs]
        lines.append(" ".join([f"{key[1]:5}{'*' if key == top else ' '}", *cells]))
    return lines


def start_table(rows: Sequence[Record]) -> list[str]:
    """Opening, and the first generation of a process against a second one of the same reply."""
    lines = [f"{'start-up, ms':15} {'n_max':>5} {'open':>8} {'first':>8} {'again':>8} {'first - again':>13}"]
    for row in (row for row in rows if row["record"] == "start"):
        times = f"{row['open_ms']:8.0f} {row['first_ms']:8.0f} {row['again_ms']:8.0f}"
        lines.append(f"{row['loop']:15} {row['n_max']:5} {times} {row['first_ms'] - row['again_ms']:13.0f}")
    return lines if len(lines) > 1 else []


def acceptance_table(rows: Sequence[Record]) -> list[str]:
    """Acceptance over the same rounds as upstream's: equal unless texts differ, or features reach the draft wrongly."""
    lines = []
    counts = [row for row in rows if row["record"] == "count"]
    firsts = [row for row in rows if row["record"] == "run" and not row["repeat"] and row["loop"] == "upstream"]
    for n_max in sorted({row["n_max"] for row in counts}):
        runs = {row["prompt"]: row for row in firsts if row["n_max"] == n_max}
        lines.append(acceptance_line(n_max, [(row, runs[row["prompt"]]) for row in counts if row["n_max"] == n_max]))
    head = f"{'acceptance':15} {'n_max':>5} {'ours':>7} {'theirs':>7}  same prompts; differences of others"
    return [head, *lines] if lines else []


def acceptance_line(n_max: int, pairs: Sequence[tuple[Record, Record]]) -> str:
    mine, theirs = zip(*pairs)
    overall = [total(side, "draft_n_accepted") / max(1, total(side, "draft_n")) for side in (mine, theirs)]
    gaps = {a["prompt"]: _acceptance(a) - _acceptance(b) for a, b in pairs}
    others = ", ".join(f"{p} {gap:+.4f}" for p, gap in sorted(gaps.items(), key=lambda item: -abs(item[1])) if gap)
    figures = f"{'':15} {n_max:5} {overall[0]:7.3f} {overall[1]:7.3f}"
    return f"{figures}  {list(gaps.values()).count(0)} of {len(gaps)}; {others}"


def _acceptance(row: Record) -> float:
    return float(row["draft_n_accepted"] / max(1, row["draft_n"]))


def whole_turns(rows: Sequence[Record], most: float) -> tuple[set[Turn], set[Turn]]:
    """The turns in which every arm ran, and those of them in which others took no more than `most` of the CPUs."""
    runs: dict[Turn, list[Record]] = {}
    for row in rows:
        if row["record"] == "run":
            runs.setdefault((row["prompt"], row["repeat"]), []).append(row)
    n_arms = max((len(some) for some in runs.values()), default=0)
    whole = {turn: some for turn, some in runs.items() if len(some) == n_arms}
    return set(whole), {turn for turn, some in whole.items() if max(row["others"] for row in some) <= most}


def table(rows: Sequence[Record], most: float = 1.0) -> str:
    """All tables of a file, of the turns in which others took no more than `most` of the CPUs, 0 to 1."""
    turns, quiet = whole_turns(rows, most)
    if not quiet:
        return f"in each of {len(turns)} turns others took more than {most:.0%} of the CPUs; give a higher --quiet"
    rows = [row for row in rows if "prompt" not in row or (row["prompt"], row["repeat"]) in quiet]
    arms = by_arm(rows)
    parts = [[f"{len(quiet)} of {len(turns)} turns; in the rest others disturbed"] if quiet < turns else []]
    parts += [arms_table(arms), round_table(arms, rows), ratio_table(arms), kind_table(arms)]
    parts += [widths.table(rows).splitlines(), start_table(rows), acceptance_table(rows)]
    return "\n\n".join("\n".join(part) for part in parts if part)
