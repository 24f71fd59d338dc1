"""python -m bench COMMAND: measure into JSON lines, or print the table of such a file."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from pyllama_dflash import demo_pair

from . import paired, records, widths


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser("upstream", help="our loop against upstream's own and plain decoding")
    run.add_argument("--n-max", type=int, nargs="+", default=[7], metavar="N")
    run.add_argument("--tokens", type=int, default=128, help="to generate for each prompt (default %(default)s)")
    cost = commands.add_parser("widths", help="what a verify and a draft of each width cost")
    cost.add_argument("--widths", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 7, 8, 16], metavar="W")
    for command, repeats in ((run, 1), (cost, 20)):
        command.add_argument("--target", type=Path, help="GGUF file; default: the demo pair's")
        command.add_argument("--draft", type=Path)
        command.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
        command.add_argument("--ctx", type=int, default=2048)
        command.add_argument("--repeats", type=int, default=repeats)
        command.add_argument("--out", type=Path, default=Path(f"build/bench/{command.prog.split()[-1]}.jsonl"))
    show = commands.add_parser("table", help="the table of a file measured before")
    show.add_argument("out", type=Path, metavar="FILE")
    return top


def main() -> int:
    args = parser().parse_args()
    if args.command != "table":
        pair = (args.target, args.draft) if args.target and args.draft else tuple(map(Path, demo_pair()))
        sizes = (args.threads, args.ctx, args.repeats)
        if args.command == "upstream":
            rows = paired.measure(*pair, args.n_max, args.tokens, *sizes)
        else:
            rows = widths.measure(*pair, args.widths, *sizes)
        args.out.unlink(missing_ok=True)
        records.write(args.out, rows)
        print(f"records: {args.out}", file=sys.stderr)
    found = records.read(args.out)
    print((widths if any(row["record"] == "width" for row in found) else paired).table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
