"""What a draft's file says of itself is what can be read back, and what is run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny
from laws import TINY, Models, checked_run
from tiny import N_EMBD, SAID, TOKENS, Draft, Files, Target

import pyllama_dflash as pd

TARGET = Target(weights="Q8_0")


@pytest.mark.parametrize(
    "like",
    [
        Draft(),
        Draft(version=1),
        Draft(own=True),
        Draft(window=24),
        Draft(reduced=True),
        Draft(causal=True),
        Draft(version=1, block=16, layers=(0, 1)),
    ],
    ids=repr,
)
def test_info_is_what_the_file_says(files: Files, like: Draft) -> None:
    model = pd.Model.header(files.path(like))
    info, file = model.info, like.file()
    assert info.kind == ("dflash2" if like.version == 2 else "dflash")
    assert (info.block_size, info.target_layers, info.mask_token) == (like.block, like.layers, tiny.MASK)
    assert (info.n_embd, info.n_layer, info.n_vocab) == (N_EMBD, like.n_layer, len(TOKENS))
    assert (info.causal, info.n_swa) == (like.causal, like.window)
    assert info.own_head == info.own_embd == (like.own or like.reduced)
    assert (info.selector_rank, info.selector_top_k) == ((32, 16) if like.version == 2 else (0, 0))
    assert info.n_vocab_draft == (len(file.tensors["d2t"]) if like.reduced else len(TOKENS))
    pattern = model.meta("dflash.attention.sliding_window_pattern")
    assert pattern == ("[false, true, false]" if like.window else None)
    assert info.n_params == sum(tensor.size for tensor in file.tensors.values())


def test_a_sliding_window_is_applied(models: Models) -> None:
    """Past the window the drafts differ from those of the same weights without one, inside it they do not."""
    target, prompt = TARGET, [*range(60, 100), SAID[0]]
    dense, windowed = (models.get(target, Draft(version=1, window=window)) for window in (0, 16))
    scores = {}
    for n in (9, len(prompt)):
        for name, spec in (("dense", dense), ("windowed", windowed)):
            spec.reset()
            spec.prefill(prompt[-n:])
            scores[name] = spec.draft(n_max=1).scores
        same = np.array_equal(scores["dense"], scores["windowed"])
        assert same == (n == 9)


@pytest.mark.parametrize("version", [1, 2])
def test_a_reduced_head_drafts_ids_of_the_target(models: Models, version: int) -> None:
    target, like = TARGET, Draft(version=version, reduced=True)
    kept = set(like.file().tensors["d2t"].tolist())
    spec = models.get(target, like)
    spec.prefill("the quick")
    seen: set[int] = set()
    for _ in range(10):
        draft = spec.draft()
        assert set(draft.candidates.ravel().tolist()) <= kept
        seen |= set(draft.tokens)
        spec.verify(draft)
    assert max(seen) > len(kept)  # ids of the reduced vocabulary would all be lower
    result = checked_run(spec, "the quick", max_tokens=64)
    whole = checked_run(models.get(target, Draft(version=version, own=True)), "the quick", max_tokens=64)
    assert result.stats.draft_n_accepted >= 0.8 * whole.stats.draft_n_accepted > 0


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_a_causal_block_does_not_see_what_follows(models: Models, version: int, causal: bool) -> None:
    spec = models.get(TARGET, Draft(version=version, causal=causal))
    spec.prefill("the quick brown fox")
    short, long = (spec.draft(n_max=n).scores[0] for n in (1, 7))
    assert np.allclose(short, long, atol=0.01) == causal


@pytest.mark.parametrize("version", [1, 2])
def test_features_come_in_the_order_of_the_layers(models: Models, tmp_path: Path, version: int) -> None:
    """The same draft with its layers, and the columns that read them, the other way round."""
    like = Draft(version=version, layers=(1, 0))
    file = like.file()
    first, second = np.split(file.tensors["fc.weight"], 2, axis=1)
    file.keys["target_layers"] = [0, 1]
    file.tensors["fc.weight"] = np.concatenate([second, first], axis=1)
    turned = file.write(tmp_path / "turned.gguf")
    file.tensors["fc.weight"] = np.concatenate([first, second], axis=1)
    mixed = file.write(tmp_path / "mixed.gguf")
    scores = []
    for path in (models.files.path(like), turned, mixed):
        with pd.Speculator(models.files.path(TARGET), path, **TINY) as spec:
            spec.prefill("the quick brown fox")
            scores.append(np.sort(spec.draft().scores, axis=1))
    np.testing.assert_allclose(scores[0], scores[1], atol=0.1)
    assert np.abs(scores[0] - scores[2]).max() > 1
