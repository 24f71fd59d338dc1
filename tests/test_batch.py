"""The batch command: what it writes, and how it goes on with what is there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batching import (
    PROMPTS,
    Pair,
    command,
    cut,
    exact_pair,
    here,
    lines_of,
    state,
    written,
)
from shell import cli
from tiny import Files

import pyllama_dflash as pd
from pyllama_dflash import _cli_batch
from pyllama_dflash._fingerprint import fingerprint

pytestmark = pytest.mark.usefixtures("without_logs")


@pytest.fixture(scope="module")
def pair(files: Files) -> Pair:
    return exact_pair(files)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


class Refused:
    """As fails() of shell, in this process."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self.capfd = capfd

    def __call__(self, code: int, *args: Any) -> str:
        self.capfd.readouterr()
        assert here(*args) == code
        out, err = self.capfd.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith("pyllama-dflash: error: ")
        return err


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Refused:
    return Refused(capfd)


# what it writes -------------------------------------------------------------------------------------------------------


def test_lines_are_what_run_returns(pair: Pair, tmp_path: Path, out: Path) -> None:
    source = written(tmp_path, [PROMPTS[0], "\n", "  \r\n", *PROMPTS[1:]])
    done = cli(*command(pair, source, out, "--n-max", "5"))
    assert (done.returncode, done.stdout) == (0, "")
    (summary,) = done.stderr.splitlines()
    assert "3 prompts, 29 tokens in " in summary
    assert summary.endswith(" tok/s")
    assert not state(out).exists()
    with pd.Speculator(*pair, n_ctx=256, n_threads=1, n_max=5) as spec:
        for index, (prompt, line) in enumerate(zip(PROMPTS, lines_of(out))):
            given: dict[str, Any] = {"max_tokens": 12, **prompt}
            wanted = spec.run(ignore_eos=True, **{name: given[name] for name in given if name != "id"})
            facts = {"text": wanted.text, "n_tokens": len(wanted.tokens), "finish_reason": wanted.finish_reason}
            assert line == {"index": index, **({"id": 7} if index == 1 else {}), **facts}
    assert len(lines_of(out)) == len(PROMPTS)


@pytest.mark.parametrize("n_parallel", [1, 3])
def test_the_same_however_many_at_a_time(pair: Pair, tmp_path: Path, out: Path, n_parallel: int) -> None:
    source = written(tmp_path, [{"prompt": f"the {word}"} for word in ("owl", "cat", "sun", "end", "sea")])
    assert cli(*command(pair, source, out, "-np", n_parallel)).returncode == 0
    first = out.read_bytes()
    assert cli(*command(pair, source, out, "--restart", "-md", "", "--no-draft")).returncode == 0
    assert out.read_bytes() == first


def test_stdin_and_stdout(pair: Pair, tmp_path: Path, out: Path) -> None:
    source = written(tmp_path, PROMPTS)
    assert here(*command(pair, source, out)) == 0
    for done in (cli(*command(pair, "-", "-"), text=source.read_text()), cli(*command(pair, source, "-"))):
        assert (done.returncode, done.stdout) == (0, out.read_text())
    other = tmp_path / "other.jsonl"
    assert cli(*command(pair, "-", other), text=source.read_text()).returncode == 0
    assert other.read_bytes() == out.read_bytes()
    assert not state(other).exists()


