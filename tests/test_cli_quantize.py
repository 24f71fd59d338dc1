"""The quantize command: its table, its one line for each error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shell import cli, fails
from tiny import Draft, Files, Target

import pyllama_dflash as pd


@pytest.fixture
def narrow(files: Files) -> Path:
    return files.path(Draft(weights="F16"))


def test_table(narrow: Path, alone: Path) -> None:
    done = cli("quantize", narrow, alone / "q.gguf", "--recipe", "q4-k-m")
    assert (done.returncode, done.stderr) == (0, "")
    rows = dict(line.split("  ", 1) for line in done.stdout.splitlines() if not line.startswith(" "))
    with pd.Model.header(alone / "q.gguf") as model:
        assert rows["tensor types"].strip() == model.tensor_types
    assert rows["recipe"].strip().startswith("q4-k-m: ")
    assert f"{(alone / 'q.gguf').stat().st_size / (1 << 20):.1f} MiB, " in rows["size"]
    n_fallbacks = int(rows["fallbacks"])
    lines = [line for line in done.stdout.splitlines() if line.startswith("  ")]
    assert "  blk.*.attn_q.weight (3 layers): q5_0 for q4_K, rows of 320 are no multiple of 256" in lines
    assert "  fc.weight: q8_0 for q6_K, rows of 640 are no multiple of 256" in lines
    layers = [int(line.split("(")[1].split()[0]) if "(" in line else 1 for line in lines]
    assert sum(layers) == n_fallbacks


def test_json_is_what_the_function_returns(narrow: Path, alone: Path) -> None:
    done = cli("quantize", narrow, alone / "q.gguf", "--recipe", "q4", "--json", "-t", "1")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    wanted = pd.quantize(narrow, alone / "q.gguf", "q4", overwrite=True)
    assert found == json.loads(json.dumps(wanted.to_dict()))
    assert found["types"] == wanted.types
    assert found["fallbacks"] == []


def test_errors(narrow: Path, files: Files, alone: Path) -> None:
    out = alone / "q.gguf"
    assert "IN" not in fails(2, "quantize", narrow, narrow, "--recipe", "q8", "-f")
    assert "no --strict" in fails(2, "quantize", narrow, out, "--recipe", "q2", "--strict")
    assert "--recipe='q2' is for drafts" in fails(2, "quantize", files.path(Target()), out, "--recipe", "q2")
    assert "--threads=0 is below 1" in fails(2, "quantize", narrow, out, "--recipe", "q8", "-t", "0")
    assert "no such file" in fails(1, "quantize", alone / "gone.gguf", out, "--recipe", "q8")
    out.write_text("mine")
    there = f"{out} is there already; give another path, or --force to replace it"
    assert there in fails(1, "quantize", narrow, out, "--recipe", "q8")
    assert cli("quantize", narrow, out, "--recipe", "q8", "--force").returncode == 0
    done = cli("quantize", narrow, out, "--recipe", "q3")
    assert done.returncode == 2
    assert "q2-hybrid" in done.stderr


def test_a_quantised_source_is_warned_of(files: Files, alone: Path) -> None:
    source = files.path(Draft(weights="Q4_0"))
    done = cli("quantize", source, alone / "q.gguf", "--recipe", "q4-mix")
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert done.stderr.startswith("pyllama-dflash: WARNING: ")
    assert "is quantised already (10 q4_0 are made anew)" in done.stderr
