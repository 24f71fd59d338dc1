"""What does not belong together is refused in one sentence, on headers alone and at opening."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from laws import TINY, checked_run
from tiny import Draft, Files, Target
from wrong import OTHER_KINDS, WRONG_DRAFTS, Change, changed

import pyllama_dflash as pd


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Target | Draft, Change], Path]:
    def write(like: Target | Draft, change: Change) -> Path:
        file = like.file()
        change(file)
        return file.write(tmp_path / ("target.gguf" if isinstance(like, Target) else "draft.gguf"))

    return write


def refused(target: Path, draft: Path | None, kind: type[Exception], message: str) -> None:
    """Both ways of opening say the same."""
    if draft is not None:
        with pytest.raises(kind, match=message) as of_headers:
            pd.Model.header(target).check_pair(pd.Model.header(draft))
        assert_one_sentence(of_headers.value)
    with pytest.raises(kind, match=message) as of_opening:
        pd.Speculator(target, draft, **TINY)
    assert_one_sentence(of_opening.value)
    assert type(of_opening.value) is kind
    if draft is not None:
        assert str(of_headers.value) == str(of_opening.value)
        if kind is pd.IncompatibleModelsError:
            found = pd.inspect(draft, target)
            assert (found.pairs, found.mismatches[0]) == (False, str(of_headers.value))
            assert found == dataclasses.replace(
                pd.inspect(draft),
                shares=found.shares,
                pairs=False,
                mismatches=found.mismatches,
                target=str(target),
                memory=None,
                problem=None,
            )
        else:
            with pytest.raises(kind, match=message):
                pd.inspect(draft, target)


def assert_one_sentence(error: Exception) -> None:
    text = str(error)
    assert "\n" not in text
    assert ".gguf" in text
    assert len(text) < 300


# pairs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", WRONG_DRAFTS)
def test_a_wrong_draft_is_refused_in_a_sentence(files: Files, write: Any, fault: str) -> None:
    like, change, kind, message = WRONG_DRAFTS[fault]
    refused(files.path(Target()), write(like, change), kind, message)


def test_a_draft_of_another_width(files: Files, write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = files.path(Target())
    monkeypatch.setattr(tiny, "N_EMBD", 384)
    draft = write(Draft(seed=384), changed())
    message = r"draft.gguf is 384 wide and target-\d+.gguf is 320: use a draft made for this target"
    refused(target, draft, pd.IncompatibleModelsError, message)


@pytest.mark.parametrize("fault", OTHER_KINDS)
def test_a_draft_of_another_kind_is_known_by_its_header_and_not_loaded(files: Files, write: Any, fault: str) -> None:
    change, message = OTHER_KINDS[fault]
    target, draft = files.path(Target()), write(Draft(version=1), change)
    header = pd.Model.header(draft)
    assert header.info.kind == "other"
    assert header.info.is_draft
    refused(target, draft, pd.IncompatibleModelsError, f"draft.gguf {message}")
    for opening in (lambda: pd.Model(draft), lambda: pd.Speculator(draft)):
        with pytest.raises(pd.ModelLoadError, match=f"draft.gguf: {message}") as caught:
            opening()
        assert_one_sentence(caught.value)


def test_a_plain_model_is_no_draft(files: Files) -> None:
    target, other = files.path(Target()), files.path(Target(weights="Q8_0"))
    refused(
        target, other, pd.IncompatibleModelsError, r"is a model of kind 'llama', not a DFlash draft; give a draft made"
    )


@pytest.mark.parametrize("like", [Draft(), Draft(version=1, own=True)], ids=["shared head", "own head"])
def test_a_draft_does_not_run_alone(files: Files, like: Draft) -> None:
    draft = files.path(like)
    message = r"is a DFlash draft and cannot run alone.*: Speculator\(target, draft\)"
    refused(draft, None, pd.IncompatibleModelsError, message)
    refused(draft, draft, pd.IncompatibleModelsError, message)


@pytest.mark.parametrize("arch", ["qwen2", "gemma"])
def test_a_target_that_does_not_show_a_layer_runs_alone_only(
    files: Files, write: Any, caplog: pytest.LogCaptureFixture, arch: str
) -> None:
    file_change = changed(tensors={"output.weight": None} if arch == "gemma" else {})
    target = write(Target(arch=arch), file_change)
    with pytest.raises(
        pd.IncompatibleModelsError, match=f"models of kind '{arch}' do not show a draft the input of layer 0"
    ):
        pd.Speculator(target, files.path(Draft()), **TINY)
    with pd.Speculator(target, **TINY) as spec:
        assert checked_run(spec, "the", max_tokens=5, ignore_eos=True).stats.predicted_n == 5


def test_the_last_layers_output_is_not_shown(files: Files, write: Any) -> None:
    draft = write(Draft(), changed({"target_layers": [1, 2]}))
    with pytest.raises(pd.IncompatibleModelsError, match="layer"):
        pd.Speculator(files.path(Target()), draft, **TINY)


def test_models_by_header_only_are_not_run(files: Files) -> None:
    target, draft = (pd.Model.header(path) for path in files.pair())
    target.check_pair(draft)
    with pytest.raises(ValueError, match=r"opened by its header only; use Model\(path\)"):
        pd.Speculator(target, draft)


# files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", "no such file; give the path of a .gguf file"),
        ("link to itself", r"cannot be read \(Too many levels of symbolic links\); give the path of a .gguf file"),
        ("directory", "is a directory; give the path of a .gguf file"),
        ("pipe", "is no regular file; give the path of a .gguf file"),
        ("empty", "not a readable GGUF file.*; download or convert the file again"),
        ("text", "not a readable GGUF file.*; download or convert the file again"),
        ("truncated header", "not a readable GGUF file.*; download or convert the file again"),
        ("truncated data", "tensor .* ends at byte .* truncated or damaged; download or convert the file again"),
    ],
)
def test_a_file_that_is_no_model(files: Files, tmp_path: Path, role: str, fault: str, message: str) -> None:
    target, draft = files.pair()
    path, good = tmp_path / "file.gguf", (target if role == "target" else draft).read_bytes()
    if fault == "directory":
        path.mkdir()
    elif fault == "link to itself":
        path.symlink_to(path)
    elif fault == "pipe":
        os.mkfifo(path)
    elif fault != "missing":
        contents = {"empty": b"", "text": b"GGUF is a format\n" * 50, "truncated header": good[:5000]}
        path.write_bytes(contents.get(fault, good[:-1000]))
    pair = (path, draft) if role == "target" else (target, path)
    for opening in (
        lambda: pd.Model.header(path),
        lambda: pd.Model(path),
        lambda: pd.Speculator(*pair, **TINY),
        lambda: pd.inspect(path),
        lambda: pd.inspect(pair[1], pair[0]),
        lambda: pd.inspect(pair[0], draft=pair[1]),
    ):
        with pytest.raises(pd.ModelLoadError, match=message) as caught:
            opening()
        assert str(path) in str(caught.value)
