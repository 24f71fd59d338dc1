"""Our loop against upstream's and plain decoding: same files, same prompts, arms interleaved prompt by prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from pyllama_dflash import Speculator, Stats

from . import records, upstream
from .records import Record


def ours(spec: Speculator, prompt: str, n_max: int, n_predict: int) -> Record:
    spec.reset()
    stats: Stats = spec.run(prompt, max_tokens=n_predict, n_max=n_max or None, speculate=n_max > 0).stats
    keys = ("prompt_n", "prompt_ms", "predicted_n", "predicted_ms", "draft_n", "draft_n_accepted", "n_rounds")
    times = ("t_draft_ms", "t_verify_ms", "t_other_ms")
    return {key: getattr(stats, key) for key in (*keys, *times)}


def like_upstream(spec: Speculator, prompt: str, n_max: int, n_predict: int) -> Record:
    """Count drafted and accepted tokens by upstream's rule for the end, so that both counts cover the same rounds.

    Its loop goes on until more than n_predict tokens are out. It may cut the last draft short, and counts what follows
    an end-of-generation token otherwise, so that a last round alone may differ.
    """
    spec.reset()
    spec.prefill(prompt)
    emitted = drafted = accepted = 0
    while emitted <= n_predict:
        draft = spec.draft(n_max=n_max)
        verdict = spec.verify(draft)
        drafted, accepted = drafted + len(draft.tokens), accepted + len(verdict.accepted)
        emitted += len(verdict.accepted) + 1
        if any(map(spec.target.is_eog, (*verdict.accepted, verdict.bonus))):
            break
    return {"predicted_n": emitted, "draft_n": drafted, "draft_n_accepted": accepted}


def measure(
    target: Path, draft: Path, n_maxs: Sequence[int], n_predict: int, n_threads: int, n_ctx: int, repeats: int
) -> Iterator[Record]:
    """Yield the provenance, then a record for each prompt, arm and repeat."""
    upstream.build()
    yield records.provenance(target=target, draft=draft)
    prompts = records.read_prompts()
    with Speculator(target, draft, n_ctx=n_ctx, n_threads=n_threads) as spec:
        spec.run("warm up", max_tokens=16)
        for repeat, (index, prompt) in tqdm([(r, p) for r in range(repeats) for p in enumerate(prompts)]):
            text = spec.target.apply_chat_template(prompt["text"])
            for n_max in (0, *n_maxs):
                base = {"record": "run", "prompt": index, "kind": prompt["kind"], "n_max": n_max, "repeat": repeat}
                yield {**base, "loop": "ours", **ours(spec, text, n_max, n_predict)}
                if n_max:
                    sizes = {"n_predict": n_predict, "n_threads": n_threads, "n_ctx": n_ctx}
                    report = upstream.run(str(target), str(draft), text, n_max=n_max, **sizes)
                    yield {**base, "loop": "upstream", **report}
                    if not repeat:
                        yield {**base, "record": "count", **like_upstream(spec, text, n_max, n_predict)}


def total(rows: Sequence[Record], key: str) -> float:
    return float(sum(row[key] for row in rows))


def mean_len(rows: Sequence[Record]) -> float:
    """Tokens a round; each round emits the accepted tokens and one more, which gives upstream's rounds too."""
    accepted = total(rows, "draft_n_accepted")
    rounds = total(rows, "n_rounds") if "n_rounds" in rows[0] else total(rows, "predicted_n") - accepted
    return 1 + accepted / rounds


def table(rows: Sequence[Record]) -> str:
    """Tokens per second (token-weighted), mean_len and acceptance of each arm, and our ratio to upstream's."""
    runs = [row for row in rows if row["record"] == "run"]
    lines = [f"{'loop':9} {'n_max':>5} {'tok/s':>8} {'mean_len':>9} {'acceptance':>11} {'to upstream':>12}"]
    speeds: dict[tuple[str, int], float] = {}
    arms = {(run["loop"], run["n_max"]) for run in runs}
    for loop, n_max in sorted(arms, key=lambda arm: (arm[1], arm[0] == "ours")):
        arm = [run for run in runs if (run["loop"], run["n_max"]) == (loop, n_max)]
        speeds[loop, n_max] = 1000 * total(arm, "predicted_n") / total(arm, "predicted_ms")
        line = f"{loop if n_max else 'plain':9} {n_max:5} {speeds[loop, n_max]:8.1f}"
        if n_max:
            line += f" {mean_len(arm):9.2f} {total(arm, 'draft_n_accepted') / total(arm, 'draft_n'):11.3f}"
        if n_max and loop == "ours":
            line += f" {speeds[loop, n_max] / speeds['upstream', n_max]:12.2f}"
        lines.append(line)
    lines.append(acceptance_table(rows))
    return "\n".join(lines)


def acceptance_table(rows: Sequence[Record]) -> str:
    """Acceptance of each prompt in both loops: it differs where features reach the draft differently."""
    lines = ["", f"{'prompt':>6} {'kind':6} {'n_max':>5} {'ours':>7} {'upstream':>9} {'difference':>11}"]
    theirs = {(r["prompt"], r["n_max"]): r for r in rows if r.get("loop") == "upstream" and not r["repeat"]}
    for count in (row for row in rows if row["record"] == "count"):
        rates = [r["draft_n_accepted"] / max(r["draft_n"], 1) for r in (count, theirs[count["prompt"], count["n_max"]])]
        name = f"{count['prompt']:6} {count['kind']:6} {count['n_max']:5}"
        lines.append(f"{name} {rates[0]:7.3f} {rates[1]:9.3f} {rates[0] - rates[1]:+11.4f}")
    return "\n".join(lines)
