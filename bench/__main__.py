"""python -m bench COMMAND: measure into JSON lines, or print the tables of such a file."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

try:
    from . import depth, drafts, many, peer, records, tables, upstream, widths
    from .gpu import kernels, matrix, report, sass, shape, shape_tables
    from .records import Record, Sizes
except ModuleNotFoundError as error:
    raise SystemExit(f"python -m bench needs {error.name}; run: pip install '.[bench,demo]'") from None


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser("round", help="our loop against plain decoding, upstream's own and xllamacpp's")
    run.add_argument("--n-max", type=int, nargs="+", default=[3, 7], metavar="N")
    run.add_argument("--tokens", type=int, default=256, help="to generate for each prompt (default %(default)s)")
    run.add_argument("--prompts", type=int, metavar="N", help="only so many, kinds mixed; default: all")
    run.add_argument("--head", type=int, default=0, metavar="N", help="count upstream's from its N-th token on; 0: all")
    for name, what in (("upstream", "with our patches"), ("upstream-pinned", "with patch 0001 only")):
        run.add_argument(f"--{name}", type=Path, metavar="PATH", help=f"a {upstream.NAME} {what}; default: build it")
    run.add_argument("--no-upstream", action="store_true", help="leave both programs out")
    run.add_argument("--no-xllamacpp", action="store_true", help="leave it out where it is installed")
    cost = commands.add_parser("widths", help="what a verify and a draft of each width cost")
    cost.add_argument("--widths", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 7, 8, 16], metavar="W")
    for command, repeats in ((run, 1), (cost, 20)):
        command.add_argument("--target", type=Path, help="GGUF file; default: the demo pair's")
        command.add_argument("--draft", type=Path)
        command.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
        command.add_argument("--ctx", type=int, default=2048)
        command.add_argument("--gpu-layers", type=int, default=-1, metavar="N", help="of target and draft; -1: all")
        command.add_argument("--repeats", type=int, default=repeats)
        command.add_argument("--out", type=Path, default=Path(f"build/bench/{command.prog.split()[-1]}.jsonl"))
    drafts.add_parser(commands)
    many.add_parser(commands)
    depth.add_parser(commands)
    matrix.add_parser(commands)
    shape.add_parser(commands)
    kernels.add_parser(commands)
    sass.add_parser(commands)
    show = commands.add_parser("table", help="the tables of a file measured before")
    show.add_argument("out", type=Path, metavar="FILE")
    for command in (run, show):
        text = "count prompts only during which other programs took no more of the CPUs than this, 0 to 1 (default 1)"
        command.add_argument("--quiet", type=float, default=1.0, metavar="SHARE", help=text)
    return top


def programs(args: argparse.Namespace) -> dict[str, Path]:
    """Upstream's programs by arm, those not given built."""
    if args.no_upstream:
        return {}
    given = ((upstream.PATCHED, args.upstream), (upstream.PINNED, args.upstream_pinned))
    return {tree.name: path or tree.program() for tree, path in given}


def measure(args: argparse.Namespace) -> Iterator[Record]:
    if args.command == "gpu":
        return matrix.measure(matrix.plan(args))
    if args.command == "shape":
        return shape.measure(shape.plan(args))
    if args.command == "drafts":
        return drafts.measure(args)
    if args.command == "many":
        return many.measure(args)
    if args.command == "depth":
        return depth.measure(args)
    if args.command == "sass":
        return sass.measure(args.library, args.arch, args.trace)
    from pyllama_dflash import demo_pair  # loads the library, which `gpu` has yet to build and `table` does without

    from . import rounds

    if bool(args.target) != bool(args.draft):
        raise SystemExit("give both --target and --draft, or neither for the demo pair")
    target, draft = (args.target, args.draft) if args.target else map(Path, demo_pair())
    if args.command == "kernels":
        return kernels.run(args, target, draft)
    sizes = Sizes(args.threads, args.ctx, args.gpu_layers)
    if args.command == "widths":
        return widths.measure(target, draft, args.widths, args.repeats, sizes)
    prompts = records.read_prompts(args.prompts)
    module = None if args.no_xllamacpp else peer.find(sizes)
    n_maxs = sorted(set(args.n_max))
    return rounds.measure(
        rounds.Plan(target, draft, n_maxs, args.tokens, args.head, args.repeats, prompts, programs(args), module, sizes)
    )


def show(rows: Sequence[Record], most: float) -> str:
    """The tables of a file, by what is in it."""
    kinds = {row.get("record") for row in rows}
    if not rows or None in kinds:
        raise ValueError("the file holds no records; give one that a command wrote")
    if "shape" in kinds:
        return shape_tables.table(rows)
    if "draft" in kinds:
        return drafts.table(rows)
    if "many" in kinds:
        return many.table(rows)
    if "depth" in kinds:
        return depth.table(rows)
    if "pass" in kinds:
        return kernels.table(rows)
    if kinds & {"library", "kernel"}:
        return sass.table(rows)
    if any("library" in row for row in rows):
        return report.table(rows)
    return tables.table(rows, most) if "run" in kinds else widths.table(rows)


def main() -> int:
    """Run a command. What is wrong with a file or an option is one line; what is wrong here is a traceback."""
    args = parser().parse_args()
    try:
        return run(args)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        reason = f"{error}" if error.filename else f"{args.out}: {error}"  # the disk is full
    except (ValueError, MemoryError, subprocess.CalledProcessError) as error:
        reason = f"{error}"
    except Exception as error:
        if type(error).__module__ not in ("pyllama_dflash.errors", "cuda"):  # loaded later, if at all
            raise
        reason = f"{error}"
    print(f"python -m bench {args.command}: error: {reason}", file=sys.stderr)
    return 1


def run(args: argparse.Namespace) -> int:
    out = args.out / args.file if args.command in ("gpu", "shape") else args.out
    if args.command != "table":
        records.write(out, measure(args))
        print(f"records: {out}", file=sys.stderr)
    found = records.read(out)
    print(show(found, getattr(args, "quiet", 1.0)))
    if args.command == "sass":
        return int(bool(sass.faults(found)))
    return int(any(row["record"] == "failed" or row.get("outcome") in ("failed", "error") for row in found))


if __name__ == "__main__":
    sys.exit(main())
