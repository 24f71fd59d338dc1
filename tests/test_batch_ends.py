"""No way of ending the batch command loses or repeats a line."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import child
import pytest
from batching import (
    PROMPTS,
    Pair,
    command,
    cut,
    exact_pair,
    here,
    lines_of,
    long,
    started,
    state,
    wait_for_lines,
    written,
)
from shell import COMMAND, cli, fails, unread
from tiny import Files

# A program of its own sets the limit: a fork that runs Python needs all of this process's memory twice.
WITH_ROOM_FOR = """
    import resource, runpy, sys
    n_bytes = int(sys.argv.pop(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))
    runpy.run_module("pyllama_dflash", run_name="__main__", alter_sys=True)
"""


pytestmark = pytest.mark.usefixtures("without_logs")


@pytest.fixture(scope="module")
def pair(files: Files) -> Pair:
    return exact_pair(files)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.mark.slow
def test_killed_at_twenty_moments(pair: Pair, tmp_path: Path, out: Path) -> None:
    """Half of them any moment since the start, half after some more bytes of output."""
    source = long(tmp_path)
    start = time.monotonic()
    assert cli(*command(pair, source, out)).returncode == 1  # of the line that is no JSON
    took, whole = time.monotonic() - start, out.read_bytes()
    out.unlink()
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    n_killed, n_under_way = 0, 0
    while n_killed < 20:
        with started(*command(pair, source, out)) as process:
            if n_killed % 2:
                n_bytes = out.stat().st_size if out.exists() else 0
                wait_for_lines(process, out, n_bytes + rng.randrange(1500))
            else:
                time.sleep(rng.uniform(0, took))
            process.kill()
            process.wait()
        n_there = out.stat().st_size if out.exists() else 0
        if process.returncode == -signal.SIGKILL:
            n_killed += 1
            n_under_way += state(out).exists() and 0 < n_there < len(whole)
        if n_there:
            assert whole.startswith(out.read_bytes())
        if out.exists() and not state(out).exists():  # it was faster
            assert out.read_bytes() == whole
            out.unlink()
    assert n_under_way >= 5
    done = cli(*command(pair, source, out))
    assert (done.returncode, out.read_bytes()) == (1, whole), done.stderr
    assert not state(out).exists()


def test_two_at_a_time(pair: Pair, tmp_path: Path, out: Path) -> None:
    source = long(tmp_path, 8)
    link = tmp_path / "link.jsonl"
    link.symlink_to(out)
    with started(*command(pair, source, out)) as first:
        wait_for_lines(first, out, 0)
        first.send_signal(signal.SIGSTOP)
        try:
            for name in (out, link):
                assert f"another process is writing {out}" in fails(1, *command(pair, source, name))
                assert "another process" in fails(1, *command(pair, source, name, "--restart"))
        finally:
            first.send_signal(signal.SIGCONT)
        assert first.wait(timeout=60) == 1
    assert len(lines_of(out)) == 9
    assert not state(out).exists()


PRESSED = """
    import signal, sys
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of some shells ignores it
    from pyllama_dflash.__main__ import main
    sys.exit(main(sys.argv[1:]))
"""


def test_ctrl_c(pair: Pair, tmp_path: Path, out: Path) -> None:
    source = long(tmp_path)
    whole = cut(pair, source, out, 0)
    state(out).unlink()
    arguments = child.arguments(PRESSED, *command(pair, source, out))
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, encoding="utf-8") as process:
        wait_for_lines(process, out, 0)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.startswith("interrupted after ")
    assert err.endswith(" lines; the same command goes on from there\n")
    assert 0 < out.stat().st_size < len(whole)
    assert here(*command(pair, source, out)) == 1
    assert out.read_bytes() == whole


def test_ctrl_c_while_it_reads_stdin(pair: Pair, out: Path) -> None:
    arguments = child.arguments(PRESSED, *command(pair, "-", out, "-np", "1"))
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", bufsize=1
    ) as process:
        assert process.stdin is not None
        process.stdin.write('{"prompt": "the"}\n')
        wait_for_lines(process, out, 0)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err.count("\n")) == (130, 1)
    assert "from stdin cannot be gone on with: --restart writes" in err
    assert "from stdin" in fails(2, *command(pair, "-", out), text="")


def test_a_full_disk(pair: Pair, tmp_path: Path, out: Path) -> None:
    source = long(tmp_path, 12)
    whole = cut(pair, source, out, 0)
    for n_bytes in (10, 700, len(whole) - 1):
        for path in (out, state(out)):
            path.unlink(missing_ok=True)
        # The limit is of any file's size: that of the state must be below it, unless its own write is to fail.
        done = child.python(WITH_ROOM_FOR, n_bytes, *command(pair, source, out), cwd=None)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert "file too large" in done.stderr
        assert whole.startswith(out.read_bytes())
        if n_bytes > 10:
            assert out.stat().st_size == n_bytes
            n_lines = whole[:n_bytes].count(b"\n")
            assert f"its first {n_lines} lines are good; make room and run the same command again" in done.stderr
        assert here(*command(pair, source, out)) == 1
        assert out.read_bytes() == whole


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_behind_stdout(pair: Pair, tmp_path: Path) -> None:
    source = written(tmp_path, PROMPTS)
    with Path("/dev/full").open("wb") as full:
        words = [str(word) for word in command(pair, source, "-")]
        done = subprocess.run([*COMMAND, *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "no space left on device" in done.stderr
    assert "/dev/full is there and is no file" in fails(1, *command(pair, source, "/dev/full"))


def test_a_reader_that_leaves(pair: Pair, tmp_path: Path) -> None:
    assert unread(*command(pair, long(tmp_path), "-")) == (141, "")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="may write everywhere")
def test_a_folder_that_may_not_be_written(pair: Pair, tmp_path: Path) -> None:
    source, folder = written(tmp_path, PROMPTS), tmp_path / "locked"
    folder.mkdir(mode=0o500)
    assert "out.jsonl" in fails(1, *command(pair, source, folder / "out.jsonl"))
