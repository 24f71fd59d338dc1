"""What does not belong together is refused in one sentence, on headers alone and at opening."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from laws import TINY, checked_run
from tiny import TOKENS, Draft, File, Files, Target

import pyllama_dflash as pd

Change = Callable[[File], None]


def changed(keys: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None, arch: str = "") -> Change:
    """Set keys and tensors, or drop those that are None."""

    def apply(file: File) -> None:
        file.arch = arch or file.arch
        for have, want in ((file.keys, keys), (file.tensors, tensors)):
            for name, value in (want or {}).items():
                have.pop(name, None)
                if value is not None:
                    have[name] = value

    return apply


def other_token(index: int) -> Change:
    tokens = list(TOKENS)
    tokens[index] = "otherwise"
    return changed({"tokenizer.ggml.tokens": tokens})


def shorter_vocabulary(file: File) -> None:
    for name in ("tokens", "token_type"):
        file.keys[f"tokenizer.ggml.{name}"] = file.keys[f"tokenizer.ggml.{name}"][:-1]


def map_changed(token: int) -> Change:
    """The second token of a reduced vocabulary, whose first is 0, is another."""

    def change(file: File) -> None:
        file.tensors["d2t"][1] = token

    return change


def few_tokens(file: File) -> None:
    for name in ("d2t", "output.weight"):
        file.tensors[name] = file.tensors[name][:8]


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


def assert_one_sentence(error: Exception) -> None:
    text = str(error)
    assert "\n" not in text
    assert ".gguf" in text
    assert len(text) < 300


# pairs ----------------------------------------------------------------------------------------------------------------

DROPPED_SELECTOR = dict.fromkeys(["selector_hidden.weight", "selector_predecessor.weight", "selector_successor.weight"])
MARKOV = {"markov_w1.weight": np.zeros((32, 32), np.float32)}

WRONG_DRAFTS: dict[str, tuple[Draft, Change, type[Exception], str]] = {
    "fewer tokens": (
        Draft(version=1),
        shorter_vocabulary,
        pd.IncompatibleModelsError,
        r"draft.gguf has 430 tokens and target-\d+.gguf has 431: they use different tokenizers",
    ),
    "another token": (
        Draft(),
        other_token(300),
        pd.IncompatibleModelsError,
        rf"token 300 is 'otherwise' in draft.gguf and '{TOKENS[300]}' in target-\d+.gguf: .* different tokenizers",
    ),
    "another last token": (Draft(version=1), other_token(430), pd.IncompatibleModelsError, "token 430 is 'otherwise'"),
    "a layer that the target lacks": (
        Draft(),
        changed({"target_layers": [1, 5]}),
        pd.IncompatibleModelsError,
        r"draft.gguf reads the input of layer 5 but target-\d+.gguf has 2 layers \(dflash.target_layers\)",
    ),
    "no layers": (
        Draft(),
        changed({"target_layers": None}),
        pd.ModelLoadError,
        "key dflash.target_layers is missing.*convert the draft again",
    ),
    "a layer twice": (
        Draft(),
        changed({"target_layers": [1, 1]}),
        pd.ModelLoadError,
        "key dflash.target_layers lists a layer twice",
    ),
    "no mask token": (
        Draft(),
        changed({"tokenizer.ggml.mask_token_id": None}),
        pd.ModelLoadError,
        "key tokenizer.ggml.mask_token_id is missing",
    ),
    "a mask token that does not exist": (
        Draft(),
        changed({"tokenizer.ggml.mask_token_id": 431}),
        pd.ModelLoadError,
        "tokenizer.ggml.mask_token_id = 431 is no token: the vocabulary has 431",
    ),
    "a block of one": (
        Draft(),
        changed({"block_size": 1}),
        pd.ModelLoadError,
        "key dflash.block_size = 1 is out of range, 2 to 256",
    ),
    "DFlash2 keys and no selector": (
        Draft(),
        changed(tensors=DROPPED_SELECTOR),
        pd.ModelLoadError,
        "has DFlash2 keys but no tensor selector_hidden.weight: incomplete DFlash2 draft",
    ),
    **{
        f"a reduced vocabulary with {what}": (Draft(reduced=True), map_changed(token), pd.ModelLoadError, message)
        for what, token, message in (
            ("a token twice", 0, r"its reduced vocabulary \(d2t\) names token 0 twice; convert"),
            ("a token too high", 431, r"its reduced vocabulary \(d2t\) names token 431; there are 431; convert"),
            ("a negative token", -1, r"its reduced vocabulary \(d2t\) names token -1; there are 431; convert"),
        )
    },
    "a reduced vocabulary of fewer tokens than candidates": (
        Draft(reduced=True),
        few_tokens,
        pd.ModelLoadError,
        r"dflash.selector_top_k = \d+ is too many for embedding_length \d+ and 8 tokens",
    ),
    **{
        f"a selector and no {key}": (
            Draft(),
            changed({key: None}),
            pd.ModelLoadError,
            f"key dflash.{key} is missing; a DFlash2 draft needs it",
        )
        for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    },
}

OTHER_KINDS = {
    "the architecture of an old converter": (
        changed(arch="dflash-draft"),
        "was made by a converter from before DFlash was merged .*; convert the draft again",
    ),
    "DSpark": (changed(tensors=MARKOV), "is a DSpark draft; only DFlash and DFlash2 drafts are run here"),
    "EAGLE-3": (changed(arch="eagle3"), "is a draft of kind 'eagle3'; only DFlash and DFlash2 drafts are run here"),
}


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
    with pytest.raises(pd.IncompatibleModelsError, match=f"draft.gguf {message}"):
        pd.Model.header(target).check_pair(header)
    for opening in (lambda: pd.Model(draft), lambda: pd.Speculator(target, draft), lambda: pd.Speculator(draft)):
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
def test_a_target_that_does_not_show_its_layers_runs_alone_only(
    files: Files, write: Any, caplog: pytest.LogCaptureFixture, arch: str
) -> None:
    file_change = changed(tensors={"output.weight": None} if arch == "gemma" else {})
    target = write(Target(arch=arch), file_change)
    with pytest.raises(pd.IncompatibleModelsError, match=f"models of kind '{arch}' do not show a draft the inputs"):
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
        ("missing", "no such file"),
        ("directory", "is a directory; give the path of a .gguf file"),
        ("empty", "not a readable GGUF file"),
        ("text", "not a readable GGUF file"),
        ("truncated header", "not a readable GGUF file"),
        ("truncated data", "tensor .* ends at byte .* truncated or damaged"),
    ],
)
def test_a_file_that_is_no_model(files: Files, tmp_path: Path, role: str, fault: str, message: str) -> None:
    target, draft = files.pair()
    path, good = tmp_path / "file.gguf", (target if role == "target" else draft).read_bytes()
    if fault == "directory":
        path.mkdir()
    elif fault != "missing":
        contents = {"empty": b"", "text": b"GGUF is a format\n" * 50, "truncated header": good[:5000]}
        path.write_bytes(contents.get(fault, good[:-1000]))
    pair = (path, draft) if role == "target" else (target, path)
    for opening in (lambda: pd.Model.header(path), lambda: pd.Model(path), lambda: pd.Speculator(*pair, **TINY)):
        with pytest.raises(pd.ModelLoadError, match=message) as caught:
            opening()
        assert str(path) in str(caught.value)
