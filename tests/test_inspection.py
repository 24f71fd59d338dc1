"""What inspect() and `info` say of files: each wrong pair in a sentence with the fix, the same wherever it is met."""

from __future__ import annotations

import dataclasses
import inspect as signatures
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from laws import TINY
from shell import cli, fails
from tiny import DRAFTS, MASK, TOKENS, Draft, File, Files, Target
from wrong import MARKOV, WRONG_DRAFTS, Change, changed, other_token, shorter_vocabulary

import pyllama_dflash as pd
from pyllama_dflash.__main__ import main
from pyllama_dflash.inspection import OPTIONS

Pair = tuple[Path, Path]
OTHER_MASK = {"tokenizer.ggml.mask_token_id": 300}


def wide(file: File) -> None:
    file.keys["embedding_length"] = 640


def all_tokens_changed(file: File) -> None:
    file.keys["tokenizer.ggml.tokens"] = [f"{token}_" for token in TOKENS]


USE_MADE_FOR = r"use a draft made for (this target|target-\d+.gguf)"
WRONG: dict[str, tuple[Change, str]] = {
    "other tokenizer": (
        other_token(300),
        rf"token 300 is 'otherwise' in d.gguf and '{TOKENS[300]}' in target-\d+.gguf: they use different tokenizers; "
        + USE_MADE_FOR,
    ),
    "tokenizer of other tokens": (
        all_tokens_changed,
        rf"token 0 is '{TOKENS[0]}_' in d.gguf and '{TOKENS[0]}' in target-\d+.gguf, and 430 more differ: "
        f"they use different tokenizers; {USE_MADE_FOR}",
    ),
    "tokenizer of another size": (
        shorter_vocabulary,
        rf"d.gguf has 430 tokens and target-\d+.gguf has 431: they use different tokenizers; {USE_MADE_FOR}",
    ),
    "other width": (wide, rf"d.gguf is 640 wide and target-\d+.gguf is 320: {USE_MADE_FOR}"),
    "too few layers": (
        changed({"target_layers": [1, 5]}),
        r"d.gguf reads the input of layer 5 but target-\d+.gguf has 2 layers \(dflash.target_layers\): " + USE_MADE_FOR,
    ),
    "other mask token": (
        changed(OTHER_MASK),
        rf"d.gguf drafts from mask token 300 '{TOKENS[300]}' and the mask token of target-\d+.gguf is {MASK} '<mask>'; "
        f"{USE_MADE_FOR}, or convert it again with that mask token",
    ),
    "architecture of an old converter": (
        changed(arch="dflash-draft"),
        r"d.gguf was made by a converter from before DFlash was merged \('dflash-draft'\); convert the draft again",
    ),
    "EAGLE-3": (
        changed(arch="eagle3"),
        "d.gguf is a draft of kind 'eagle3'; only DFlash and DFlash2 drafts are run here: "
        "use one of those made for the same target",
    ),
    "DSpark": (
        changed(tensors=MARKOV),
        "d.gguf is a DSpark draft; only DFlash and DFlash2 drafts are run here: "
        "use one of those made for the same target",
    ),
}
MODELS = {
    "plain model": (
        r"target-\d+.gguf is a model of kind 'llama', not a DFlash draft; give a draft made for target-\d+.gguf"
    ),
    "swapped": (
        r"target and draft are swapped: (draft-\d+.gguf) is a DFlash draft and (target-\d+.gguf) is a model; "
        r"give \2 as the target and \1 as the draft"
    ),
}


@pytest.fixture
def wrong(files: Files, tmp_path: Path) -> Callable[[str], Pair]:
    """A target and what does not belong to it."""

    def write(fault: str) -> Pair:
        target = files.path(Target())
        if fault == "plain model":
            return target, files.path(Target(weights="Q8_0"))
        if fault == "swapped":
            return files.path(Draft()), target
        file = Draft().file()
        WRONG[fault][0](file)
        return target, file.write(tmp_path / "d.gguf")

    return write


