"""Where the batch command refuses to write, and states that it refuses to read: nothing there is lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from batching import PROMPTS, Pair, command, cut, exact_pair, here, state, written
from shell import fails
from tiny import Files

pytestmark = pytest.mark.usefixtures("without_logs")


@pytest.fixture
def pair(files: Files, tmp_path: Path) -> Pair:
    """Copies, which a test may lose."""
    target, draft = (tmp_path / path.name for path in exact_pair(files))
    for path, copy in zip(exact_pair(files), (target, draft)):
        copy.write_bytes(path.read_bytes())
    return target, draft


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.mark.parametrize("which", [0, 1], ids=["target", "draft"])
def test_a_model_is_no_place(pair: Pair, tmp_path: Path, which: int) -> None:
    """It is mapped into memory: a write would end the process by a signal, and the model is lost."""
    source, before = written(tmp_path, PROMPTS), pair[which].read_bytes()
    link = tmp_path / "link"
    link.symlink_to(pair[which])
    for place in (pair[which], link):
        assert f"{place} is one of the models itself" in fails(2, *command(pair, source, place, "--restart"))
    assert pair[which].read_bytes() == before
    named = pair[which].rename(tmp_path / "x.state")
    changed = (named, pair[1]) if which == 0 else (pair[0], named)
    assert "x.state is one of the models" in fails(2, *command(changed, source, tmp_path / "x", "--restart"))
    assert named.read_bytes() == before


@pytest.mark.parametrize("lines", [PROMPTS, []], ids=["prompts", "none"])
def test_the_input_is_no_state(pair: Pair, tmp_path: Path, out: Path, lines: list[object]) -> None:
    source = written(tmp_path, lines, f"{out.name}.state")
    before = source.read_bytes()
    assert f"{source} is the input itself" in fails(2, *command(pair, source, out, "--restart"))
    assert (source.read_bytes(), out.exists()) == (before, False)


def test_a_state_that_is_no_file(pair: Pair, tmp_path: Path, out: Path) -> None:
    """Reading from a FIFO that nobody writes to would never end."""
    source = written(tmp_path, PROMPTS)
    os.mkfifo(state(out))
    assert f"{state(out)} is there and is no file" in fails(1, *command(pair, source, out))
    state(out).unlink()
    state(out).mkdir()
    assert f"{state(out)} is a directory" in fails(1, *command(pair, source, out))
    assert not out.exists()


@pytest.mark.parametrize("rest", [b"\0\0\0", b'"a": }', b'"a": ' + b"[" * 100_000, b'"a": "\xff"}'], ids=len)
def test_a_damaged_state(pair: Pair, tmp_path: Path, out: Path, rest: bytes) -> None:
    source = written(tmp_path, PROMPTS)
    whole = cut(pair, source, out, 150)
    begun = out.read_bytes()
    damaged = state(out).read_bytes().split(b"1, ")[0] + b"1, " + rest + b"\n"
    state(out).write_bytes(damaged)
    message = f"{state(out)} is damaged; give another path, or --restart to begin anew"
    assert message in fails(2, *command(pair, source, out))
    assert (out.read_bytes(), state(out).read_bytes()) == (begun, damaged)
    assert here(*command(pair, source, out, "--restart")) == 0
    assert (out.read_bytes(), state(out).exists()) == (whole, False)
