"""Hand jobs to fuzz_worker.py, notice when it dies or hangs, and go on with the next job in a new process."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("fuzz_worker.py")


def outcomes(jobs: Sequence[dict[str, Any]], timeout: float = 60.0) -> Iterator[tuple[dict[str, Any], str]]:
    """Each job with its outcome: what the worker said, "signal N", "exit N" or "hang"."""
    left = list(jobs)
    while left:
        process = subprocess.Popen(
            [sys.executable, WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        lines: queue.Queue[str | None] = queue.Queue()
        threads = [
            threading.Thread(target=_feed, args=(process, list(left)), daemon=True),
            threading.Thread(target=_follow, args=(process, lines), daemon=True),
        ]
        stderr: list[str] = []
        threads.append(
            threading.Thread(target=lambda p=process, said=stderr: said.append(p.stderr.read()), daemon=True)
        )
        for thread in threads:
            thread.start()
        fault = None
        while left and fault is None:
            try:
                line = lines.get(timeout=timeout)
            except queue.Empty:
                fault = "hang"
                break
            if line is None:
                code = process.wait()
                fault = f"signal {-code}" if code < 0 else f"exit {code}"
                break
            said = json.loads(line)
            if len(said) == 2:
                yield left.pop(0), said[1]
        process.kill()
        process.wait()
        for thread in threads:
            thread.join()
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # what it did not read
                pipe.close()
        if fault is not None:
            yield left.pop(0), f"{fault}: {''.join(stderr)[-600:]}"


def _feed(process: subprocess.Popen[str], jobs: Sequence[dict[str, Any]]) -> None:
    assert process.stdin is not None
    try:
        for job in jobs:
            process.stdin.write(json.dumps(job) + "\n")
        process.stdin.close()
    except (BrokenPipeError, ValueError):
        pass


def _follow(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)
