"""What the commands share: output that any locale can take, and log lines on stderr."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from typing import Any

PROGRAM = "pyllama-dflash"


def utf8(argument: str) -> str:
    """Read an argument as UTF-8, whatever the locale: where that is ASCII, Python hands its bytes on as surrogates."""
    return os.fsencode(argument).decode("utf-8", "surrogateescape")


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
    """Send log lines to stderr: the package's own from warnings on (0), all from info (1), all (2)."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"{PROGRAM}: %(levelname)s: %(message)s"))
    package = logging.getLogger("pyllama_dflash")
    if verbosity:
        package.setLevel(logging.INFO if verbosity == 1 else logging.DEBUG)
        package.addHandler(handler)
        return
    for name, level in (("model", logging.WARNING), ("models", logging.INFO)):
        package.getChild(name).addHandler(handler)
        package.getChild(name).setLevel(level)


def say(text: str) -> None:
    """Write a line to stderr, if there is one: print() would write to stdout for None."""
    if sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Write a JSON object to stdout: one line, in ASCII."""
    print(json.dumps(value))


def print_table(rows: list[tuple[str, Any]]) -> None:
    """Write names and values in two columns to stdout."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
