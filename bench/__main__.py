"""python -m bench COMMAND: measure into JSON lines, or print the table of such a file."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from pyllama_dflash import demo_pair

from . import paired, records


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser("upstream", help="our loop against upstream's own and plain decoding")
    run.add_argument("--target", type=Path, help="GGUF file; default: the demo pair's")
    run.add_argument("--draft", type=Path)
    run.add_argument("--n-max", type=int, nargs="+", default=[7], metavar="N")
    run.add_argument("--tokens", type=int, default=128, help="to generate for each prompt (default %(default)s)")
    run.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    run.add_argument("--ctx", type=int, default=2048)
    run.add_argument("--repeats", type=int, default=1)
    run.add_argument("--out", type=Path, default=Path("build/bench/upstream.jsonl"))
    show = commands.add_parser("table", help="the table of a file measured before")
    show.add_argument("file", type=Path)
    return top


def main() -> int:
    args = parser().parse_args()
    if args.command == "upstream":
        pair = (args.target, args.draft) if args.target and args.draft else tuple(map(Path, demo_pair()))
        args.out.unlink(missing_ok=True)
        rows = paired.measure(*pair, args.n_max, args.tokens, args.threads, args.ctx, args.repeats)
        records.write(args.out, rows)
        print(f"records: {args.out}", file=sys.stderr)
    print(paired.table(records.read(args.out if args.command == "upstream" else args.file)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
