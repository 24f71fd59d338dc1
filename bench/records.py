"""JSON lines with provenance: what was measured, on what, from which source. Tables and plots read these files only."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pyllama_dflash import build

HERE = Path(__file__).resolve().parent
Record = dict[str, Any]


def read_prompts(path: Path = HERE / "prompts.jsonl") -> list[Record]:
    """Prompts as {"kind", "text"}, one user message each."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def sha256(path: str | os.PathLike[str]) -> str:
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def commit() -> str:
    """The checkout's commit, "+" if files differ from it."""
    git = ["git", "-C", str(HERE)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    edits = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=False)
    return head.stdout.strip() + ("+" if edits.stdout.strip() else "")


def provenance(**models: str | os.PathLike[str] | None) -> Record:
    """Facts that a reader needs to judge or repeat a measurement."""
    return {
        "record": "provenance",
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "build": build.build_info(),
        "cpu": cpu_name(),
        "n_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "models": {name: {"file": Path(p).name, "sha256": sha256(p)} for name, p in models.items() if p},
    }


def write(path: Path, records: Iterable[Record]) -> None:
    """Append records, each on disk before the next is measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
            file.flush()


def read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