def test_an_input_too_large_to_be_tokenized_at_once(
    pair: Pair, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, other = written(tmp_path, PROMPTS), tmp_path / "other.jsonl"
    assert here(*command(pair, source, out)) == 0
    monkeypatch.setattr(_cli_batch, "_AT_ONCE", 0)
    assert here(*command(pair, source, other)) == 0
    assert other.read_bytes() == out.read_bytes()


@pytest.mark.parametrize("text", ["", "\n\n \n"])
def test_no_prompts(pair: Pair, tmp_path: Path, out: Path, text: str) -> None:
    for source in (written(tmp_path, [text]), "-"):
        done = cli(*command(pair, source, out, "--restart"), text=text)
        assert (done.returncode, done.stdout, out.read_bytes()) == (0, "", b"")
        assert done.stderr == "there are no prompts\n"
        assert not state(out).exists()


BAD = {
    '{"prompt": "the ow': "not JSON: Unterminated string starting at: character 12",
    '{"prompt": "a", "id": NaN}': "not JSON: NaN is no JSON number",
    '{"prompt": "a", "id": [1e999]}': "'1e999' exceeds 1.8e308; give a smaller number, or a string",
    '{"prompt": "a", "id": ' + "9" * 5000 + "}": "it has an integer of too many digits; give it as a string",
    "7": "no JSON object",
    "[" * 100_000: "nested too deeply",
    '{"id": 3}': "give either prompt or messages",
    '{"prompt": "a", "messages": "b"}': "not both",
    '{"prompt": "a", "max_token": 3, "seed": 1}': "no argument 'max_token', 'seed'",
    '{"prompt": "a", "max_tokens": -1}': "max_tokens=-1 is below 0",
    '{"prompt": "a", "max_tokens": null}': "max_tokens=None is not an integer",
    '{"prompt": "a", "n_max": 8}': "n_max=8 exceeds n_max=7",
    '{"prompt": ""}': "no tokens",
    '{"prompt": [99999]}': "token 99999 at index 0",
    '{"prompt": {"a": 1}}': "not a flat sequence",
    json.dumps({"prompt": "the owl " * 300}): "n_ctx=256",
    '{"messages": 3}': "messages=3",
    '{"messages": ["a"]}': "messages",
    '{"prompt": "\\ud800"}': "lone surrogate",
}


def test_bad_lines_have_their_own_errors(pair: Pair, tmp_path: Path, out: Path) -> None:
    texts: list[Any] = [PROMPTS[0], *(f"{text}\n" for text in BAD), {**PROMPTS[0], "id": "last"}]
    source = written(tmp_path, texts)
    with source.open("ab") as file:
        file.write(b'{"prompt": "\xff"}')
    done = cli(*command(pair, source, out))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    n_bad = len(BAD) + 1
    assert f"{n_bad} of {n_bad + 2} lines have an error" in done.stderr
    found = lines_of(out)
    assert [line["index"] for line in found] == list(range(n_bad + 2))
    for line, message in zip(found[1:-2], BAD.values()):
        assert line["error"].startswith(f"line {line['index'] + 1}: ")
        assert len(line["error"]) > 10
        assert message in line["error"]
    assert found[1 + list(BAD).index('{"id": 3}')]["id"] == 3
    assert (found[-2]["id"], found[-2]["text"]) == ("last", found[0]["text"])
    assert found[-1] == {"index": n_bad + 1, "error": f"line {n_bad + 2}: it is not UTF-8 text"}


def test_errors(pair: Pair, tmp_path: Path, out: Path, refused: Refused) -> None:
    source = written(tmp_path, PROMPTS)
    before = source.read_bytes()
    assert "is the input itself" in refused(2, *command(pair, source, source))
    assert "no folder" in refused(1, *command(pair, source, tmp_path / "none" / "out.jsonl"))
    assert "is a directory" in refused(1, *command(pair, source, tmp_path))
    assert "gone.jsonl" in refused(1, *command(pair, tmp_path / "gone.jsonl", out))
    assert "gone.gguf" in refused(1, *command((tmp_path / "gone.gguf", pair[1]), source, out))
    assert "--parallel=0 is below 1; raise --parallel" in refused(2, *command(pair, source, out, "-np", "0"))
    assert "--n-predict=-1" in refused(2, *command(pair, source, out, "-n", "-1"))
    assert "--restart has no effect on stdout" in refused(2, *command(pair, source, "-", "--restart"))
    assert "give the target by -m" in refused(2, "batch", source, "-o", out)
    assert sorted(tmp_path.iterdir()) == [source]  # none of them has begun anything
    assert source.read_bytes() == before


def test_what_is_there_stays(pair: Pair, tmp_path: Path, out: Path, refused: Refused) -> None:
    source = written(tmp_path, PROMPTS)
    out.write_text("mine")
    assert f"{out} is there already" in refused(1, *command(pair, source, out))
    assert out.read_text() == "mine"
    assert not state(out).exists()
    state(out).write_text("mine, too")
    assert f"{state(out)} is there and is no state" in refused(1, *command(pair, source, out, "--restart"))
    assert (out.read_text(), state(out).read_text()) == ("mine", "mine, too")
    state(out).unlink()
    assert here(*command(pair, source, out, "--restart")) == 0
    assert len(lines_of(out)) == len(PROMPTS)


def test_what_fails_before_the_first_line_has_begun_nothing(
    pair: Pair, tmp_path: Path, out: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a smaller context, say, is no change of what is there."""
    source = written(tmp_path, PROMPTS)

    def full(*args: Any) -> None:
        raise MemoryError("does not fit; lower n_parallel or n_ctx")

    monkeypatch.setattr("pyllama_dflash._session.Session.engine_for", full)
    assert "lower --parallel or --ctx-size" in refused(1, *command(pair, source, out))
    assert list(tmp_path.iterdir()) == [source]


def test_rounds_that_fail_one_after_the_other_end_it(
    pair: Pair, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A device that is gone must not fill the output with errors; some failures between replies are told of in it."""
    source = written(tmp_path, [{"prompt": "the"}] * 12)
    run_many = pd.Speculator.run_many
    bad = {1, 2, *range(6, 12)}

    class Failing:
        def __init__(self, many: Any) -> None:
            self.many = many

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            self.many.close()

        def __iter__(self) -> Any:
            for found in self.many:
                lost = pd.ManyResult(found.index, None, pd.DecodeError("the device is gone"))
                yield lost if found.index in bad else found

    monkeypatch.setattr(pd.Speculator, "run_many", lambda *args, **options: Failing(run_many(*args, **options)))
    assert here(*command(pair, source, out, "-np", "2")) == 1
    assert "the device is gone; 6 lines are good, and the same command goes on" in capfd.readouterr().err
    assert ["error" in line for line in lines_of(out)] == [False, True, True, False, False, False]
    monkeypatch.undo()
    done = cli(*command(pair, source, out, "-np", "2"))
    assert done.returncode == 1  # of the two that failed before
    assert "2 of 12 lines" in done.stderr
    assert [line["index"] for line in lines_of(out) if "text" in line] == [0, *range(3, 12)]


# going on -------------------------------------------------------------------------------------------------------------


def test_it_goes_on_from_any_byte(pair: Pair, tmp_path: Path, out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = written(tmp_path, [*PROMPTS, "no\n", {"prompt": "the end"}])
    whole = cut(pair, source, out, 0)
    kept, ends = state(out).read_bytes(), [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for n_bytes in (0, 1, ends[0] - 1, ends[0], ends[0] + 1, ends[2], ends[3] + 5, len(whole) - 1, len(whole)):
        out.write_bytes(whole[:n_bytes])
        state(out).write_bytes(kept)
        assert here(*command(pair, source, out)) == 1  # of the line that is no JSON, also if it was there
        assert out.read_bytes() == whole, n_bytes
        n_there = whole[:n_bytes].count(b"\n")
        lines = "1 line" if n_there == 1 else f"{n_there} lines"
        assert (f"{lines} already there\n" in capfd.readouterr().err) == (n_there > 0)
        assert not state(out).exists()


def test_lines_that_are_there_are_not_made_again(pair: Pair, tmp_path: Path, out: Path) -> None:
    source = written(tmp_path, PROMPTS)
    whole = cut(pair, source, out, 0)
    first, second, _ = whole.splitlines(keepends=True)
    marked = first.replace(b'"text": "', b'"text": "kept, ')
    out.write_bytes(marked + second[:-1])
    assert here(*command(pair, source, out)) == 0
    assert out.read_bytes() == marked + whole[len(first) :]


def test_a_state_that_was_cut_off_is_none(pair: Pair, tmp_path: Path, out: Path, refused: Refused) -> None:
    source = written(tmp_path, PROMPTS)
    whole = cut(pair, source, out, 0)
    kept = state(out).read_bytes()
    for n_bytes in (0, 5, 40, len(kept) - 1):
        state(out).write_bytes(kept[:n_bytes])
        out.write_bytes(b"")
        assert here(*command(pair, source, out)) == 0
        assert out.read_bytes() == whole
        out.write_bytes(whole[:50])
        state(out).write_bytes(kept[:n_bytes])
        assert "is there already" in refused(1, *command(pair, source, out))
        assert out.read_bytes() == whole[:50]


def test_what_it_was_begun_with(pair: Pair, tmp_path: Path, out: Path, refused: Refused) -> None:
    source = written(tmp_path, PROMPTS)
    whole = cut(pair, source, out, 150)
    kept = out.read_bytes()
    other = written(tmp_path, [*PROMPTS, PROMPTS[0]], "other.jsonl")
    assert "was begun with another input; give that, or --restart" in refused(2, *command(pair, other, out))
    wrong = command(pair, source, out)
    assert "begun with --n-predict=12, this is --n-predict=13" in refused(2, *wrong, "-n", "13")
    assert "begun without --stop=['a']; leave it out, or --restart" in refused(2, *wrong, "--stop", "a")
    assert "begun with no --kv-unified, this is --kv-unified; give" in refused(2, *wrong, "-kvu")  # other sums
    assert "begun with --ctx-size=256, this is --ctx-size=128" in refused(2, *wrong, "-c", "128")
    assert "--cache-type-k=f16, this is --cache-type-k=q8_0" in refused(2, *wrong, "-ctk", "q8_0")
    assert "--margin=0.0, this is --margin=1.0" in refused(2, *wrong, "--margin", "1")
    changed = bytearray(pair[0].read_bytes())
    changed[len(changed) // 2] ^= 1
    (tmp_path / "target.gguf").write_bytes(changed)
    assert "another target" in refused(2, *wrong, "-m", tmp_path / "target.gguf")
    assert "another draft" in refused(2, *wrong, "--no-draft")
    assert "from stdin" in refused(2, *command(pair, "-", out))
    assert out.read_bytes() == kept
    # What says where and how fast it runs is free, and so are the files' names.
    (tmp_path / "moved.gguf").symlink_to(pair[0])
    source = source.rename(tmp_path / "moved.jsonl")
    done = cli(*command((tmp_path / "moved.gguf", pair[1]), source, out, "-np", "2", "-t", "2", "-ub", "64"))
    assert (done.returncode, out.read_bytes()) == (0, whole)


def test_models_are_told_apart_by_more_than_their_headers(tmp_path: Path) -> None:
    path, weights = tmp_path / "model.gguf", np.random.default_rng(0).integers(0, 256, 12 << 20, np.uint8)
    weights.tofile(path)
    same = fingerprint(path)
    assert fingerprint(path) == same
    for place in (slice(0, 1), slice(2 << 20, 3 << 20), slice(-1, None), slice(-(1 << 20), None)):
        other = weights.copy()
        other[place] ^= 1
        other.tofile(path)
        assert fingerprint(path) != same, place
    weights[:-1].tofile(path)
    assert fingerprint(path) != same
    path.write_bytes(b"")
    assert fingerprint(path).startswith("0 bytes")


def test_a_line_of_somebody_else(pair: Pair, tmp_path: Path, out: Path, refused: Refused) -> None:
    source = written(tmp_path, PROMPTS)
    whole = cut(pair, source, out, 0)
    lines = whole.splitlines(keepends=True)
    for text in (lines[0] + lines[2], lines[0] + b"mine\n", lines[0] + b"[1]\n" + lines[1]):
        out.write_bytes(text)
        assert f"line 2 of {out} is not the one that was written" in refused(2, *command(pair, source, out))
        assert out.read_bytes() == text
    assert here(*command(pair, source, out, "--restart")) == 0
    assert out.read_bytes() == whole


def test_restart(pair: Pair, tmp_path: Path, out: Path, refused: Refused) -> None:
    source, other = written(tmp_path, PROMPTS), written(tmp_path, PROMPTS[:1], "other.jsonl")
    cut(pair, source, out, 100)
    kept = out.read_bytes(), state(out).read_bytes()
    assert "--threads=0" in refused(2, *command(pair, other, out, "--restart", "-t", "0"))
    assert (out.read_bytes(), state(out).read_bytes()) == kept  # nothing goes before the models are open
    assert here(*command(pair, other, out, "--restart")) == 0
    assert [line["index"] for line in lines_of(out)] == [0]
    assert not state(out).exists()


def test_help_says_what_a_line_is() -> None:
    done = cli("batch", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for example in ('{"prompt": "Once upon a time"}', "--restart"):
        assert example in done.stdout
    assert sys.executable not in done.stdout
