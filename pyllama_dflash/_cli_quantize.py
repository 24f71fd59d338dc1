"""The quantize command: write a draft's weights in smaller types."""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from typing import Any

from . import _cli_common as common
from ._cli_options import described
from ._cli_progress import Progress
from ._fit import gib
from .quantizing import QuantizedTensor, QuantizeResult, quantize
from .recipes import RECIPES, block_of
from .tensors import counted

EXAMPLES = "\n".join(
    [
        "recipes (those with * take targets, too):",
        *(f"  {name + ('*' if recipe.target else ''):<10} {recipe.help}" for name, recipe in RECIPES.items()),
        "In all of them convolution projections and selector_hidden are q8_0, norms and convolution bases f32.",
        "K-quants (q2_K, q4_K, q6_K) need rows of a multiple of 256 weights; tensors whose rows do not fit become q4_0",
        "for q2_K, q5_0 for q4_K, q8_0 for q6_K, and are listed.",
        "",
        "examples:",
        "  pyllama-dflash quantize draft-f16.gguf draft-q4.gguf --recipe q4-mix",
        "  pyllama-dflash quantize draft-f16.gguf draft-q2.gguf --recipe q2 --strict --force",
    ]
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of quantize."""
    parser.add_argument("source", metavar="IN", help="a DFlash or DFlash2 draft, or a target; best in F16")
    common.add_out(parser)
    parser.add_argument("--recipe", required=True, choices=RECIPES, help="what becomes of each part, see below")
    parser.add_argument("--strict", action="store_true", help="refuse if the rows of any tensor do not fit its type")
    parser.add_argument("-t", "--threads", dest="n_threads", type=int, metavar="X", **described("n_threads"))
    common.add_log(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Quantise a file; a table to stdout, progress to stderr if that is a terminal."""
    common.show_logs(args.verbose)
    options = {"n_threads": args.n_threads, "overwrite": args.force, "strict": args.strict}
    with Progress("quantising") as progress:
        result = quantize(args.source, args.out, args.recipe, progress=progress, **options)
    if args.json:
        common.print_json(result.to_dict())
        return 0
    common.print_table(_rows(result))
    for line in _fallback_lines(result.fallbacks):
        print(line)
    return 0


def _rows(result: QuantizeResult) -> list[tuple[str, Any]]:
    size, source = gib(result.n_bytes), gib(result.n_bytes_source)
    return [
        ("file", result.path),
        ("recipe", f"{result.recipe}: {RECIPES[result.recipe].help}"),
        ("size", f"{size}, {result.bits_per_weight:.2f} bits a weight; source {source}"),
        ("tensor types", counted(tensor.type for tensor in result.tensors)),
        ("fallbacks", len(result.fallbacks) or "none"),
    ]


def _fallback_lines(fallbacks: tuple[QuantizedTensor, ...]) -> list[str]:
    """Say what did not fit, a line for all layers of a kind."""
    alike: dict[tuple[str, int, str, str], int] = defaultdict(int)
    for tensor in fallbacks:
        name = re.sub(r"^blk\.\d+\.", "blk.*.", tensor.name)
        alike[name, tensor.shape[-1], tensor.wanted, tensor.type] += 1
    lines = []
    for (name, row, wanted, kind), n in alike.items():
        layers = f" ({n} layers)" if n > 1 else ""
        lines.append(f"  {name}{layers}: {kind} for {wanted}, rows of {row} are no multiple of {block_of(wanted)}")
    return lines
