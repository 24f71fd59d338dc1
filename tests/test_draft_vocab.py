"""Drafts over a part of the vocabulary: the tokens that a draft's file lists, as rows of the head that it shares."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import ggufile
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import TINY, Models, checked_run
from test_memory import plan_of
from tiny import N_EMBD, N_VOCAB, SAID, TOP_K, Draft, Files, Target

import pyllama_dflash as pd

TARGET = Target()
PANELS = Target(weights="Q8_0")
ROUNDING = 1e-4  # F32 sums run in another order where a head's number of rows suits another kernel
PROMPT = "the quick brown fox jumps over the lazy dog"
KINDS = [Draft(), Draft(version=1), Draft(window=16, block=16)]
EVERY = tuple(range(N_VOCAB))
ON_CPU = pytest.mark.skipif(any(device.is_gpu for device in pd.devices()), reason="bounds are those of a CPU")


def listed(draft: Draft, tokens: Iterable[int]) -> Draft:
    """The same draft, with a list of the tokens that it drafts."""
    return replace(draft, keys=(("draft_vocab", tuple(tokens)),))


def shuffled(tokens: Iterable[int], seed: int = 0) -> list[int]:
    return random.Random(seed).sample(list(tokens), len(list(tokens)))


def drafts(spec: pd.Speculator, prompt: str = PROMPT, n: int = 12) -> list[pd.Draft]:
    """Drafts of rounds in each of which what the target says itself is verified, so that all see the same context."""
    spec.reset()
    spec.prefill(prompt)
    out = []
    for _ in range(n):
        out.append(spec.draft())
        spec.verify([])
    return out


def same(a: Sequence[pd.Draft], b: Sequence[pd.Draft], tolerance: float = 0.0) -> bool:
    return len(a) == len(b) > 0 and all(
        x.tokens == y.tokens
        and np.array_equal(x.candidates, y.candidates)
        and np.allclose(x.scores, y.scores, rtol=0, atol=tolerance)
        for x, y in zip(a, b)
    )


def candidates(of: Iterable[pd.Draft]) -> set[int]:
    return {int(token) for draft in of for token in draft.candidates.ravel()}


# the same drafts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("like", KINDS, ids=repr)
@pytest.mark.parametrize("order", [EVERY, tuple(reversed(EVERY)), tuple(shuffled(EVERY))], ids=["up", "down", "mixed"])
def test_a_list_of_all_tokens_in_any_order_changes_nothing(models: Models, like: Draft, order: Any) -> None:
    whole, ours = (models.get(TARGET, draft) for draft in (like, listed(like, order)))
    assert ours.fused_draft
    assert same(drafts(ours), drafts(whole))


@pytest.mark.parametrize("like", KINDS, ids=repr)
def test_a_list_of_all_that_would_be_candidates_changes_nothing(models: Models, like: Draft) -> None:
    wanted = drafts(models.get(TARGET, like))
    seen = candidates(wanted)
    assert len(seen) < N_VOCAB
    assert same(drafts(models.get(TARGET, listed(like, shuffled(sorted(seen))))), wanted, ROUNDING)


@pytest.mark.parametrize("target", [TARGET, PANELS], ids=["F32", "Q8_0"])
@pytest.mark.parametrize("n", [TOP_K, 33, 64, 100])
def test_nothing_but_what_is_listed_is_drafted(models: Models, target: Target, n: int) -> None:
    """Most of these have low logits: rows that fill up a panel would come before them."""
    tokens = set(shuffled([t for t in EVERY if t not in SAID], n)[: n - 4]) | set(SAID[:4])
    for like in KINDS:
        found = drafts(models.get(target, listed(like, shuffled(tokens))))
        assert len(found[0].tokens) == like.block - 1
        assert candidates(found) <= tokens
        assert {token for draft in found for token in draft.tokens} <= tokens
        assert max(candidates(found)) >= n  # the tokens' own ids and not places in the list
        assert all(len(set(row)) == len(row) for draft in found for row in draft.candidates.tolist())


def test_candidates_are_those_of_the_whole_head_without_the_others(models: Models) -> None:
    """DFlash's are the best logits at each position, whatever came before: some of its ten are left out here."""
    like = Draft(version=1)
    whole = drafts(models.get(TARGET, like))
    kept = [token for token in shuffled(EVERY) if token not in SAID[::3]]
    n_left_out = 0
    for ours, theirs in zip(drafts(models.get(TARGET, listed(like, kept))), whole):
        for i, row in enumerate(theirs.candidates.tolist()):
            left = [at for at, token in enumerate(row) if token in set(kept)]
            assert ours.candidates[i][: len(left)].tolist() == [row[at] for at in left]
            np.testing.assert_allclose(ours.scores[i][: len(left)], theirs.scores[i][left], atol=ROUNDING)
            assert ours.tokens[i] == row[left[0]]
            n_left_out += len(row) - len(left)
    assert n_left_out > len(whole)


