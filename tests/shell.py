"""Run the command line in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

COMMAND = [sys.executable, "-m", "pyllama_dflash"]


def cli(*args: Any, text: str | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, args)],
        input=text,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
        **options,
    )


def unread(*args: Any) -> tuple[int, str]:
    """The exit code and stderr of a command whose stdout is closed before it says anything."""
    command = [*COMMAND, *map(str, args)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
        return process.wait(timeout=60), said


def fails(code: int, *args: Any, **options: Any) -> str:
    """The one line on stderr of a command that must fail."""
    done = cli(*args, **options)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("pyllama-dflash: error: ")
    return done.stderr
