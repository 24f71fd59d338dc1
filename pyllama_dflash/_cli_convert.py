"""The convert command: a checkpoint in Hugging Face's layout becomes a GGUF draft."""

from __future__ import annotations

import argparse
import sys

from . import _cli_common as common
from .conversion import OUTTYPES, convert

EXAMPLES = """examples:
  pyllama-dflash convert Qwen3-8B-DFlash-b16 draft.gguf --target Qwen3-8B-Q4_K_M.gguf
  pyllama-dflash convert checkpoint draft.gguf --target target.gguf --outtype q8_0 --force

The checkpoint's folder has config.json and safetensors, by z-lab or by the speculators library. The tokenizer is the
target's, which any of its GGUF files has.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of convert."""
    parser.add_argument("source", metavar="HF_DIR", help="folder of the checkpoint")
    parser.add_argument("out", metavar="OUT", help="the GGUF file to write")
    parser.add_argument("--target", required=True, metavar="GGUF", help="the model that the draft was trained for")
    parser.add_argument(
        "--outtype",
        choices=OUTTYPES,
        default="auto",
        help="type of the matrices; auto: the checkpoint's own 16-bit type, or f16 (default: auto)",
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it is there")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="say more; again: say all")


def run(args: argparse.Namespace) -> int:
    """Convert, and say what was written."""
    common.show_logs(args.verbose)
    shown = sys.stderr is not None and sys.stderr.isatty()
    info = convert(args.source, args.out, target=args.target, outtype=args.outtype, force=args.force, progress=shown)
    kind = {"dflash": "DFlash", "dflash2": "DFlash2"}[info.kind]
    size = f"{info.n_params / 1e6:.1f} M parameters, {info.n_bytes / 1e6:.1f} MB"
    print(f"wrote {args.out}: {kind} draft, {size}; it fits {args.target}")
    return 0
