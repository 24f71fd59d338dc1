"""Run the benchmarks as a user does, in small; and let the tests import them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # last: the package is the installed one


def bench(*arguments: Any, **environment: str) -> tuple[int, str, str]:
    """Exit status and both outputs of `python -m bench`."""
    from bench.gpu import process

    command = [sys.executable, "-m", "bench", *map(str, arguments)]
    env = process.environment(**environment)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout, done.stderr


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