@pytest.mark.parametrize("fault", [*WRONG, *MODELS])
def test_a_wrong_pair_gets_its_one_sentence_wherever_it_is_met(
    wrong: Callable[[str], Pair], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = wrong(fault)
    message = WRONG[fault][1] if fault in WRONG else MODELS[fault]
    with pytest.raises(pd.IncompatibleModelsError, match=f"^{message}$") as opened:
        pd.Speculator(target, draft, **TINY)
    sentence = str(opened.value)
    with pytest.raises(pd.IncompatibleModelsError) as of_headers:
        pd.Model.header(target).check_pair(pd.Model.header(draft))
    assert str(of_headers.value) == sentence
    for found in (pd.inspect(draft, target), pd.inspect(target, draft=draft)):
        assert (found.pairs, found.mismatches, found.memory) == (False, (sentence,), None)
    assert fails(1, "run", "-m", target, "-md", draft, "-p", "a") == f"pyllama-dflash: error: {sentence}\n"
    for args in (("info", draft, "--target", target), ("info", target, "--draft", draft)):
        assert main([*map(str, args)]) == main([*map(str, args), "--json"]) == 1
        text, _, facts = capsys.readouterr().out.rpartition("\n{")
        assert text.count(f"  no: {sentence}\n") == text.count(" no: ") == 1
        assert json.loads("{" + facts)["mismatches"] == [sentence]


def test_a_truncated_file_gets_its_one_sentence_wherever_it_is_met(files: Files, tmp_path: Path) -> None:
    target, draft = files.pair()
    for size in (5000, -1000):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(draft.read_bytes()[:size])
        with pytest.raises(pd.ModelLoadError, match=r"; download or convert the file again$") as opened:
            pd.Speculator(target, cut, **TINY)
        with pytest.raises(pd.ModelLoadError) as inspected:
            pd.inspect(cut, target)
        assert str(inspected.value) == str(opened.value)
        for args in (("run", "-m", target, "-md", cut, "-p", "a"), ("info", cut), ("info", target, "--draft", cut)):
            assert fails(1, *args) == f"pyllama-dflash: error: {opened.value}\n"


def test_all_that_is_wrong_is_said(files: Files, tmp_path: Path) -> None:
    file = Draft().file()
    for change in (wide, other_token(300), changed({"target_layers": [1, 9], **OTHER_MASK})):
        change(file)
    target, draft = files.path(Target()), file.write(tmp_path / "d.gguf")
    found = pd.inspect(draft, target)
    starts = ("d.gguf is 640 wide", "d.gguf reads the input of layer 9", "token 300 is", "d.gguf drafts from mask")
    assert [sentence.startswith(start) for sentence, start in zip(found.mismatches, starts)] == [True] * 4
    assert len(found.mismatches) == 4
    swapped = pd.inspect(target, draft)
    assert swapped.mismatches[0].startswith("target and draft are swapped: d.gguf is a DFlash draft")
    assert swapped.mismatches[1:] == found.mismatches
    lines = str(found).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("pairs with target"))
    at = lines[first].index("no: ")
    assert [line[at:] for line in lines[first : first + 4]] == [f"no: {text}" for text in found.mismatches]


def test_a_mask_of_its_own_is_no_mismatch(files: Files, tmp_path: Path) -> None:
    """A draft with its own embeddings has its own row for the mask; a target need not name one."""
    own = Draft(own=True).file()
    changed(OTHER_MASK)(own)
    assert pd.inspect(own.write(tmp_path / "own.gguf"), files.path(Target())).pairs
    silent = Target().file()
    changed({"tokenizer.ggml.mask_token_id": None})(silent)
    assert pd.inspect(files.path(Draft()), silent.write(tmp_path / "silent.gguf")).pairs


