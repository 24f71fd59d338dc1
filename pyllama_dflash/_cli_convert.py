"""The convert command: a checkpoint in Hugging Face's layout becomes a GGUF draft."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from . import _cli_common as common
from ._cli_progress import Progress
from ._describe import KINDS, size_of
from .conversion import OUTTYPES, convert

EXAMPLES = """\
The checkpoint's folder has config.json and safetensors, by z-lab or by the speculators library. The tokenizer is the
target's, which any of its GGUF files has.

examples:
  pyllama-dflash convert Qwen3-8B-DFlash-b16 draft.gguf --target Qwen3-8B-Q4_K_M.gguf
  pyllama-dflash convert checkpoint draft.gguf --target target.gguf --outtype q8_0 --force
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of convert."""
    parser.add_argument("source", metavar="IN", help="the checkpoint's folder")
    common.add_out(parser)
    parser.add_argument("--target", required=True, metavar="GGUF", help="the model that the draft was trained for")
    parser.add_argument(
        "--outtype",
        choices=OUTTYPES,
        default="auto",
        help="type of the matrices; auto: the checkpoint's own 16-bit type, or f16 (default: auto)",
    )
    common.add_log(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Convert a checkpoint; what was written to stdout, progress to stderr if that is a terminal."""
    common.show_logs(args.verbose)
    options = {"target": args.target, "outtype": args.outtype, "overwrite": args.force}
    with Progress("converting") as progress:
        info = convert(args.source, args.out, progress=progress, **options)
    if args.json:
        common.print_json({"file": args.out, **asdict(info)})
        return 0
    rows = {"file": args.out, "kind": KINDS[info.kind], "size": size_of(info), "pairs with target": args.target}
    common.print_table(list(rows.items()))
    return 0
