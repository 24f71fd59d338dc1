"""Run Python in a process of its own, where a crash, a hang or an exit is an outcome like any other."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def arguments(code: str, *args: Any) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]


def python(code: str, *args: Any, timeout: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run code with sys.argv[1:] = args in the folder of the tests, so that it may import what they share."""
    options = {"cwd": FOLDER, "capture_output": True, "text": True, "check": False, **options}
    return subprocess.run(arguments(code, *args), timeout=timeout, **options)


def output(code: str, *args: Any, **options: Any) -> str:
    """What it prints; it must end well and say nothing on stderr."""
    done = python(code, *args, **options)
    assert (done.returncode, done.stderr) == (0, ""), (done.returncode, done.stderr[-2000:])
    return done.stdout
