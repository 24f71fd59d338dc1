"""The batch command's files and command lines."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from shell import COMMAND
from tiny import Draft, Files, Target

from pyllama_dflash.__main__ import main

Pair = tuple[Path, Path]
SMALL = ("-c", "256", "-t", "1", "--ignore-eos")
PROMPTS = [{"prompt": "the owl"}, {"messages": "a cat", "id": 7, "max_tokens": 5}, {"prompt": [3, 1, 4], "n_max": 2}]


def exact_pair(files: Files) -> Pair:
    """A target and a draft of a type whose products are the same however many rows come together."""
    return files.path(Target(weights="Q8_0")), files.path(Draft(weights="Q8_0"))


def written(folder: Path, lines: list[Any], name: str = "in.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(line if isinstance(line, str) else f"{json.dumps(line)}\n" for line in lines))
    return path


def command(pair: Pair, source: Path | str, out: Path | str, *args: Any) -> tuple[Any, ...]:
    return ("batch", source, "-o", out, "-m", pair[0], "-md", pair[1], *SMALL, "-n", "12", *args)


def here(*args: Any) -> int:
    """The exit code of a command that runs in this process, for its models are soon open."""
    return main([str(word) for word in args])


def state(out: Path) -> Path:
    return out.with_name(f"{out.name}.state")


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text("ascii").splitlines()]


def cut(pair: Pair, source: Path, out: Path, n_bytes: int) -> bytes:
    """Leave what a killed command would have, with n_bytes of its output; return what it would have written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pyllama_dflash._batch.Output.finish", lambda self: None)
        assert here(*command(pair, source, out)) in (0, 1)
    whole = out.read_bytes()
    os.truncate(out, n_bytes)
    return whole


def long(folder: Path, n: int = 160) -> Path:
    words = ("the owl", "a cat and", "in the sun", "an end")
    lines = [{"prompt": f"{words[i % 4]} {i}", "id": f"é{i}", "max_tokens": 20 + i * 7 % 30} for i in range(n)]
    return written(folder, [*lines[: n // 2], "not JSON\n", *lines[n // 2 :]], "long.jsonl")


def started(*args: Any, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([*COMMAND, *map(str, args)], stderr=subprocess.PIPE, encoding="utf-8", **options)


def wait_for_lines(process: subprocess.Popen[str], out: Path, n_bytes: int) -> None:
    while process.poll() is None and not (out.exists() and out.stat().st_size > n_bytes):
        time.sleep(0.0005)
