"""Run a program for so long at most, and keep the end of what it printed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[2]
TAIL = 3000  # characters


@dataclass(frozen=True)
class Ended:
    """How a program ended. code: None if its time was up. tail: the end of its two outputs together."""

    code: int | None
    seconds: float
    tail: str

    @property
    def reason(self) -> str:
        if self.code is None:
            return f"stopped after {self.seconds:.0f} s"
        if self.code < 0:
            return f"killed by signal {-self.code} after {self.seconds:.0f} s"
        return f"exit status {self.code}"


def run(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> Ended:
    """Run a command in the checkout, with this environment and no other; end it and its children when time is up."""
    start = perf_counter()
    with tempfile.TemporaryFile() as output:
        try:
            child = subprocess.Popen(
                command,
                cwd=ROOT,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return Ended(127, perf_counter() - start, str(error))
        try:
            code: int | None = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            _end(child)
        except BaseException:  # an interrupt: nothing of it goes on
            _end(child)
            raise
        output.seek(max(0, output.seek(0, os.SEEK_END) - 4 * TAIL))
        tail = output.read().decode("utf-8", "replace")[-TAIL:]
    return Ended(code, perf_counter() - start, tail)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a program that runs, and the rest of its own session: a worker outlives a parent that was killed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def environment(**changes: str | None) -> dict[str, str]:
    """This process's environment, the checkout first on Python's path, with changes; None takes a variable out."""
    found = dict(os.environ)
    found["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), found.get("PYTHONPATH"))))
    found |= {name: value for name, value in changes.items() if value is not None}
    return {name: value for name, value in found.items() if changes.get(name, value) is not None}


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]
