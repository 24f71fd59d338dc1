"""The info and version commands: what a GGUF is, and what this build is."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from . import _cli_common as common
from . import _cli_options
from .build import build_info, devices
from .inspection import OPTIONS, inspect

INFO_EXAMPLES = """examples:
  pyllama-dflash info draft.gguf -c 32768
  pyllama-dflash info draft.gguf --target target.gguf   # do the two belong together?
  pyllama-dflash info target.gguf --draft draft.gguf -c 32768 -ctk q8_0 -ctv q8_0   # what would they take?
"""


def add_info_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of info."""
    parser.add_argument("file", help="a GGUF file; only its header is read")
    parser.add_argument("--target", help="say whether FILE is a draft for this target; exit code 1 if not")
    parser.add_argument("--draft", help="say whether this is a draft for FILE; exit code 1 if not")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.add_argument_group("options that the memory needed is estimated for")
    _cli_options.add_options(options, OPTIONS)


def info(args: argparse.Namespace) -> int:
    """Describe a GGUF. Returns 1 if it does not belong to the file that was named beside it."""
    options = _cli_options.given(args, OPTIONS)
    facts = inspect(args.file, args.target, draft=args.draft, **options)
    if args.json:
        common.print_json(facts.to_dict())
    else:
        print(facts)
    return 1 if facts.pairs is False else 0


def add_version_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of version."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def version(args: argparse.Namespace) -> int:
    """Describe the build and the devices."""
    facts, found = build_info(), devices()
    if args.json:
        common.print_json({**facts, "devices": [asdict(device) for device in found]})
        return 0
    rows: list[tuple[str, Any]] = [(name.replace("_", " "), value) for name, value in facts.items()]
    for device in found:
        memory = f", {device.memory_total >> 20} MiB" if device.memory_total else ""
        if device.is_gpu:  # what a CPU reports as free is all that it has
            memory += f", {device.memory_free >> 20} free"
        rows.append(("device", f"{device.name}: {device.description}{memory}"))
    common.print_table(rows)
    return 0
