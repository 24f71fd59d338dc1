"""The tests that need a GPU, run by pytest in a process of its own, as records."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from ..records import Record
from . import process
from .builds import failed

OUTCOMES = {"failure": "failed", "error": "error", "skipped": "skipped"}
MESSAGE = 2000  # characters
# Other programs' plugins may warn, and here a warning is an error.
QUIET = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def run(paths: Sequence[str], environment: Mapping[str, str], limit_s: float) -> Iterator[Record]:
    """Yield a record for each test, and one that says why if pytest could not finish or found none."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-v", "-m", "gpu", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
        command = process.python("-m", "pytest", *options, f"--junit-xml={report}", *paths)
        ended = process.run(command, {**environment, **QUIET}, limit_s)
        rows = list(parse(report.read_text(encoding="utf-8"))) if report.exists() else []
    yield from rows
    if ended.code not in (0, 1) or not rows:
        yield failed("tests", ended)


def parse(text: str) -> Iterator[Record]:
    """Yield a record for each test of a junit report: its id, outcome, time in s, and why it did not pass."""
    root = ElementTree.fromstring(text)  # noqa: S314 - our own pytest wrote it a moment ago
    for case in root.iter("testcase"):
        row = {"record": "test", "test": f"{case.get('classname')}::{case.get('name')}"}
        row |= {"outcome": "passed", "seconds": float(case.get("time", 0)), "message": ""}
        for child in case:
            if child.tag in OUTCOMES:
                text = f"{child.get('message', '')}\n{child.text or ''}".strip()
                row |= {"outcome": OUTCOMES[child.tag], "message": text[-MESSAGE:]}
        yield row


def count(rows: Sequence[Record], *outcomes: str) -> int:
    return sum(row["record"] == "test" and row["outcome"] in outcomes for row in rows)
