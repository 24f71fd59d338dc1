"""What quantising refuses, and that the file it writes is there whole or not at all."""

from __future__ import annotations

import errno
import io
import os
import signal
from pathlib import Path
from typing import Any

import child
import ggufile
import numpy as np
import pytest
from tiny import Draft, Files

import pyllama_dflash as pd
from pyllama_dflash._replace import Part

F16 = Draft(weights="F16")


@pytest.fixture
def narrow(files: Files) -> Path:
    return files.path(F16)


# what is refused ------------------------------------------------------------------------------------------------------


def test_unknown_recipe(narrow: Path, alone: Path) -> None:
    with pytest.raises(ValueError, match="recipe='q3' is unknown; there are: q8, q4-mix, q4, q4-k-m, q2-hybrid, q2"):
        pd.quantize(narrow, alone / "q.gguf", "q3")


@pytest.mark.parametrize("how", ["same", "symlink", "hard link"])
def test_source_as_target(how: str, narrow: Path, alone: Path) -> None:
    source = alone / "in.gguf"
    source.write_bytes(narrow.read_bytes())
    target = source if how == "same" else alone / "other.gguf"
    if how == "symlink":
        target.symlink_to(source)
    elif how == "hard link":
        target.hardlink_to(source) if hasattr(target, "hardlink_to") else os.link(source, target)
    with pytest.raises(ValueError, match="is the source itself"):
        pd.quantize(source, target, "q8", overwrite=True)
    assert source.read_bytes() == narrow.read_bytes()


def test_a_file_that_is_there(narrow: Path, alone: Path) -> None:
    target = alone / "q.gguf"
    target.write_text("mine")
    with pytest.raises(FileExistsError, match="is there already; give another path, or overwrite=True"):
        pd.quantize(narrow, target, "q8")
    assert target.read_text() == "mine"
    link = alone / "link.gguf"
    link.symlink_to(target)
    pd.quantize(narrow, link, "q8", overwrite=True)
    assert link.is_symlink()
    assert pd.Model.header(target).info.kind == "dflash2"


def test_places_that_cannot_be_written(narrow: Path, alone: Path) -> None:
    with pytest.raises(IsADirectoryError, match="is a directory"):
        pd.quantize(narrow, alone, "q8", overwrite=True)
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*none for q\.gguf"):
        pd.quantize(narrow, alone / "none" / "q.gguf", "q8")
    os.mkfifo(alone / "pipe")
    with pytest.raises(FileExistsError, match="is no file"):
        pd.quantize(narrow, alone / "pipe", "q8", overwrite=True)
    (alone / "pipe").unlink()
    with pytest.raises(OSError, match=r"/proc/q\.gguf") as caught:  # not even root may write there
        pd.quantize(narrow, "/proc/q.gguf", "q8")
    assert ".part" not in str(caught.value)
    assert not list(alone.iterdir())


def test_files_that_are_no_model(narrow: Path, alone: Path) -> None:
    source, target = alone / "in.gguf", alone / "q.gguf"
    whole = narrow.read_bytes()
    cases = {
        "truncated": whole[:-200],
        "metadata": whole[:3000],
        "not a readable GGUF": b"GGUB" + whole[4:],
        "GGUF": b"",
    }
    for data in cases.values():
        source.write_bytes(data)
        with pytest.raises(pd.ModelLoadError, match=r"in\.gguf"):
            pd.quantize(source, target, "q8")
    with pytest.raises(pd.ModelLoadError, match="no such file"):
        pd.quantize(alone / "gone.gguf", target, "q8")
    assert list(alone.iterdir()) == [source]


