"""What long commands show of their progress: on a terminal, and nowhere else."""

from __future__ import annotations

import io
import sys

import pytest

from pyllama_dflash._cli_progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is on stderr after a hundred steps."""
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress("working") as progress:
        for n_done in range(1, 101):
            progress(n_done * 1000, 100_000)
    return stream.getvalue()


def test_lines_without_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    lines = [f"working: {tenth * 10}%" for tenth in range(1, 11)]
    assert shown(Terminal(), monkeypatch).splitlines() == lines


def test_a_bar_with_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    text = shown(Terminal(), monkeypatch)
    assert "working:" in text
    assert "\n" not in text  # the bar goes when it is done


def test_nothing_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(io.StringIO(), monkeypatch) == ""
