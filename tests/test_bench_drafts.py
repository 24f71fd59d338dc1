"""`python -m bench drafts`: what its table says of rows, and a run in small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benching import bench, records
from tiny import Draft, Files

from bench import drafts


def row(draft: str, n_max: int, kind: str, ms: float, n_rounds: int, drafted: int, accepted: int) -> dict[str, Any]:
    size = {"": 0, "one.gguf": 15_700_000, "longer.gguf": 9_040_000}[draft]
    counts = {"predicted_n": 100, "predicted_ms": ms, "draft_n": drafted, "draft_n_accepted": accepted}
    times = {"n_rounds": n_rounds, "t_draft_ms": 1.0, "t_verify_ms": 1.0}
    return {"record": "draft", "draft": draft, "bytes": size, "n_max": n_max, "kind": kind, **counts, **times}


ROWS = [
    {"record": "provenance", "options": {}},
    row("", 0, "code", 1000, 100, 0, 0),
    row("one.gguf", 3, "code", 400, 25, 75, 75),
    row("one.gguf", 7, "code", 500, 40, 280, 60),
    row("longer.gguf", 3, "code", 500, 50, 150, 50),
    row("", 0, "chat", 3000, 100, 0, 0),
    row("one.gguf", 3, "chat", 600, 50, 150, 50),
    row("one.gguf", 7, "chat", 1100, 60, 420, 40),
    row("longer.gguf", 3, "chat", 1500, 80, 240, 20),
]


def test_a_table_has_a_line_for_each_draft_and_n_max() -> None:
    head, plain, *lines = [line.split() for line in drafts.table(ROWS).splitlines()]
    assert head[-7:] == list(drafts.KINDS)
    assert plain == ["plain", "50.0"]
    rest = ["-"] * 5
    # MB, tok/s, x plain, x the first draft of this n_max, accepted of drafted, tokens and ms a round, code, chat
    assert lines == [
        ["one.gguf", "3", "15.7", "200.0", "4.00", "1.00", "0.556", "2.667", "13.33", "4.00", "2.00", *rest],
        ["one.gguf", "7", "15.7", "125.0", "2.50", "1.00", "0.143", "2.000", "16.00", "2.50", "1.67", *rest],
        ["longer.gguf", "3", "9.0", "100.0", "2.00", "0.50", "0.179", "1.538", "15.38", "2.00", "1.25", *rest],
    ]


def test_columns_are_under_their_heads() -> None:
    head, _, *lines = drafts.table(ROWS).splitlines()
    assert {len(line) for line in lines} == {len(head)}
    for name in ("MB", "tok/s", "x plain", "x first", "mean_len", "ms/round", "maths"):
        end = head.index(name) + len(name)
        assert all(line[end - 1] != " " and line[end : end + 1] in ("", " ") for line in lines)


def test_drafts_are_measured_against_plain_decoding_and_short_blocks_are_left_out(files: Files, tmp_path: Path) -> None:
    target, wide = files.pair()
    narrow = files.path(Draft(reduced=True, block=5))
    out = tmp_path / "drafts.jsonl"
    small = ["--n-max", 3, 7, "--tokens", 8, "--prompts", 2, "--threads", 1, "--ctx", 1024, "--out", out]
    code, text, err = bench("drafts", wide, narrow, "--target", target, *small)
    assert code == 0, err
    first, *rows = records(out)
    assert set(first["files"]) == {"target", "draft 0", "draft 1"}
    arms = [("", 0), (wide.name, 3), (wide.name, 7), (narrow.name, 3)]
    assert [(row["draft"], row["n_max"]) for row in rows] == 2 * arms  # interleaved
    assert [row["prompt"] for row in rows] == [rows[0]["prompt"]] * 4 + [rows[4]["prompt"]] * 4
    assert all(row["predicted_n"] == 8 and row["n_rounds"] + row["draft_n_accepted"] == 8 for row in rows)
    assert [row["bytes"] for row in rows[:3]] == [0, wide.stat().st_size, wide.stat().st_size]
    assert text.strip() == drafts.table(rows)
    assert bench("table", out)[1] == text


@pytest.mark.parametrize("accepted", [0, 30])
def test_a_draft_that_drafted_nothing_has_figures(accepted: int) -> None:
    rows = [row("", 0, "code", 1000, 100, 0, 0), row("one.gguf", 3, "code", 1000, 100 - accepted, accepted, accepted)]
    figures = drafts.table(rows).splitlines()[-1].split()
    assert figures[6] == ("1.000" if accepted else "0.000")