def test_damaged_files_are_refused_or_quantised(narrow: Path, alone: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        import damage
        import pyllama_dflash as pd
        whole, folder = map(Path, sys.argv[1:])
        found = {True: 0, False: 0}
        for number in range(160, 240):
            (folder / "in.gguf").write_bytes(damage.damage(whole, number))
            try:
                pd.quantize(folder / "in.gguf", folder / "q.gguf", "q4")
                pd.Model.header(folder / "q.gguf").close()
                (folder / "q.gguf").unlink()
                found[True] += 1
            except pd.ModelLoadError:
                found[False] += 1
            assert [path.name for path in folder.iterdir()] == ["in.gguf"]
        print(all(found.values()))
    """
    assert child.output(code, narrow, alone) == "True\n"


def test_drafts_of_other_kinds_and_parts_of_a_file(narrow: Path, alone: Path) -> None:
    for kind, value in ((ggufile.U16, 2), (ggufile.STRING, b"two")):
        parts = ggufile.read(narrow)
        parts.keys.append(ggufile.Key(b"split.count", kind, value))
        (alone / "in.gguf").write_bytes(bytes(parts))
        with pytest.raises(pd.ModelLoadError, match="one part of several"):
            pd.quantize(alone / "in.gguf", alone / "q.gguf", "q8")
    file = F16.file()
    file.tensors["markov_w1.weight"] = np.ones((32, 32), np.float32)
    with pytest.raises(pd.ModelLoadError, match="of a kind that is not run here"):
        pd.quantize(file.write(alone / "other.gguf"), alone / "q.gguf", "q8")
    assert not (alone / "q.gguf").exists()


@pytest.mark.parametrize("value", [np.nan, np.inf, -1e6])
def test_weights_that_no_block_can_hold(value: float, alone: Path) -> None:
    file = Draft().file()
    file.tensors["blk.1.ffn_up.weight"][300, 7] = value
    source = file.write(alone / "in.gguf")
    with pytest.raises(pd.ModelLoadError, match=r"blk\.1\.ffn_up\.weight has the weight .* which q4_0 cannot hold"):
        pd.quantize(source, alone / "q.gguf", "q4", n_threads=3)
    assert not (alone / "q.gguf").exists()


# whole or not at all --------------------------------------------------------------------------------------------------


def test_progress_goes_up_to_all_weights(narrow: Path, alone: Path) -> None:
    seen: list[tuple[int, int]] = []
    result = pd.quantize(narrow, alone / "q.gguf", "q8", progress=lambda *counts: seen.append(counts))
    done, of = zip(*seen)
    assert list(done) == sorted(set(done))
    assert set(of) == {done[-1]} == {sum(t.n_weights for t in result.tensors)}


class Stop(BaseException):
    pass


@pytest.mark.parametrize("there", [False, True])
def test_an_exception_leaves_what_was_there(there: bool, narrow: Path, alone: Path) -> None:
    target = alone / "q.gguf"
    if there:
        target.write_text("mine")

    def stop(n_done: int, n_all: int) -> None:
        if 2 * n_done > n_all:
            assert [path.suffix for path in alone.glob(".*")] == [".part"]
            raise Stop

    with pytest.raises(Stop):
        pd.quantize(narrow, target, "q8", overwrite=there, progress=stop)
    assert [path.read_text() for path in alone.iterdir()] == ["mine"] * there


def test_a_file_that_came_meanwhile_is_not_replaced(narrow: Path, alone: Path) -> None:
    target = alone / "q.gguf"
    with pytest.raises(FileExistsError):
        pd.quantize(narrow, target, "q8", progress=lambda *_: target.write_text("mine") and None)
    assert target.read_text() == "mine"


def test_a_source_that_is_cut_meanwhile(narrow: Path, alone: Path) -> None:
    source = alone / "in.gguf"
    source.write_bytes(narrow.read_bytes())
    with pytest.raises(pd.ModelLoadError, match="the file changed"):
        pd.quantize(source, alone / "q.gguf", "q8", progress=lambda *_: os.truncate(source, 100_000))
    assert list(alone.iterdir()) == [source]


def test_what_the_system_takes_in_parts_is_written_whole(tmp_path: Path) -> None:
    class Slow(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(data[:1000])

    with Slow(tmp_path / "out", "x") as file:
        Part(file, tmp_path).write(bytes(range(256)) * 10)
    assert (tmp_path / "out").read_bytes() == bytes(range(256)) * 10


def test_a_full_disk(narrow: Path, alone: Path) -> None:
    code = """
        import resource, sys
        import pyllama_dflash as pd
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
        try:
            pd.quantize(sys.argv[1], sys.argv[2], "q8")
        except OSError as error:
            print(error.errno, error.filename)
    """
    assert child.output(code, narrow, alone / "q.gguf") == f"{errno.EFBIG} {alone / 'q.gguf'}\n"
    assert not list(alone.iterdir())


def test_ctrl_c_in_the_command(narrow: Path, alone: Path) -> None:
    code = """
        import os, signal, sys
        import pyllama_dflash._cli_quantize as command
        from pyllama_dflash.__main__ import main
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of some shells ignores it
        def press(self, n_done, n_all):
            if 2 * n_done > n_all:
                os.kill(os.getpid(), signal.SIGINT)
        command.Progress.__call__ = press
        sys.exit(main(["quantize", *sys.argv[1:], "--recipe", "q8"]))
    """
    done = child.python(code, narrow, alone / "q.gguf")
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "")
    assert not list(alone.iterdir())
