"""What the commands share: output that any locale can take, and log lines on stderr."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import sys
from typing import Any

from ._start import PROGRAM
from ._table import columns

__all__ = [
    "PROGRAM",
    "add_log",
    "add_out",
    "prepare_output",
    "print_json",
    "print_table",
    "say",
    "show_logs",
    "utf8",
]

# llama.cpp's warnings that an option is in vain.
_OF_EFFECT = ("warning: failed to mlock", "Try increasing RLIMIT_MEMLOCK")


def utf8(argument: str) -> str:
    """Read an argument as UTF-8, whatever the locale: where that is ASCII, Python hands its bytes on as surrogates."""
    return os.fsencode(argument).decode("utf-8", "surrogateescape")


def add_out(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a command that writes a GGUF."""
    parser.add_argument("out", metavar="OUT", help="the GGUF to write; there whole or not at all")
    parser.add_argument("-f", "--force", action="store_true", help="replace OUT if it is there")


def add_log(parser: Any) -> None:
    """Add the flag that show_logs() takes."""
    text = "log lines on stderr; -vv: llama.cpp's, too; -vvv: for debugging"
    parser.add_argument("-v", "--verbose", action="count", default=0, help=text)


def prepare_output() -> None:
    """Let stdout and stderr take every character: UTF-8 into files and pipes, "?" for what a terminal cannot show."""
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper):
            continue
        if stream.isatty():
            stream.reconfigure(errors="replace")
        else:
            stream.reconfigure(encoding="utf-8", errors="replace")


def show_logs(verbosity: int) -> None:
    """Send log lines to stderr.

    Args:
        verbosity: 0: warnings about options, use_mlock's by llama.cpp among them; 1: what this package says, and
            llama.cpp's warnings; 2: what llama.cpp says, too; 3: debugging lines.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"{PROGRAM}: %(levelname)s: %(message)s"))
    package = logging.getLogger("pyllama_dflash")
    if verbosity:
        package.setLevel(logging.INFO if verbosity < 3 else logging.DEBUG)
        package.getChild("llama_cpp").setLevel({1: logging.WARNING, 2: logging.INFO}.get(verbosity, logging.DEBUG))
        package.addHandler(handler)
        return
    warned = dict.fromkeys(("model", "quantizing", "conversion"), logging.WARNING)
    for name, level in {**warned, "models": logging.INFO}.items():
        package.getChild(name).addHandler(handler)
        package.getChild(name).setLevel(level)
    chosen = logging.StreamHandler()
    chosen.setFormatter(handler.formatter)
    chosen.addFilter(lambda record: record.getMessage().startswith(_OF_EFFECT))
    package.getChild("llama_cpp").addHandler(chosen)


def say(text: str) -> None:
    """Write a line to stderr, if there is one: print() would write to stdout for None."""
    if sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Write a JSON object to stdout: one line, in ASCII."""
    print(json.dumps(value))


def print_table(rows: list[tuple[str, Any]]) -> None:
    """Write names and values in two columns to stdout."""
    print(*columns([(name, str(value)) for name, value in rows], right=False), sep="\n")


def count(n: int, what: str) -> str:
    """Return a number with its noun, "1 token" or "2 tokens"."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
