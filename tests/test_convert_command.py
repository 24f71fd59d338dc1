"""Where a converted draft may be written, what stays if it fails, and the command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import checkpoints
import child
import pytest
from checkpoints import refused
from tiny import Draft, Files
from upstream_convert import TARGET

import pyllama_dflash as pd

LOAD, PAIR = pd.ModelLoadError, pd.IncompatibleModelsError
MODEL = "model.safetensors"


@pytest.fixture
def target(files: Files) -> Path:
    return files.path(TARGET)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.random().write(tmp_path / "hf")


def test_a_file_that_is_there_stays_unless_forced(folder: Path, target: Path, tmp_path: Path) -> None:
    out = folder / "draft.gguf"  # beside the checkpoint is a good place
    out.write_bytes(b"precious")
    refused(folder, out, target, FileExistsError, r"draft.gguf exists; give another name, or force=True to replace it")
    assert out.read_bytes() == b"precious"
    (folder / "config.json").rename(folder / "config")
    refused(folder, out, target, FileExistsError, "exists")  # which is said before anything is read
    refused(folder, out, target, LOAD, "config.json: no such file", force=True)
    assert out.read_bytes() == b"precious"
    (folder / "config").rename(folder / "config.json")
    assert pd.convert(folder, out, target=target, force=True).kind == "dflash2"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "draft.gguf", "model.safetensors"]


def test_places_that_are_refused(folder: Path, target: Path, tmp_path: Path) -> None:
    link, own_target = tmp_path / "link.gguf", tmp_path / "target.gguf"
    own_target.write_bytes(target.read_bytes())
    link.symlink_to(own_target)
    for out, message in (
        (own_target, "target.gguf is the target itself; give another name"),
        (link, "link.gguf is the target itself; give another name"),
        (folder / MODEL, "model.safetensors is a part of the checkpoint itself; give another name"),
        (folder / "config.json", "config.json is a part of the checkpoint itself; give another name"),
        (folder, "is a folder; give the path of the .gguf file to write"),
        (tmp_path / "none" / "draft.gguf", "there is no folder .*none; make it first"),
    ):
        before = target.read_bytes()
        with pytest.raises(ValueError, match=message):
            pd.convert(folder, out, target=own_target, force=True)
        assert own_target.read_bytes() == before
    refused(folder / "config.json", tmp_path / "o", target, ValueError, "is a file; give the folder of the checkpoint")
    refused(folder, tmp_path / "o", target, ValueError, "outtype='q4_0' is not one of auto, f32", outtype="q4_0")


def test_a_target_that_is_none(folder: Path, files: Files, tmp_path: Path) -> None:
    out, draft = tmp_path / "draft.gguf", files.path(Draft())
    refused(folder, out, draft, PAIR, "is a draft; give the model that the draft was trained for as target")
    refused(folder, out, tmp_path / "none.gguf", LOAD, "none.gguf: no such file")


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_a_failure_while_writing_leaves_nothing(
    folder: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    from pyllama_dflash.conversion import _checkpoint

    whole = _checkpoint.Checkpoint.read

    def read(self: Any, name: str) -> Any:
        if name.startswith("layers"):  # the tensors before them are written
            raise kind("no space left on device")
        return whole(self, name)

    monkeypatch.setattr(_checkpoint.Checkpoint, "read", read)
    refused(folder, tmp_path / "draft.gguf", target, kind, "no space left")


def test_a_bar_is_shown_if_it_is_asked_for(
    folder: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for progress in (False, True):
        pd.convert(folder, tmp_path / f"{progress}.gguf", target=target, progress=progress)
        assert ("converting: " in capsys.readouterr().err) == progress


def test_without_the_extra_a_sentence_says_what_to_install(folder: Path, target: Path, tmp_path: Path) -> None:
    code = """
        import importlib.util, sys
        from unittest import mock
        import pyllama_dflash as pd
        assert "gguf" not in sys.modules
        with mock.patch.object(importlib.util, "find_spec", return_value=None):
            try:
                pd.convert(sys.argv[1], sys.argv[3], target=sys.argv[2])
            except pd.DFlashError as error:
                print(error)
    """
    said = child.output(code, folder, target, tmp_path / "draft.gguf")
    assert said == "convert needs the gguf package; run: pip install 'pyllama-dflash[convert]'\n"


# the command ----------------------------------------------------------------------------------------------------------


def command(*args: Any) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-m", "pyllama_dflash", "convert", *map(str, args)]
    return subprocess.run(arguments, capture_output=True, encoding="utf-8", timeout=120, check=False)


def test_the_command_says_what_it_wrote_and_how_to_replace_it(folder: Path, target: Path, tmp_path: Path) -> None:
    out = tmp_path / "draft.gguf"
    done = command(folder, out, "--target", target, "--outtype", "bf16")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"wrote {out}: DFlash2 draft, 0.7 M parameters, 1.5 MB; it fits {target}\n"
    with pd.Model.header(out) as draft:
        assert "BF16" in draft.tensor_types
    again = command(folder, out, "--target", target)
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr == f"pyllama-dflash: error: {out} exists; give another name, or --force to replace it\n"
    assert command(folder, out, "--target", target, "--force").returncode == 0


def test_the_command_warns_of_what_a_file_cannot_say(target: Path, tmp_path: Path) -> None:
    made = checkpoints.random(version=1, n_layer=2)
    made.config |= {"use_sliding_window": True, "sliding_window": 64}
    made.config["layer_types"] = ["full_attention", "sliding_attention"]
    done = command(made.write(tmp_path / "hf"), tmp_path / "draft.gguf", "--target", target)
    assert done.returncode == 0
    assert done.stderr.count("\n") == 1
    assert "written as not causal, which may lower the acceptance" in done.stderr


def test_the_command_needs_a_target_and_names_its_types(folder: Path, target: Path) -> None:
    done = command(folder, "draft.gguf")
    assert done.returncode == 2
    assert "the following arguments are required: --target" in done.stderr
    done = command(folder, "draft.gguf", "--target", target, "--outtype", "q4_k")
    assert done.returncode == 2
    assert "auto" in done.stderr
