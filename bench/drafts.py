"""Several drafts of one target: what each is worth, drafts and plain decoding interleaved prompt by prompt."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from . import records
from .records import Record, Sizes
from .tables import mean_len, n_rounds, speed, total

KEYS = ("predicted_n", "predicted_ms", "draft_n", "draft_n_accepted", "n_rounds", "t_draft_ms", "t_verify_ms")
KINDS = ("code", "chat", "story", "list", "json", "copy", "maths")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = commands.add_parser("drafts", help="drafts of one target against each other: size, speed, mean_len by kind")
    run.add_argument("drafts", type=Path, nargs="+", metavar="DRAFT", help="GGUF files; ratios are to the first")
    run.add_argument("--target", type=Path, help="GGUF file; default: the demo's")
    run.add_argument("--n-max", type=int, nargs="+", default=[3, 7], metavar="N")
    run.add_argument("--tokens", type=int, default=256, help="to generate for each prompt (default %(default)s)")
    run.add_argument("--prompts", type=int, metavar="N", help="only so many, kinds mixed; default: all")
    run.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    run.add_argument("--ctx", type=int, default=2048)
    run.add_argument("--gpu-layers", type=int, default=-1, metavar="N", help="of target and drafts; -1: all")
    run.add_argument("--out", type=Path, default=Path("build/bench/drafts.jsonl"))


def measure(args: argparse.Namespace) -> Iterator[Record]:
    """Yield provenance, then a record of each prompt, draft and n_max that its block is long enough for."""
    from pyllama_dflash import Model, Speculator, demo_pair

    target = Model(args.target or demo_pair()[0], n_gpu_layers=args.gpu_layers)
    files = {"target": Path(target.path), **{f"draft {index}": path for index, path in enumerate(args.drafts)}}
    sizes = Sizes(args.threads, args.ctx, args.gpu_layers)
    yield records.provenance(files, tokens=args.tokens, **vars(sizes))
    options = {"n_ctx": args.ctx, "n_threads": args.threads, "n_gpu_layers_draft": args.gpu_layers}
    plain = Speculator(target, n_ctx=args.ctx, n_threads=args.threads)
    specs = [Speculator(target, path, **options) for path in args.drafts]
    arms = [(-1, 0, plain)]
    for index, spec in enumerate(specs):
        widest = Model.header(args.drafts[index]).info.block_size - 1
        arms += [(index, n_max, spec) for n_max in args.n_max if n_max <= widest]
    for row in tqdm(records.read_prompts(args.prompts), file=sys.stderr):
        for index, n_max, spec in arms:
            spec.reset()
            stats = spec.run(messages=row["text"], max_tokens=args.tokens, n_max=n_max or None).stats.to_dict()
            path = args.drafts[index] if index >= 0 else None
            arm = {"draft": path.name if path else "", "bytes": path.stat().st_size if path else 0, "n_max": n_max}
            prompt = {"prompt": row["prompt"], "kind": row["kind"]}
            yield {"record": "draft", **arm, **prompt, **{key: stats[key] for key in KEYS}}


def table(rows: Sequence[Record]) -> str:
    """A line for each draft and n_max."""
    arms: dict[tuple[str, int], list[Record]] = {}
    for row in rows:
        if row["record"] == "draft":
            arms.setdefault((row["draft"], row["n_max"]), []).append(row)
    plain = arms.pop(("", 0))
    longest = max(len(name) for name, _ in arms)
    head = ("MB", "tok/s", "x plain", "x first", "accept", "mean_len", "ms/round", *KINDS)
    lines = [f"{'draft':{longest}} {'n_max':>5} " + " ".join(f"{name:>8}" for name in head)]
    lines.append(f"{'plain':{longest}} {'':>5} {'':>8} {speed(plain):8.1f}")
    first: dict[int, float] = {}
    for (name, n_max), runs in arms.items():
        base = first.setdefault(n_max, speed(runs))
        figures = [f"{runs[0]['bytes'] / 1e6:8.1f}", f"{speed(runs):8.1f}"]
        figures += [f"{speed(runs) / speed(plain):8.2f}", f"{speed(runs) / base:8.2f}"]
        figures += [
            f"{total(runs, 'draft_n_accepted') / max(1, total(runs, 'draft_n')):8.3f}",
            f"{mean_len(runs):8.3f}",
        ]
        figures.append(f"{total(runs, 'predicted_ms') / n_rounds(runs):8.2f}")
        for kind in KINDS:
            mine = [row for row in runs if row["kind"] == kind]
            figures.append(f"{mean_len(mine):8.2f}" if mine else f"{'-':>8}")
        lines.append(f"{name:{longest}} {n_max:5} " + " ".join(figures))
    return "\n".join(lines)
