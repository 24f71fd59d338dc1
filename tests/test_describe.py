"""An inspection as text."""

from __future__ import annotations

from pathlib import Path

from tiny import Draft
from wrong import changed

import pyllama_dflash as pd


def test_tables_are_aligned_and_a_name_cannot_break_them(tmp_path: Path) -> None:
    file = Draft().file()
    changed({"general.name": "two\nlines \x1b[2J"})(file)
    found = pd.inspect(file.write(tmp_path / "d.gguf"))
    names, tensors, memory = (part.splitlines() for part in str(found).split("\n\n"))
    assert found.name == "two\nlines \x1b[2J"
    assert [line for line in names if line.startswith("name")] == ["name                two\ufffdlines \ufffd[2J"]
    assert len({line.index(line[20:]) for line in names} | {20}) == 1
    assert all(line[18:20] == "  " and line[20] != " " for line in names)
    assert len({len(line) for line in tensors}) == len({len(line) for line in memory}) == 1
