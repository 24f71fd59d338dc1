"""Acceptance and time of a round by how much stands in the context, and by how much of it the draft sees.

The context is a conversation: turns of our own prompts with the target's own replies, then the prompt that is measured.
A deeper one begins with all of a shallower one, so that what they share is evaluated once for each n_ctx_draft; arms
take turns prompt by prompt.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from . import records
from .records import Record, Sizes
from .tables import mean_len, n_rounds, speed, total

if TYPE_CHECKING:  # a file of records can be read where there is no library
    from pyllama_dflash import Model, Speculator

KEYS = ("predicted_n", "predicted_ms", "draft_n", "draft_n_accepted", "n_rounds", "t_draft_ms", "t_verify_ms")
TURN = 160  # most tokens of an earlier reply
# The same prompts give other replies with each of these, as one round of them is shorter than a long context.
ENDINGS = ("", " Answer in a few sentences.", " Explain it to a child.", " Give your answer as a letter to a friend.")
RING = 256  # the draft's cache is a multiple of so many tokens: what is left of it is how far one can go back unharmed


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = commands.add_parser("depth", help="acceptance and time of a round by tokens in the context and n_ctx_draft")
    run.add_argument("--target", type=Path, help="GGUF file; default: the demo's")
    run.add_argument("--draft", type=Path, help="GGUF file; default: the demo's")
    run.add_argument("--depths", type=int, nargs="+", default=[128, 1024, 4096, 8000], metavar="N", help="most tokens")
    run.add_argument("--n-max", type=int, nargs="+", default=[3, 5, 7], metavar="N")
    run.add_argument("--n-ctx-draft", type=int, nargs="+", default=[0, 1024, 8192], metavar="N", help="0: as trained")
    run.add_argument("--tokens", type=int, default=96, help="to generate for each prompt (default %(default)s)")
    run.add_argument("--prompts", type=int, default=7, metavar="N", help="kinds mixed (default %(default)s)")
    run.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    run.add_argument("--gpu-layers", type=int, default=-1, metavar="N", help="of target and draft; -1: all")
    run.add_argument("--out", type=Path, default=Path("build/bench/depth.jsonl"))


def check(args: argparse.Namespace, target: Model, block_size: int, last: Sequence[Record]) -> None:
    """ValueError if a depth is beyond the target's training, or going back to a prompt would cost part of a window."""
    longest, trained = max(args.depths) + args.tokens, target.info.n_ctx_train
    if longest > trained:
        raise ValueError(f"{longest} tokens are more than the {trained} of the target's training; lower --depths")
    lengths = [len(tokens_of(target, [], row["text"])) for row in last]
    if min(args.depths) < max(lengths):
        raise ValueError(f"--depths {min(args.depths)} is less than the {max(lengths)} tokens of a prompt; raise it")
    back = args.tokens + block_size + max(lengths) - min(lengths)  # from the end of a reply to a shorter prompt's
    for window in args.n_ctx_draft:
        room = -(window + block_size) % RING
        if window and room < back:
            fix = f"give a multiple of {RING}" if window % RING else "lower --tokens"
            raise ValueError(f"--n-ctx-draft {window} leaves {room} tokens to go back of the {back} needed; {fix}")


def measure(args: argparse.Namespace) -> Iterator[Record]:
    """Yield provenance, then a record of each depth, prompt, n_ctx_draft and n_max, plain decoding first."""
    from pyllama_dflash import Model, Speculator, demo_pair

    if bool(args.target) != bool(args.draft):
        raise SystemExit("give both --target and --draft, or neither for the demo pair")
    files = [args.target, args.draft] if args.target else [Path(path) for path in demo_pair()]
    target, draft = (Model(path, n_gpu_layers=args.gpu_layers) for path in files)
    last = records.read_prompts(args.prompts)
    check(args, target, draft.info.block_size, last)
    sizes = Sizes(args.threads, max(args.depths) + args.tokens, args.gpu_layers)
    yield records.provenance(dict(zip(("target", "draft"), files)), tokens=args.tokens, **vars(sizes))
    options = {"n_ctx": sizes.n_ctx, "n_threads": sizes.n_threads}
    specs = {window: Speculator(target, draft, n_ctx_draft=window, **options) for window in args.n_ctx_draft}
    talks = conversations(specs[args.n_ctx_draft[0]], last, sorted(set(args.depths)))
    n_maxs = [n_max for n_max in args.n_max if n_max < draft.info.block_size]
    arms = [(0, 0, Speculator(target, **options))]
    arms += [(window, n_max, spec) for window, spec in specs.items() for n_max in n_maxs]
    for (depth, talk), row in tqdm(list(itertools.product(talks.items(), last)), file=sys.stderr):
        ids = tokens_of(target, talk, row["text"])
        said: tuple[int, ...] = ()
        for window, n_max, spec in arms:
            spec.run(ids, max_tokens=0)
            others = records.Others()
            result = spec.run(ids, max_tokens=args.tokens, n_max=n_max or None)
            said = said or result.tokens
            stats = result.stats.to_dict()
            arm = {"depth": depth, "n_ctx_draft": window, "n_max": n_max, "n_prompt": len(ids)}
            prompt = {"prompt": row["prompt"], "kind": row["kind"], "same": said == result.tokens}
            figures = {"others": others.share(), **{key: stats[key] for key in KEYS}}
            yield {"record": "depth", **arm, **prompt, **figures, "text": "" if n_max else result.text}


