"""A pair of random weights in the shape of a real one: what a round costs, where acceptance has to be assumed.

Random weights cost what trained ones do, but a draft of them is never right. So speeds at a mean_len are of two kinds:
a round as measured, ours or upstream's, times an assumed mean_len; and rounds with acceptance given by hand.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..records import Record, Sizes

LEAST_PROMPT = 32  # tokens


@dataclass(frozen=True)
class Shape:
    """Sizes of a pair; those that begin with draft_ are the draft's own.

    The defaults: Qwen3.6-27B's outline, but with attention in all of its layers (the original has it in every fourth),
    and a draft of the shape of z-lab's for it: 32 heads of 128 with 8 for keys and values and an FFN of 17408 in 5
    layers are what a file of 3,310.7 MiB in F16 comes to. Block, convolutions and selector are DFlash2's usual ones;
    the window is in all of its layers but the last.
    """

    n_layer: int = 64
    n_embd: int = 5120
    n_head: int = 24
    n_kv: int = 4
    d_head: int = 256
    n_ff: int = 17408
    n_vocab: int = 248320
    draft_layer: int = 5
    draft_head: int = 32
    draft_kv: int = 8
    draft_d_head: int = 128
    draft_ff: int = 17408
    draft_window: int = 2048
    draft_block: int = 8
    draft_taps: int = 5
    draft_rank: int = 256
    draft_top_k: int = 16
    draft_conv_taps: int = 2
    draft_conv_group: int = 16

    @property
    def target_layers(self) -> list[int]:
        """Layers whose input the draft reads: the reference's choice of outputs to read, each one further."""
        last = max(1, self.draft_taps - 1)
        return [round(1 + i * (self.n_layer - 4) / last) + 1 for i in range(self.draft_taps)]


SHAPES = {
    "27b": Shape(),
    # n_embd is at least top_k (top_k + 1), and all rows are whole K-quant blocks
    "tiny": Shape(6, 512, 8, 2, 64, 512, 1024, 2, 8, 2, 64, 512, 64, draft_taps=3, draft_rank=64),
}


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Args:
        shape: sizes of the pair.
        models: folder for its files, which are kept and used again.
        seed: of weights, prompt and counts of accepted tokens.
        n_prompt: tokens of the prompt, about.
        depth: tokens before a second series of verifies and drafts; 0: none.
        n_predict: tokens to generate.
        n_head: upstream runs for so many tokens as well, and the difference counts: a process starts cold.
        n_max: tokens drafted a round.
        mean_lens: tokens a round to be assumed.
        repeats: passes over all arms, after one to warm up.
        upstream: a llama-speculative-simple, or None.
        bandwidth: of the device's memory in GB/s; 0: unknown.
        sizes: what every arm is opened with.
    """

    shape: Shape
    models: Path
    seed: int
    n_prompt: int
    depth: int
    n_predict: int
    n_head: int
    n_max: int
    mean_lens: Sequence[float]
    repeats: int
    upstream: Path | None
    bandwidth: float
    sizes: Sizes


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = commands.add_parser("shape", help="a pair of random weights in a real one's shape: what its rounds cost")
    run.add_argument("--out", type=Path, default=Path("build/bench/shape"), metavar="DIR", help="for the records")
    run.add_argument("--file", default="shape.jsonl", help="of the records, in DIR (default %(default)s)")
    run.add_argument("--models", type=Path, default=Path("build/bench/models"), metavar="DIR", help="for the pair")
    run.add_argument("--shape", choices=SHAPES, default="27b", help="default %(default)s; single sizes by the next")
    for field in dataclasses.fields(Shape):
        run.add_argument(f"--{field.name.replace('_', '-')}", type=int, metavar="N", help=argparse.SUPPRESS)
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--prompt", type=int, default=200, metavar="N", help="its tokens (default %(default)s)")
    run.add_argument("--depth", type=int, default=0, metavar="N", help="verifies and drafts after N tokens as well")
    run.add_argument("--tokens", type=int, default=256, help="to generate (default %(default)s)")
    run.add_argument("--head", type=int, default=64, metavar="N", help="count upstream's from the N-th token on")
    run.add_argument("--n-max", type=int, default=7, metavar="N")
    run.add_argument("--mean-len", type=float, nargs="+", default=[3.6, 5.25], metavar="X", help="assumed")
    run.add_argument("--repeats", type=int, default=3)
    run.add_argument("--upstream", type=Path, metavar="PATH", help="a llama-speculative-simple; default: without")
    run.add_argument("--bandwidth", type=float, default=0.0, metavar="GB/s", help="of the device's memory")
    run.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    run.add_argument("--ctx", type=int, default=8192)
    run.add_argument("--gpu-layers", type=int, default=-1, metavar="N", help="of target and draft; -1: all")
    run.add_argument("--type-k", default="f16", help="of the target's cache (default %(default)s)")
    run.add_argument("--type-v", default="f16", help="likewise")
    run.add_argument("--flash-attn", choices=("auto", "on", "off"), default="auto")


def plan(args: argparse.Namespace) -> Plan:
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(Shape)}
    shape = dataclasses.replace(SHAPES[args.shape], **{k: v for k, v in given.items() if v is not None})
    sizes = Sizes(args.threads, args.ctx, args.gpu_layers, args.type_k, args.type_v, args.flash_attn)
    numbers = (args.seed, args.prompt, args.depth, args.tokens, args.head, args.n_max, args.mean_len, args.repeats)
    if not 1 <= min(args.mean_len) <= max(args.mean_len) <= args.n_max + 1:
        raise SystemExit(f"--mean-len {args.mean_len} is out of range, 1 to n_max + 1 = {args.n_max + 1}")
    if args.prompt < LEAST_PROMPT:
        raise SystemExit(f"--prompt {args.prompt} is below {LEAST_PROMPT}; raise it")
    return Plan(shape, args.models, *numbers, args.upstream, args.bandwidth, sizes)


def measure(plan: Plan) -> Iterator[Record]:
    """Yield the records; here are only the options, so that the command line needs neither the library nor gguf."""
    from . import passes

    return passes.measure(plan)