def test_a_mask_token_that_the_target_lacks(files: Files, tmp_path: Path) -> None:
    file = Target().file()
    for name in ("tokens", "token_type"):
        file.keys[f"tokenizer.ggml.{name}"] = file.keys[f"tokenizer.ggml.{name}"][: MASK - 2]
    changed({f"tokenizer.ggml.{name}_token_id": None for name in ("bos", "eos", "mask")})(file)
    target, draft = file.write(tmp_path / "t.gguf"), files.path(Draft())
    tokens, mask = pd.inspect(draft, target).mismatches
    assert tokens.startswith(f"{draft.name} has {len(TOKENS)} tokens and t.gguf has {MASK - 2}: they use different")
    assert mask == (
        f"{draft.name} drafts from mask token {MASK} and t.gguf has {MASK - 2} tokens; use a draft made for this target"
    )


def opens(target: Path, draft: Path | None) -> str:
    try:
        pd.Speculator(target, draft, **TINY).close()
    except pd.DFlashError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("draft", DRAFTS, ids=repr)
def test_what_pairs_opens(files: Files, draft: Draft) -> None:
    pair = files.pair(draft=draft)
    found = pd.inspect(pair[1], pair[0], n_ctx=TINY["n_ctx"])
    assert (found.pairs, found.mismatches, found.problem, opens(*pair)) == (True, (), None, "")
    assert found.memory is not None
    with pd.Speculator(*pair, **TINY) as spec:
        for kind in ("target_kv", "draft_kv"):
            assert getattr(found.memory.total, kind) == getattr(spec.memory.total, kind) > 0


UNUSABLE: dict[str, tuple[Target | Draft, Change]] = {
    "a target that does not show its layers": (Target(arch="qwen2"), lambda file: None),
    "another such": (Target(arch="gemma"), changed(tensors={"output.weight": None})),
    "a draft without its fusion": (Draft(), changed(tensors={"fc.weight": None})),
    "a draft without a layer": (Draft(version=1), changed(tensors={"blk.2.ffn_up.weight": None})),
    "a target without a layer": (Target(), changed(tensors={"blk.1.attn_q.weight": None})),
    "a fusion of another shape": (Draft(), changed(tensors={"fc.weight": np.zeros((320, 320), np.float32)})),
    **{
        f"a draft with {fault}": (like, change)
        for fault, (like, change, kind, _) in WRONG_DRAFTS.items()
        if kind is pd.IncompatibleModelsError
    },
}


@pytest.mark.parametrize("fault", UNUSABLE)
def test_what_does_not_pair_does_not_open(files: Files, tmp_path: Path, fault: str) -> None:
    like, change = UNUSABLE[fault]
    file = like.file()
    change(file)
    path = file.write(tmp_path / "file.gguf")
    pair = (path, files.path(Draft())) if isinstance(like, Target) else (files.path(Target()), path)
    found = pd.inspect(pair[1], pair[0])
    assert (found.pairs, len(found.mismatches), found.memory) == (False, 1, None)
    assert opens(*pair) == found.mismatches[0]
    assert "\n" not in found.mismatches[0]


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (changed(tensors=MARKOV), "dspark", "DSpark draft, which is not run here"),
        (changed(arch="eagle3"), "other", "draft of another kind, which is not run here"),
        (changed(arch="dflash-draft"), "other", "draft of another kind, which is not run here"),
        (changed(tensors={"fc.weight": None}), "dflash2", "DFlash2 draft"),
    ],
)
def test_a_file_that_is_not_run_is_described(tmp_path: Path, change: Change, kind: str, words: str) -> None:
    file = Draft().file()
    change(file)
    path = file.write(tmp_path / "d.gguf")
    found = pd.inspect(path)
    assert (found.kind, found.pairs, found.mismatches, found.memory) == (kind, None, (), None)
    assert found.problem == opens(path, None) if kind != "dflash2" else "fc.weight" in str(found.problem)
    text = cli("info", path)
    assert text.returncode == 0
    assert f"  {words}\n" in text.stdout
    rows = dict(line.split("  ", 1) for line in text.stdout.partition("\n\n")[0].splitlines())
    assert rows["cannot be run"].strip() == found.problem


