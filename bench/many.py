"""Many prompts side by side against one after the other, arms interleaved."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from tqdm import tqdm

from . import records
from .records import Record, Sizes

if TYPE_CHECKING:  # a file of records can be read where there is no library
    from pyllama_dflash import Speculator


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = commands.add_parser("many", help="prompts side by side against one after the other: tokens a second of all")
    run.add_argument("--target", type=Path, help="GGUF file; default: the demo's")
    run.add_argument("--draft", type=Path, help="GGUF file; default: the demo's")
    run.add_argument("--parallel", type=int, nargs="+", default=[2, 4, 8], metavar="N", help="sequences side by side")
    run.add_argument("--n-max", type=int, nargs="+", default=[0, 3, 7], metavar="N", help="0: without the draft")
    run.add_argument("--solo-n-max", type=int, nargs="+", default=[5, 7], metavar="N", help="of one after the other")
    run.add_argument("--tokens", type=int, default=128, help="to generate for each prompt (default %(default)s)")
    run.add_argument("--prompts", type=int, default=32, metavar="N", help="kinds mixed (default %(default)s)")
    run.add_argument("--repeats", type=int, default=2)
    run.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    run.add_argument("--ctx", type=int, default=2048)
    run.add_argument("--gpu-layers", type=int, default=-1, metavar="N", help="of target and draft; -1: all")
    run.add_argument("--out", type=Path, default=Path("build/bench/many.jsonl"))


def measure(args: argparse.Namespace) -> Iterator[Record]:
    """Yield provenance, then a record of each pass over all prompts: n_parallel 1 is run() after run()."""
    from pyllama_dflash import Model, Speculator, demo_pair

    if bool(args.target) != bool(args.draft):
        raise SystemExit("give both --target and --draft, or neither for the demo pair")
    target, draft = (args.target, args.draft) if args.target else map(Path, demo_pair())
    files = {"target": target, "draft": draft}
    sizes = Sizes(args.threads, args.ctx, args.gpu_layers)
    yield records.provenance(files, tokens=args.tokens, prompts=args.prompts, **vars(sizes))
    jobs = [{"messages": row["text"]} for row in records.read_prompts(args.prompts)]
    arms = [(1, n_max) for n_max in args.solo_n_max]
    arms += [(n_parallel, n_max) for n_parallel in args.parallel for n_max in args.n_max]
    # A prompt that comes again in a later pass is evaluated again.
    options = {"n_ctx": args.ctx, "n_threads": args.threads, "cache_ram": 0}
    # One for each arm, as a user has, on the same weights: each keeps its own contexts and graphs, and none is opened
    # while an arm is timed.
    models = Model(target, n_gpu_layers=args.gpu_layers), Model(draft, n_gpu_layers=args.gpu_layers)
    specs = {arm: Speculator(*models, **options) for arm in arms}
    for (n, n_max), spec in specs.items():
        _pass(spec, jobs[:n], n, n_max, args.tokens)
    said: dict[int, tuple[int, ...]] = {}
    turns = [(repeat, *arm) for repeat in range(args.repeats) for arm in arms]
    for repeat, n_parallel, n_max in tqdm(turns, file=sys.stderr):
        others, start = records.Others(), perf_counter()
        found = _pass(specs[n_parallel, n_max], jobs, n_parallel, n_max, args.tokens)
        t_ms = 1000 * (perf_counter() - start)
        for index, (tokens, _, _) in enumerate(found):
            said.setdefault(index, tokens)
        arm = {"n_parallel": n_parallel, "n_max": n_max, "repeat": repeat, "t_ms": t_ms, "busy": others.share()}
        same = sum(said[index] == tokens for index, (tokens, _, _) in enumerate(found))
        rounds, accepted = (sum(row[at] for row in found) for at in (1, 2))
        n = sum(len(tokens) for tokens, _, _ in found)
        yield {
            "record": "many",
            **arm,
            "predicted_n": n,
            "n_rounds": rounds,
            "draft_n_accepted": accepted,
            "same": same,
        }


def _pass(
    spec: Speculator, jobs: Sequence[Record], n_parallel: int, n_max: int, tokens: int
) -> list[tuple[tuple[int, ...], int, int]]:
    """Tokens, rounds and accepted tokens of each prompt."""
    options = {"max_tokens": tokens, "n_max": n_max}
    if n_parallel == 1:
        results = [spec.run(**job, **options) for job in jobs]
    else:
        results = []
        for one in spec.run_many(jobs, n_parallel=n_parallel, **options):
            if one.error is not None:
                raise one.error
            results.append(one.result)
    return [(result.tokens, result.stats.n_rounds, result.stats.draft_n_accepted) for result in results]


def table(rows: Sequence[Record]) -> str:
    """A line for each arm; ratios are to the fastest of one after the other."""
    arms: dict[tuple[int, int], list[Record]] = {}
    for row in rows:
        if row["record"] == "many":
            arms.setdefault((row["n_parallel"], row["n_max"]), []).append(row)
    speeds = {arm: median(1000 * row["predicted_n"] / row["t_ms"] for row in found) for arm, found in arms.items()}
    solo = max(value for (n_parallel, _), value in speeds.items() if n_parallel == 1)
    lines = [f"{'n_parallel':>10} {'n_max':>5} {'tok/s':>9} {'x one':>6} {'mean_len':>8} {'same text':>9} {'busy':>5}"]
    for (n_parallel, n_max), found in arms.items():
        accepted, rounds = (sum(row[key] for row in found) for key in ("draft_n_accepted", "n_rounds"))
        speed, busy = speeds[n_parallel, n_max], max(row["busy"] for row in found)
        lines.append(
            f"{n_parallel:10} {n_max:5} {speed:9.1f} {speed / solo:6.2f} {1 + accepted / rounds:8.2f} "
            f"{min(row['same'] for row in found):9} {busy:5.2f}"
        )
    return "\n".join(lines)