# what stands in the context -------------------------------------------------------------------------------------------

Talk = list[Record]  # messages


def tokens_of(target: Model, talk: Talk, text: str) -> list[int]:
    """Ids of a conversation and a user's message after it."""
    prompt = target.apply_chat_template([*talk, {"role": "user", "content": text}])
    ids = target.tokenize(prompt, add_special=False)
    bos = target.info.bos
    return [bos, *ids] if target.info.add_bos and bos is not None and ids[:1] != [bos] else ids


def conversations(spec: Speculator, last: Sequence[Record], depths: Sequence[int]) -> dict[int, Talk]:
    """Whole turns for each depth, as many as leave room for the longest of the last prompts.

    ValueError: there are no more turns.
    """
    longest = max((row["text"] for row in last), key=lambda text: len(tokens_of(spec.target, [], text)))
    turns, talk, found = earlier_turns(spec, last), Talk(), {}
    turn = next(turns, [])
    for depth in depths:
        while turn and len(tokens_of(spec.target, [*talk, *turn], longest)) <= depth:
            talk = [*talk, *turn]
            turn = next(turns, [])
        if not turn:
            n = len(tokens_of(spec.target, talk, longest))
            raise ValueError(f"the turns that prompts.jsonl makes end at {n} tokens, before --depths {depth}; lower it")
        found[depth] = talk
    return found


def earlier_turns(spec: Speculator, last: Sequence[Record]) -> Iterator[Talk]:
    """Each prompt that is not one of the last, kinds in turn, with the target's reply to it alone."""
    taken = {row["prompt"] for row in last}
    seen: dict[str, int] = {}
    rows = []
    for row in records.read_prompts():
        if row["prompt"] not in taken:
            seen[row["kind"]] = seen.get(row["kind"], 0) + 1
            rows.append((seen[row["kind"]], row["text"]))
    rows.sort(key=lambda row: row[0])
    for ending, (_, text) in itertools.product(ENDINGS, rows):
        reply = spec.run(messages=text + ending, max_tokens=TURN).text
        yield [{"role": "user", "content": text + ending}, {"role": "assistant", "content": reply}]


# the table ------------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Record]) -> str:
    """A line for each arm. "x plain": speed to plain decoding's there; "x first": ms/round to the first depth's."""
    arms: dict[tuple[int, int, int], list[Record]] = {}
    for row in rows:
        if row["record"] == "depth":
            arms.setdefault((row["depth"], row["n_ctx_draft"], row["n_max"]), []).append(row)
    names = ("accept", "mean_len", "x plain", "ms/round", "x first", "draft ms", "same", "others")
    lines = [f"{'depth':>6} {'tokens':>6} {'n_ctx_draft':>11} {'n_max':>5} " + " ".join(f"{n:>8}" for n in names)]
    first: dict[tuple[int, int], float] = {}
    for (depth, window, n_max), runs in arms.items():
        ms = total(runs, "predicted_ms") / n_rounds(runs)
        base = first.setdefault((window, n_max), ms)
        lengths, drafting = [" " * 8] * 3, " " * 8
        if n_max:
            accepted = total(runs, "draft_n_accepted") / max(1, total(runs, "draft_n"))
            plain = speed(arms[depth, 0, 0])
            lengths = [f"{accepted:8.3f}", f"{mean_len(runs):8.3f}", f"{speed(runs) / plain:8.2f}"]
            drafting = f"{total(runs, 't_draft_ms') / n_rounds(runs):8.2f}"
        times = [f"{ms:8.2f}", f"{ms / base:8.2f}", drafting]
        counts = [f"{total(runs, 'same'):.0f}/{len(runs)}".rjust(8), f"{total(runs, 'others') / len(runs):8.0%}"]
        arm = f"{window or 'trained':>11} {n_max:5}" if n_max else f"{'plain':>11} {'':5}"
        tokens = total(runs, "n_prompt") / len(runs)
        lines.append(f"{depth:6} {tokens:6.0f} {arm} " + " ".join([*lengths, *times, *counts]))
    return "\n".join(lines)
