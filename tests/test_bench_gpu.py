"""`python -m bench gpu`, run in small on the CPU: libraries that load or do not, tests that are skipped, rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benching import ROOT, bench, records

import pyllama_dflash as pd
from bench.gpu import process, report, suite
from pyllama_dflash._files import find_library


@pytest.mark.skipif(any(device.is_gpu for device in pd.devices()), reason="what a machine without a GPU says")
def test_gpu_skips_its_tests_measures_rounds_and_goes_on_after_a_library_that_does_not_load(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    bad = tmp_path / "bad.so"
    bad.write_text("no library")
    target, draft = pair
    small = ["--prompts", 1, "--tokens", 8, "--threads", 1, "--ctx", 1024, "--target", target, "--draft", draft]
    libraries = ["--library", f"bad={bad}", "--library", f"now={find_library()}"]
    tests = ["--graphs", "off", "--tests", ROOT / "tests/test_gpu.py"]
    code, out, err = bench("gpu", "--out", tmp_path / "out", *libraries, *tests, *small)
    assert code == 1, err  # something failed
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["gpu.jsonl"]
    rows = records(tmp_path / "out/gpu.jsonl")
    assert [(row["library"], row["what"]) for row in rows if row["record"] == "failed"] == [("bad", "load")]
    outcomes = {row["outcome"] for row in rows if row["record"] == "test"}
    assert outcomes == {"skipped"}
    runs = [row for row in rows if row["record"] == "run"]
    assert {(row["loop"], row["library"], row["graphs"]) for row in runs} == {
        (loop, "now", "off") for loop in ("plain", "ours")
    }
    line = next(line.split() for line in out.splitlines() if line.startswith("now "))
    assert line[:3] == ["now", "off", "0"]
    assert int(line[4]) == suite.count(rows, "skipped") > 0
    assert line[-1] == "-"
    assert "failed: bad: load: exit status 1" in out
    assert bench("table", tmp_path / "out/gpu.jsonl")[1] == out


def test_a_table_needs_no_library(tmp_path: Path) -> None:
    row = {"record": "failed", "what": "load", "reason": "gone", "tail": "", "library": "one", "seconds": 1.0}
    file = tmp_path / "gpu.jsonl"
    file.write_text(json.dumps(row) + "\n", encoding="utf-8")
    _, out, err = bench("table", file, PYLLAMA_DFLASH_LIBRARY=str(tmp_path / "none.so"))
    assert "failed: one: load: gone" in out, err


def test_a_junit_report_becomes_a_record_for_each_test() -> None:
    text = """<testsuites><testsuite>
        <testcase classname="tests.a" name="good" time="1.5" />
        <testcase classname="tests.a" name="bad" time="2"><failure message="assert 1 == 2">a.py:3</failure></testcase>
        <testcase classname="tests.a" name="none" time="0"><skipped message="no GPU" /></testcase>
        <testcase classname="tests.b" name="broken"><error message="no module" /></testcase>
    </testsuite></testsuites>"""
    rows = list(suite.parse(text))
    assert [row["outcome"] for row in rows] == ["passed", "failed", "skipped", "error"]
    assert rows[1]["test"] == "tests.a::bad"
    assert rows[1]["message"] == "assert 1 == 2\na.py:3"
    assert (rows[0]["seconds"], suite.count(rows, "failed", "error")) == (1.5, 2)
    assert report.failures([{**row, "library": "x", "graphs": "on"} for row in rows]) == [
        "failed: x, graphs on: tests.a::bad: assert 1 == 2",
        "error: x, graphs on: tests.b::broken: no module",
    ]


def test_tests_that_could_not_run_are_a_failure(tmp_path: Path) -> None:
    rows = list(suite.run([str(tmp_path / "none")], process.environment(), 60))
    assert [row["record"] for row in rows] == ["failed"]
    assert "none" in rows[0]["tail"]


def test_a_program_is_ended_with_its_children_when_its_time_is_up(tmp_path: Path) -> None:
    code = "import subprocess, sys; print('started', flush=True); subprocess.run(['sleep', '60'])"
    ended = process.run(process.python("-c", code), process.environment(), 1.5)
    assert (ended.code, ended.tail) == (None, "started\n")
    assert ended.seconds < 20
    assert "stopped after" in ended.reason


def test_what_cannot_be_measured_is_one_line_and_earlier_records_stay(tmp_path: Path) -> None:
    out, trace = tmp_path / "out.jsonl", tmp_path / "trace.json"
    trace.write_text("[1]")
    gone = tmp_path / "gone"
    commands: list[list[object]] = [
        ["sass", gone, "--out", out],
        ["sass", gone, "--out", out, "--trace", trace],
        ["kernels", "--target", gone, "--draft", gone, "--out", out],
    ]
    for command in commands:
        out.write_text("earlier\n")
        code, _, err = bench(*command)
        assert code == 1
        assert err.startswith(f"python -m bench {command[0]}: error: ")
        assert "Traceback" not in err
        assert out.read_text() == "earlier\n"


@pytest.mark.parametrize(
    ("text", "reason"), [("", "holds no records"), ("{}\n", "holds no records"), ('{"record":', ":1 is no JSON")]
)
def test_a_table_of_no_records_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text(text)
    code, _, err = bench("table", file)
    assert (code, err.count("\n")) == (1, 1)
    assert reason in err