def test_a_draft_is_described_as_its_file_says(files: Files) -> None:
    pair = files.pair()
    found, file = pd.inspect(pair[1], pair[0], n_ctx=512), Draft().file()
    assert (found.path, found.target, found.draft, found.kind) == (str(pair[1]), str(pair[0]), None, "dflash2")
    assert (found.info, found.mask_text) == (pd.Model.header(pair[1]).info, "<mask>")
    assert (found.architecture, found.name) == ("dflash", "tiny")
    counts = {(group.name, group.type): group.n_tensors for group in found.tensors}
    assert counts == {
        ("backbone", "F32"): 21,
        ("fc", "F32"): 1,
        ("selector", "F32"): 3,
        ("convolutions", "F32"): 12,
        ("norms", "F32"): 14,
    }
    assert sum(group.n_params for group in found.tensors) == sum(tensor.size for tensor in file.tensors.values())
    assert sum(group.n_bytes for group in found.tensors) == found.info.n_bytes
    by_name = {group.name: group for group in found.tensors}
    assert by_name["fc"].n_params == file.tensors["fc.weight"].size
    said = json.loads(cli("info", pair[1], "--target", pair[0], "-c", "512", "--json").stdout)
    wanted = json.loads(json.dumps(found.to_dict()))
    for facts in (said, wanted):
        del facts["memory"]["devices"][-1]["free"]  # which changes all the time
    assert said == wanted


@pytest.mark.parametrize(
    ("like", "alone", "paired"),
    [
        (Draft(), ("embeddings", "head"), ("embeddings", "head", "tokenizer")),
        (Draft(own=True), (), ("tokenizer",)),
        (Draft(reduced=True), (), ("tokenizer",)),
    ],
    ids=repr,
)
def test_what_is_shared_with_the_target(files: Files, tmp_path: Path, like: Draft, alone: Any, paired: Any) -> None:
    target, draft = files.pair(draft=like)
    assert pd.inspect(draft).shares == alone
    assert pd.inspect(draft, target).shares == pd.inspect(target, draft=draft).shares == paired
    assert pd.inspect(target).shares == ()
    file = like.file()
    other_token(300)(file)
    assert pd.inspect(file.write(tmp_path / "d.gguf"), target).shares == alone