def test_the_selector_scores_what_is_left_as_it_did(models: Models) -> None:
    """At the first position, where all follow the anchor; the candidates are the best of the logits alone."""
    whole = drafts(models.get(TARGET, Draft()))
    kept = [token for token in EVERY if token not in SAID[::3]]
    for ours, theirs in zip(drafts(models.get(TARGET, listed(Draft(), kept))), whole):
        before, after = (dict(zip(d.candidates[0].tolist(), d.scores[0].tolist())) for d in (theirs, ours))
        left = {token: score for token, score in before.items() if token in set(kept)}
        assert 0 < len(left) < len(before)
        assert {token: after.get(token) for token in left} == pytest.approx(left, abs=ROUNDING)
        assert set(after) <= set(kept)
        assert ours.tokens[0] == max(after, key=lambda token: after[token])


@ON_CPU
def test_rows_in_panels_score_as_rows_in_a_file(models: Models) -> None:
    """The whole tiny head is no multiple of a panel's rows and stays as it is; the list's rows are filled up to one."""
    whole, ours = (models.get(PANELS, draft) for draft in (Draft(version=1), listed(Draft(version=1), EVERY)))
    for a, b in zip(drafts(ours), drafts(whole)):
        np.testing.assert_allclose(a.scores, b.scores, atol=1.0)


# the same text --------------------------------------------------------------------------------------------------------


@given(data=st.data(), version=st.sampled_from([1, 2]), target=st.sampled_from([TARGET, PANELS]))
def test_no_list_changes_the_text(models: Models, data: Any, version: int, target: Target) -> None:
    n = data.draw(st.integers(TOP_K, N_VOCAB))
    tokens = data.draw(st.permutations(EVERY))[:n]
    reference = models.plain(target, PROMPT, max_tokens=48)
    with models.fresh(target, listed(Draft(version=version), tokens)) as spec:
        result = checked_run(spec, PROMPT, max_tokens=48)
    models.assert_same(target, PROMPT, result.tokens, reference.tokens)


def test_what_the_target_says_is_enough(models: Models) -> None:
    results = {}
    for name, like in (("whole", Draft()), ("said", listed(Draft(), SAID)), ("never", listed(Draft(), range(60, 90)))):
        results[name] = checked_run(models.get(TARGET, like), PROMPT, max_tokens=96).stats.draft_n_accepted
    assert results["said"] >= 0.9 * results["whole"] > 0
    assert results["never"] < 0.5 * results["whole"]


@pytest.mark.parametrize("target", [TARGET, PANELS], ids=["F32", "Q8_0"])
def test_threads_change_nothing(models: Models, target: Target) -> None:
    like = listed(Draft(), shuffled(EVERY)[:200])
    found = [drafts(models.get(target, like, n_threads=n)) for n in (1, 2, 3)]
    assert same(found[0], found[1])
    assert same(found[0], found[2])


# where it has no effect -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"draft_vocab": False}, {"fused_draft": False}], ids=repr)
@pytest.mark.parametrize("like", KINDS[:2], ids=repr)
def test_the_whole_head_is_used_if_asked_for(models: Models, like: Draft, options: dict[str, Any]) -> None:
    other = {name: value for name, value in options.items() if name == "fused_draft"}
    ours = models.get(TARGET, listed(like, range(60, 90)), **options)
    whole = models.get(TARGET, like, **other)
    assert ours.fused_draft == whole.fused_draft
    assert same(drafts(ours), drafts(whole))
    assert ours.memory.total.draft_weights == whole.memory.total.draft_weights


def test_a_target_in_parts_keeps_its_head(files: Files, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO, "pyllama_dflash")
    target = in_two(files.path(TARGET), tmp_path)
    like = listed(Draft(), range(60, 90))
    with pd.Speculator(target, files.path(like), **TINY) as ours:
        found = drafts(ours)
    with pd.Speculator(target, files.path(Draft()), **TINY) as whole:
        assert same(found, drafts(whole))
    lines = {record.getMessage() for record in caplog.records if "draft vocabulary" in record.getMessage()}
    assert len(lines) == 1
    assert "does not hold the target's head itself" in lines.pop()


def in_two(path: Path, folder: Path) -> Path:
    """Write a file as two, the head in the second."""
    parts = ggufile.read(path)
    tensors, out = gguf.GGUFReader(path).tensors, [folder / f"t-0000{i}-of-00002.gguf" for i in (1, 2)]
    for i, second in enumerate((False, True)):
        writer = gguf.GGUFWriter(out[i], "llama")
        for key, value in {"split.no": i, "split.count": 2}.items():
            writer.add_uint16(key, value)
        writer.add_int32("split.tensors.count", len(tensors))
        for tensor in tensors:
            if (tensor.name == "output.weight") == second:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    first = ggufile.read(out[0])
    have = {key.name for key in first.keys}
    first.keys += [key for key in parts.keys if key.name not in have]
    out[0].write_bytes(bytes(first))
    return out[0]


def test_it_has_no_effect_without_a_draft(models: Models) -> None:
    with pytest.raises(ValueError, match="draft_vocab=False has no effect without a draft"):
        models.fresh(TARGET, draft_vocab=False)


# what is said of it ---------------------------------------------------------------------------------------------------


