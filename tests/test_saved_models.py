"""A saved text belongs to the models that it was saved with, as they were opened."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_draft_vocab import in_two
from test_saved import LONG, REPLY, SMALL, saved
from tiny import Draft, Files, Target

import pyllama_dflash as pd


def test_other_models(alone: Path, files: Files) -> None:
    target, draft = files.pair()
    saved(alone / "text", target, draft, LONG[:50], **SMALL)
    saved(alone / "plain", target, None, LONG[:50], **SMALL)
    others = [
        ("text", files.path(Target(seed=1)), draft, {}, "was saved with another target; open the target that"),
        ("text", target, files.path(Draft(seed=1)), {}, "was saved with another draft; open the draft that"),
        ("text", target, files.path(Draft(version=1)), {}, "was saved with another draft"),
        ("text", target, None, {}, "was saved with a draft; open the draft that"),
        ("plain", target, draft, {}, "was saved without a draft; open without one"),
        (
            "text",
            target,
            draft,
            {"fused_draft": False},
            "was saved with fused_draft=True, this is fused_draft=False: open with that",
        ),
        (
            "text",
            target,
            draft,
            {"type_k": "q8_0"},
            "was saved with type_k='f16', this is type_k='q8_0': open with that",
        ),
    ]
    for name, ours, theirs, options, message in others:
        with pd.Speculator(ours, theirs, **{**SMALL, **options}) as spec:
            spec.prefill(LONG[:9])
            before = spec.state
            with pytest.raises(ValueError, match=message):
                spec.load(alone / name)
            assert spec.state == before


def test_a_copy_of_the_models_will_do(alone: Path, files: Files) -> None:
    target, draft = files.pair()
    expected = saved(alone / "text", target, draft, LONG[:50], **SMALL)
    copies = [alone / "a.gguf", alone / "b.gguf"]
    for copy, path in zip(copies, (target, draft)):
        copy.write_bytes(path.read_bytes())
    with pd.Speculator(*copies, **SMALL) as spec:
        assert spec.run([*spec.load(alone / "text"), 5, 6, 7], **REPLY).tokens == expected
    raw = bytearray(target.read_bytes())
    raw[-1] ^= 1  # a weight
    copies[0].write_bytes(raw)
    with pd.Speculator(*copies, **SMALL) as spec, pytest.raises(ValueError, match="another target"):
        spec.load(alone / "text")


def test_the_parts_of_a_model_count(alone: Path, files: Files) -> None:
    """The first may have no weights at all."""
    whole, other = files.path(Target()), files.path(Target(seed=1))
    for folder, path in (("a", whole), ("b", other)):
        (alone / folder).mkdir()
        in_two(path, alone / folder)
    first = alone / "a" / "t-00001-of-00002.gguf"
    with pd.Speculator(first, **SMALL) as spec:
        spec.prefill(LONG[:50])
        spec.save(alone / "text")
        assert len(spec.load(alone / "text")) == 50
    (alone / "b" / "t-00002-of-00002.gguf").replace(alone / "a" / "t-00002-of-00002.gguf")
    with pd.Speculator(first, **SMALL) as spec, pytest.raises(ValueError, match="another target"):
        spec.load(alone / "text")


def test_another_current_folder(alone: Path, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be other models of the same names in it."""
    target, draft = files.pair()
    for name, folder, path in (("own", "a", target), ("own", "b", files.path(Target(seed=1)))):
        (alone / folder).mkdir()
        (alone / folder / name).write_bytes(path.read_bytes())
    monkeypatch.chdir(alone / "a")
    with pd.Speculator("own", draft, **SMALL) as spec:
        spec.prefill(LONG[:50])
        for folder in (alone, alone / "b"):
            monkeypatch.chdir(folder)
            spec.save(alone / "text")
            assert spec.load(alone / "text") == tuple(LONG[:50])
    with pd.Speculator("own", draft, **SMALL) as spec, pytest.raises(ValueError, match="another target"):
        spec.load(alone / "text")


def test_a_model_whose_file_was_replaced(alone: Path, files: Files) -> None:
    """What stands there now is none of the text's."""
    target, draft = files.pair()
    for other in (files.path(Target(seed=1)), None):
        path = alone / "own"
        path.write_bytes(target.read_bytes())
        with pd.Speculator(path, draft, **SMALL) as spec:
            spec.prefill(LONG[:50])
            spec.save(alone / "text")
            path.unlink()
            if other is not None:
                path.write_bytes(other.read_bytes())
            for call in (spec.save, spec.load):
                with pytest.raises(OSError, match=r"own.* was changed or replaced since|No such file .*own"):
                    call(alone / "text")
            assert spec.state.n_past == 49
