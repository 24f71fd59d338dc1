"""JSON lines with provenance: what was measured, on what, from which source. Tables and plots read these files only."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
Record = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """What every arm is opened with.

    Args:
        n_threads: CPU threads.
        n_ctx: context size in tokens.
        n_gpu_layers: layers of target and draft on the GPU; -1: all.
        type_k, type_v: of the target's cache.
        flash_attn: auto, on or off.
    """

    n_threads: int
    n_ctx: int
    n_gpu_layers: int
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: str = "auto"

    @property
    def on_gpu(self) -> bool:
        from pyllama_dflash import build  # not above: a file of records can be read where there is no library

        return self.n_gpu_layers != 0 and any(device.is_gpu for device in build.devices())


def read_prompts(n: int | None = None, path: Path = HERE / "prompts.jsonl") -> list[Record]:
    """Prompts as {"prompt": its number, "kind", "text"}, one user message each.

    Args:
        n: how many; the first of each kind, then the second of each, so that kinds stay mixed. None: all.
        path: one JSON object a line.
    """
    prompts = [{"prompt": index, **row} for index, row in enumerate(read(path))]
    seen: dict[str, int] = {}
    turns = []
    for row in prompts:
        seen[row["kind"]] = seen.get(row["kind"], 0) + 1
        turns.append((seen[row["kind"]], row["prompt"]))
    return [prompts[index] for index in sorted(index for _, index in sorted(turns)[:n])]


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
    """The checkout's commit, "+" if files differ from it; "" where the files came without their history."""
    if not shutil.which("git"):
        return ""
    git = ["git", "-C", str(HERE)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    edits = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=False)
    return head.stdout.strip() + ("+" if edits.stdout.strip() else "")


def driver() -> str:
    """The NVIDIA driver's version line, "" without one."""
    try:
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return ""


def provenance(files: Mapping[str, Path | None], **options: Any) -> Record:
    """Facts that a reader needs to judge or repeat a measurement.

    Args:
        files: models and programs that take part.
        options: what the measurement was called with.
    """
    from pyllama_dflash import build

    return {
        "record": "provenance",
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "build": build.build_info(),
        "cpu": cpu_name(),
        "n_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "devices": [f"{device.name}: {device.description}" for device in build.devices()],
        "driver": driver(),
        "options": options,
        "files": {name: {"file": path.name, "sha256": sha256(path)} for name, path in files.items() if path},
    }


class Others:
    """How much of the machine other programs took since this was made: measured times mean little if it is much."""

    def __init__(self) -> None:
        self.start = self._seconds()

    @staticmethod
    def _seconds() -> tuple[float, float, float]:
        """Time, CPU time of all programs, and of this one with the children that it waited for; all in seconds."""
        user, nice, system, _, _, *interrupts = map(
            int, Path("/proc/stat").read_text("ascii").split("\n")[0].split()[1:9]
        )
        spent = os.times()
        mine = spent.user + spent.system + spent.children_user + spent.children_system
        return spent.elapsed, sum((user, nice, system, *interrupts)) / os.sysconf("SC_CLK_TCK"), mine

    def share(self) -> float:
        """CPU time of others over that of all CPUs, 0 to 1."""
        elapsed, busy, mine = (now - then for now, then in zip(self._seconds(), self.start))
        return max(0.0, busy - mine) / max(elapsed, 0.01) / (os.cpu_count() or 1)


def write(path: Path, records: Iterable[Record]) -> None:
    """Write records, each on disk before the next is measured; an earlier file goes when there is a first one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.open("a", encoding="utf-8").close()  # a file that cannot be written is known before anything is measured
    rows = iter(records)
    first = list(itertools.islice(rows, 1))
    with path.open("w", encoding="utf-8") as file:
        for record in itertools.chain(first, rows):
            file.write(json.dumps(record) + "\n")
            file.flush()


def read(path: Path) -> list[Record]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{path}:{number} is no JSON ({error}); measure again, or remove the line") from None
    return rows