def test_its_size_can_be_read(files: Files) -> None:
    path = files.path(listed(Draft(), range(100, 150)))
    assert pd.Model.header(path).info.n_vocab_draft == 50
    assert f"drafted vocabulary  50 of {N_VOCAB} tokens" in str(pd.inspect(path))
    assert "drafted vocabulary" not in str(pd.inspect(files.path(Draft())))


@pytest.mark.parametrize("target", [TARGET, PANELS], ids=["F32", "Q8_0"])
def test_its_rows_are_shared_by_the_context_of_run_many(tmp_path: Path, files: Files, target: Target) -> None:
    """They are read once: zeros take the head's place in the file in between."""
    path = tmp_path / "target.gguf"
    path.write_bytes(files.path(target).read_bytes())
    head = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "output.weight")
    draft = files.path(listed(Draft(), SAID))
    with pd.Speculator(path, draft, **TINY, use_mmap=False) as spec:
        alone = checked_run(spec, PROMPT, max_tokens=40, ignore_eos=True)
        memory = spec.memory
        with path.open("r+b") as file:
            file.seek(head.data_offset)
            file.write(bytes(head.n_bytes))
        for _ in range(2):
            for result in spec.run_many([PROMPT] * 3, n_parallel=3, max_tokens=40, ignore_eos=True):
                assert result.result is not None
                assert result.result.tokens == alone.tokens
                assert result.result.stats.draft_n_accepted == alone.stats.draft_n_accepted > 10
        assert spec.memory.total.draft_weights == memory.total.draft_weights
        assert spec.memory.total.draft_kv > 2 * memory.total.draft_kv


@ON_CPU
@pytest.mark.parametrize("target", [TARGET, PANELS], ids=["F32", "Q8_0"])
def test_its_rows_are_counted_and_foretold(models: Models, target: Target) -> None:
    like = listed(Draft(), range(100, 150))
    row = 4 * N_EMBD if target is TARGET else N_EMBD // 32 * 34
    found, planned, shown = [], [], []
    for draft_vocab in (True, False):
        with models.fresh(target, like, draft_vocab=draft_vocab) as spec:
            found.append(spec.memory.total.draft_weights)
            planned.append(sum(device.draft_weights for device in plan_of(spec).devices))
            paths = spec.draft_model.path if spec.draft_model else "", spec.target.path
        memory = pd.inspect(*paths, n_ctx=512, draft_vocab=draft_vocab).memory
        assert memory is not None
        shown.append(sum(device.draft_weights for device in memory.devices))
    assert 50 * row <= found[0] - found[1] <= 64 * row + 4096  # whole panels, aligned
    assert planned[0] - planned[1] == shown[0] - shown[1] == pytest.approx(found[0] - found[1], abs=4096)


def test_quantizing_keeps_the_list(files: Files, alone: Path) -> None:
    tokens = shuffled(EVERY)[:60]
    pd.quantize(files.path(listed(replace(Draft(), weights="F16"), tokens)), alone / "q.gguf", "q8")
    field = gguf.GGUFReader(alone / "q.gguf").fields["dflash.draft_vocab"]
    assert field.contents() == tokens
    assert field.types[-1] == gguf.GGUFValueType.INT32
    with pd.Speculator(files.path(TARGET), alone / "q.gguf", **TINY) as spec:
        assert candidates(drafts(spec)) <= set(tokens)


# the demo pair --------------------------------------------------------------------------------------------------------


def with_list(path: Path, tokens: Sequence[int], out: Path) -> Path:
    parts = ggufile.read(path)
    parts.keys = [key for key in parts.keys if key.name != b"dflash.draft_vocab"]
    parts.keys.append(ggufile.Key(b"dflash.draft_vocab", ggufile.ARRAY, (ggufile.I32, list(tokens))))
    out.write_bytes(bytes(parts))
    return out


@pytest.mark.model
def test_drafts_of_the_demo_pair(demo: tuple[Path, Path], tmp_path: Path) -> None:
    """Its head is the target's embeddings, laid out in panels on most processors."""
    options: dict[str, Any] = {"n_ctx": 512}
    prompt = "<|im_start|>user\nWrite a quicksort in Python.<|im_end|>\n<|im_start|>assistant\n"
    with pd.Speculator(*demo, draft_vocab=False, **options) as whole:
        wanted = drafts(whole, prompt, 16)
        text = whole.run(prompt, max_tokens=64).text
        n_vocab, n_bytes = whole.target.info.n_vocab, whole.memory.total.draft_weights
    seen = sorted(candidates(wanted))
    assert TOP_K < len(seen) < n_vocab // 8
    for tokens in (range(n_vocab), shuffled(range(n_vocab)), seen, shuffled(seen)):
        path = with_list(demo[1], list(tokens), tmp_path / "draft.gguf")
        with pd.Speculator(demo[0], path, **options) as spec:
            assert spec.draft_model is not None
            assert spec.draft_model.info.n_vocab_draft == len(tokens)
            assert same(drafts(spec, prompt, 16), wanted)
            assert spec.run(prompt, max_tokens=64).text == text
            row = 576 // 32 * 34  # the target's head is Q8_0
            assert spec.memory.total.draft_weights - n_bytes >= len(tokens) * row
