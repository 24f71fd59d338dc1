"""Where a converted draft may be written, what stays if it fails, and the command."""

from __future__ import annotations

import dataclasses
import errno
import json
import re
from pathlib import Path
from typing import Any

import checkpoints
import child
import pytest
from checkpoints import refused
from shell import cli, fails
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
    there = "draft.gguf is there already; give another path, or overwrite=True to replace it"
    refused(folder, out, target, FileExistsError, there)
    assert out.read_bytes() == b"precious"
    (folder / "config.json").rename(folder / "config")
    refused(folder, out, target, FileExistsError, "is there already")  # which is said before anything is read
    refused(folder, out, target, LOAD, "config.json: no such file", overwrite=True)
    assert out.read_bytes() == b"precious"
    (folder / "config").rename(folder / "config.json")
    assert pd.convert(folder, out, target=target, overwrite=True).kind == "dflash2"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "draft.gguf", "model.safetensors"]


def test_places_that_are_refused(folder: Path, target: Path, tmp_path: Path) -> None:
    link, own_target = tmp_path / "link.gguf", tmp_path / "target.gguf"
    own_target.write_bytes(target.read_bytes())
    link.symlink_to(own_target)
    for out, kind, message in (
        (own_target, ValueError, "target.gguf is the target itself; give another path"),
        (link, ValueError, "link.gguf is the target itself; give another path"),
        (folder / MODEL, ValueError, "model.safetensors is a part of the checkpoint itself; give another path"),
        (folder / "config.json", ValueError, "config.json is a part of the checkpoint itself; give another path"),
        (folder, IsADirectoryError, "is a directory; give the path of the file to write"),
        (
            tmp_path / "none" / "draft.gguf",
            FileNotFoundError,
            "there is no folder .*none for draft.gguf; make it first",
        ),
    ):
        before = target.read_bytes()
        with pytest.raises(kind, match=message):
            pd.convert(folder, out, target=own_target, overwrite=True)
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


def test_progress_goes_up_to_all_weights(folder: Path, target: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    pd.convert(folder, tmp_path / "draft.gguf", target=target, progress=lambda *counts: seen.append(counts))
    done, of = zip(*seen)
    assert list(done) == sorted(set(done))
    with pd.Model.header(tmp_path / "draft.gguf") as draft:
        assert set(of) == {done[-1]} == {draft.info.n_params}


def test_a_full_disk(folder: Path, target: Path, tmp_path: Path) -> None:
    code = """
        import resource, sys
        import pyllama_dflash as pd
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
        try:
            pd.convert(sys.argv[1], sys.argv[3], target=sys.argv[2])
        except OSError as error:
            print(error.errno, error.filename)
    """
    out = tmp_path / "draft.gguf"
    assert child.output(code, folder, target, out) == f"{errno.EFBIG} {out}\n"
    assert list(tmp_path.iterdir()) == [folder]


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


def test_the_command_says_what_it_wrote_and_how_to_replace_it(folder: Path, target: Path, tmp_path: Path) -> None:
    out = tmp_path / "draft.gguf"
    done = cli("convert", folder, out, "--target", target, "--outtype", "bf16")
    assert (done.returncode, done.stderr) == (0, "")
    rows = dict(re.split("  +", line, maxsplit=1) for line in done.stdout.splitlines())
    assert rows.pop("size") == "0.7 M parameters, 1.4 MiB"
    assert rows == {"file": str(out), "kind": "DFlash2 draft", "pairs with target": str(target)}
    with pd.Model.header(out) as draft:
        assert "BF16" in draft.tensor_types
        info = dataclasses.asdict(draft.info)
    again = fails(1, "convert", folder, out, "--target", target)
    assert again.endswith(f"{out} is there already; give another path, or --force to replace it\n")
    done = cli("convert", folder, out, "--target", target, "--outtype", "bf16", "--force", "--json")
    assert json.loads(done.stdout) == json.loads(json.dumps({"file": str(out), **info}))
    assert cli("convert", folder, out, "--target", target, "--force").returncode == 0


def test_the_command_warns_of_what_a_file_cannot_say(target: Path, tmp_path: Path) -> None:
    made = checkpoints.random(version=1, n_layer=2)
    made.config |= {"use_sliding_window": True, "sliding_window": 64}
    made.config["layer_types"] = ["full_attention", "sliding_attention"]
    done = cli("convert", made.write(tmp_path / "hf"), tmp_path / "draft.gguf", "--target", target)
    assert done.returncode == 0
    assert done.stderr.count("\n") == 1
    assert "written as not causal, which may lower the acceptance" in done.stderr


def test_the_command_needs_a_target_and_names_its_types(folder: Path, target: Path) -> None:
    done = cli("convert", folder, "draft.gguf")
    assert done.returncode == 2
    assert "the following arguments are required: --target" in done.stderr
    done = cli("convert", folder, "draft.gguf", "--target", target, "--outtype", "q4_k")
    assert done.returncode == 2
    assert "auto" in done.stderr