def test_the_options_are_those_that_change_memory(files: Files) -> None:
    keywords = {p.name: p for p in signatures.signature(pd.inspect).parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert [*keywords] == ["draft", *OPTIONS]
    assert all(keywords[name].default == getattr(pd.Params(), name) for name in OPTIONS)
    target, draft = files.pair()
    small, large = (pd.inspect(draft, target, n_ctx=n, type_k="q8_0").memory for n in (512, 1024))
    assert small is not None
    assert large is not None
    assert (small.n_ctx, small.fits, small.shortage) == (512, True, None)
    assert large.total.target_kv == 2 * small.total.target_kv
    with pytest.raises(ValueError, match="type_k='q8_0' has no effect on a draft alone; add its target"):
        pd.inspect(draft, n_ctx=512, type_k="q8_0")
    with pytest.raises(ValueError, match="type_k_draft='q8_0' has no effect without n_ctx; give n_ctx, too"):
        pd.inspect(draft, type_k_draft="q8_0")
    with pytest.raises(ValueError, match="n_ctx=2147483647 is out of range, 1 to 268435456; lower n_ctx"):
        pd.inspect(draft, n_ctx=2**31 - 1)
    with pytest.raises(ValueError, match="type_k_draft='q8_0' has no effect without a draft; add the draft"):
        pd.inspect(target, type_k_draft="q8_0")
    with pytest.raises(ValueError, match="not both"):
        pd.inspect(draft, target, draft=draft)
    with pytest.raises(ValueError, match="n_ctx=2147483647 is out of range, 1 to 268435456; lower n_ctx"):
        pd.inspect(target, n_ctx=2**31 - 1)


@pytest.mark.parametrize("options", [{}, {"type_k_draft": "q8_0"}, {"type_v_draft": "f32"}], ids=str)
def test_a_draft_alone_takes_what_it_takes_in_a_pair(files: Files, options: dict[str, str]) -> None:
    target, draft = files.pair()
    for n_ctx in (500, 3000):
        alone = pd.inspect(draft, n_ctx=n_ctx, **options).memory
        pair = pd.inspect(draft, target, n_ctx=n_ctx, **options).memory
        assert alone is not None
        assert pair is not None
        assert alone.n_ctx == pair.n_ctx == n_ctx
        for kind in ("draft_weights", "draft_kv"):
            assert getattr(alone.total, kind) == getattr(pair.total, kind) > 0
        assert alone.total.total == alone.total.draft_weights + alone.total.draft_kv
    alone = pd.inspect(draft).memory
    assert alone is not None
    assert (alone.n_ctx, alone.total.total) == (None, alone.total.draft_weights)


def test_what_does_not_fit_is_said_with_the_fix(files: Files) -> None:
    target, draft = files.pair()
    found = pd.inspect(draft, target, n_ctx=1 << 28)
    assert found.pairs
    assert found.memory is not None
    assert not found.memory.fits
    assert found.memory.shortage is not None
    assert found.memory.shortage.startswith("n_ctx=268435456 needs ")
    assert "lower n_ctx to about " in found.memory.shortage
    assert str(found).splitlines()[-1] == f"does not fit: {found.memory.shortage}"


def test_files_of_one_name_are_told_apart(files: Files, tmp_path: Path) -> None:
    target, file = tmp_path / "target" / "model.gguf", Draft().file()
    target.parent.mkdir()
    target.symlink_to(files.path(Target()))
    wide(file)
    draft = file.write(tmp_path / "model.gguf")
    (sentence,) = pd.inspect(draft, target).mismatches
    assert sentence == f"{draft} is 640 wide and {target} is 320: use a draft made for this target"


def test_a_long_token_is_cut_in_a_sentence(files: Files, tmp_path: Path) -> None:
    file = Draft().file()
    tokens = list(TOKENS)
    tokens[300] = "a\nb" + "é" * 300
    file.keys["tokenizer.ggml.tokens"] = tokens
    (sentence,) = pd.inspect(file.write(tmp_path / "d.gguf"), files.path(Target())).mismatches
    assert "token 300 is 'a?b" + "é" * 14 + "...' in d.gguf" in sentence


def test_a_wrong_pair_is_refused_before_weights_are_read(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = files.path(Target()), files.path(Draft(layers=(1, 7)))
    monkeypatch.setattr("pyllama_dflash._open._model", lambda *args: pytest.fail("a model was opened"))
    with pytest.raises(pd.IncompatibleModelsError, match="layer 7"):
        pd.Speculator(target, draft, **TINY)


@pytest.mark.model
def test_the_demo_pair(demo: Pair, tmp_path: Path) -> None:
    target, draft = demo
    found = pd.inspect(draft, target, n_ctx=2048)
    assert (found.pairs, found.shares) == (True, ("embeddings", "head", "tokenizer"))
    assert found.memory is not None
    with pd.Speculator(target, draft, n_ctx=2048) as spec:
        for kind in ("target_kv", "draft_kv"):  # weights that are laid out anew are mapped and copied
            assert getattr(found.memory.total, kind) == getattr(spec.memory.total, kind) > 0
    head = found.memory.total.draft_weights - found.info.n_bytes  # the rows of the target's, Q8_0, that it drafts over
    assert head == pytest.approx(found.info.n_vocab_draft * 576 // 32 * 34, abs=4096)
    (swap,) = pd.inspect(target, draft).mismatches
    assert fails(1, "run", "-m", draft, "-md", target, "-p", "a") == f"pyllama-dflash: error: {swap}\n"
    other = tiny.Draft().file().write(tmp_path / "d.gguf")
    width, tokens = pd.inspect(other, target).mismatches
    assert width == f"d.gguf is 320 wide and {target.name} is 576: use a draft made for this target"
    assert tokens.startswith(f"d.gguf has {len(TOKENS)} tokens and {target.name} has 49152: ")


def test_results_are_frozen(files: Files) -> None:
    found = pd.inspect(files.path(Draft()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.kind = "target"  # type: ignore[misc]
