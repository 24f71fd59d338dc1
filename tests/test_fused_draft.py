"""Our own draft graph against llama.cpp's: the same candidates and scores, whatever came before."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import TINY, Models, checked_run, compare_drafts
from tiny import DRAFTS, N_VOCAB, SAID, Draft, Target

import pyllama_dflash as pd

# A GPU multiplies other numbers of rows in other precisions: test_gpu.py has what can be said there.
pytestmark = pytest.mark.skipif(any(device.is_gpu for device in pd.devices()), reason="bounds are those of a CPU")

TARGET = Target()  # F32: the two paths differ by the order of their sums, and by what an F16 cache makes of that
TOLERANCE = 0.02
EXACT: dict[str, Any] = {"type_k_draft": "f32", "type_v_draft": "f32", "flash_attn": "off"}
RARE = (
    ("embedding_scale", 1.5),
    ("logit_scale", 0.5),
    ("final_logit_softcapping", 2.0),
    ("attention.scale", 0.2),
    ("attention.value_scale", 0.75),
    ("hidden_activation", "gelu"),
)
PROMPT = "the quick brown fox jumps over the lazy dog and then it goes on "


class Two:
    """Two Speculators on the same files, our graph and the reference, that take the same calls."""

    def __init__(
        self, models: Models, draft: Draft, target: Target = TARGET, tolerance: float = TOLERANCE, **options: Any
    ) -> None:
        self.tolerance = tolerance
        self.ours = models.get(target, draft, **options)
        self.reference = models.get(target, draft, fused_draft=False, **options)
        assert (self.ours.fused_draft, self.reference.fused_draft) == (True, False)
        self.n_compared = 0

    def prefill(self, prompt: Any) -> None:
        for spec in (self.ours, self.reference):
            spec.prefill(prompt)

    def draft(self, n: int | None = None) -> list[int]:
        a, b = self.ours.draft(n_max=n), self.reference.draft(n_max=n)
        self.n_compared += compare_drafts(a, b, self.tolerance)
        return list(b.tokens)

    def verify(self, guess: list[int]) -> None:
        a, b = self.ours.verify(guess), self.reference.verify(guess)
        assert (a.accepted, a.chosen) == (b.accepted, b.chosen)
        a_state, b_state = self.ours.state, self.reference.state
        assert (a_state.n_past, a_state.n_past_draft) == (b_state.n_past, b_state.n_past_draft)

    def rounds(self, n: int, rng: random.Random) -> None:
        """Rounds whose drafts are now and then spoilt, cut, or left out."""
        for _ in range(n):
            room = self.ours.n_ctx - self.ours.state.n_past - 1
            if room < 0:
                break
            guess = self.draft(rng.randint(0, min(room, self.ours.n_max))) if rng.random() < 0.8 else []
            if guess and rng.random() < 0.5:
                guess[rng.randrange(len(guess))] = rng.randrange(N_VOCAB)
            self.verify(guess[: rng.randint(0, len(guess))] if rng.random() < 0.2 else guess)


# the same drafts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", DRAFTS, ids=repr)
def test_rounds_of_every_kind(models: Models, draft: Draft) -> None:
    for tolerance, options in ((1e-3, EXACT), (TOLERANCE, {})):
        two, rng = Two(models, draft, n_ubatch=16, tolerance=tolerance, **options), random.Random(1)
        two.prefill(PROMPT)
        two.rounds(30, rng)
        assert two.n_compared >= (40 if draft.block > 2 else 5)


@given(draft=st.sampled_from(DRAFTS), seed=st.integers(0, 999), n_ubatch=st.sampled_from([1, 7, 64]), data=st.data())
def test_prompts_that_share_a_prefix(models: Models, draft: Draft, seed: int, n_ubatch: int, data: Any) -> None:
    rng = random.Random(seed)
    two = Two(models, draft, n_ubatch=n_ubatch)
    shared = [rng.choice(SAID) for _ in range(rng.randint(1, 100))]
    for _ in range(4):
        tail = [rng.choice(SAID) for _ in range(rng.randint(1, 30))]
        two.prefill(tail if rng.random() < 0.25 else shared[: rng.randint(1, len(shared))] + tail)
        two.rounds(rng.randint(0, 6), rng)


def test_p_and_a_then_q_then_p_and_b(models: Models) -> None:
    for draft in DRAFTS:
        two, rng = Two(models, draft, n_ubatch=16), random.Random(2)
        for prompt in (PROMPT + "a", "something else", PROMPT + "b", PROMPT[:20]):
            two.prefill(prompt)
            two.rounds(4, rng)


@pytest.mark.parametrize("draft", [Draft(), Draft(version=1, window=16, block=16)], ids=repr)
def test_beyond_one_step_of_cells_and_up_to_the_end_of_the_context(models: Models, draft: Draft) -> None:
    for n_ctx in (255, 256, 300):
        two, rng = Two(models, draft, n_ctx=n_ctx), random.Random(n_ctx)
        two.prefill([rng.choice(SAID) for _ in range(240)])
        two.rounds(80, rng)
        assert two.ours.state.n_past == n_ctx


def test_rows_of_plain_rounds_are_written_before_the_next_batch(models: Models) -> None:
    for draft in DRAFTS[:2]:
        two = Two(models, draft)
        two.prefill(PROMPT)
        for n_plain in (1, 2, 5):
            for _ in range(n_plain):
                two.verify([])
            before = two.n_compared
            two.verify(two.draft())
            assert two.n_compared == before + 7


@pytest.mark.parametrize("options", [{"flash_attn": "off"}, {"flash_attn": "on"}, {"type_k_draft": "f32"}], ids=repr)
@pytest.mark.parametrize("draft", [Draft(), Draft(version=1, window=16)], ids=repr)
def test_attention_of_both_kinds(models: Models, draft: Draft, options: dict[str, Any]) -> None:
    two = Two(models, draft, **options)
    two.prefill(PROMPT)
    two.rounds(8, random.Random(3))


@pytest.mark.parametrize("kind", ["q8_0", "bf16"])
def test_a_cache_of_another_type(models: Models, kind: str) -> None:
    two = Two(models, Draft(), tolerance=0.5, type_k_draft=kind, type_v_draft=kind)  # a step of rounding more or less
    two.prefill(PROMPT)
    two.draft()


@pytest.mark.parametrize("weights", ["F16", "Q8_0", "Q4_0"])
def test_quantised_weights(models: Models, weights: str) -> None:
    two = Two(models, Draft(weights=weights), Target(weights=weights), tolerance=1.0)
    two.prefill(PROMPT)
    for _ in range(4):
        two.verify(two.draft())
    assert two.n_compared >= 14


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
@pytest.mark.parametrize("fused", [True, False], ids=["our graph", "llama.cpp's"])
def test_features_of_any_size_through_an_f16_fc(tmp_path: Path, fused: bool, scale: float) -> None:
    """F16 holds numbers up to 65504. The reference is the same draft with its F16 numbers stored as F32."""
    target, draft = TARGET.file(), Draft(own=True, weights="F16").file()
    target.tensors["token_embd.weight"] *= np.float32(scale)
    for name, tensor in draft.tensors.items():
        if tensor.ndim == 2:
            draft.tensors[name] = tensor.astype(np.float16).astype(np.float32)
    paths = [target.write(tmp_path / "target.gguf"), draft.write(tmp_path / "half.gguf")]
    draft.weights = "F32"
    paths.append(draft.write(tmp_path / "single.gguf"))
    options = {**TINY, "fused_draft": fused}
    with pd.Speculator(paths[0], paths[1], **options) as half, pd.Speculator(paths[0], paths[2], **options) as single:
        for spec in (half, single):
            spec.prefill(PROMPT)
        for _ in range(4):
            drafts = [spec.draft() for spec in (half, single)]
            assert len(drafts[0].tokens) == 7
            compare_drafts(*drafts, tolerance=0.2)
            assert half.verify(drafts[1]).chosen == single.verify(drafts[1]).chosen


@pytest.mark.parametrize("version", [1, 2])
def test_metadata_that_few_drafts_have(models: Models, version: int) -> None:
    drafts = [Draft(version=version, keys=(key,)) for key in RARE]
    drafts += [Draft(version=version, keys=RARE), Draft(version=version, rare="rope_freqs")]
    usual = models.get(TARGET, Draft(version=version))
    usual.prefill(PROMPT)
    scores = usual.draft().scores
    for draft in drafts:
        two = Two(models, draft)
        two.prefill(PROMPT)
        logits_only = version == 1 and draft.keys in [(RARE[1],), (RARE[2],)]  # DFlash's are read as they come
        other = two.ours.draft().scores
        assert logits_only or other.shape != scores.shape or np.abs(other - scores).max() > TOLERANCE, draft
        two.rounds(4, random.Random(4))


def test_a_draft_of_nonsense_is_cut(models: Models) -> None:
    for version in (1, 2):
        spec = models.get(TARGET, Draft(version=version, poison=float("nan")))
        assert spec.fused_draft
        spec.prefill(PROMPT)
        assert spec.draft().tokens == ()


@given(draft=st.sampled_from(DRAFTS), n_max=st.sampled_from([None, 1, 3]))
def test_a_run_says_the_same_in_the_same_rounds(models: Models, draft: Draft, n_max: int | None) -> None:
    options: dict[str, Any] = {"max_tokens": 60, "n_max": n_max if draft.block > 3 else None}
    two = Two(models, draft)
    a, b = (checked_run(spec, PROMPT, **options) for spec in (two.ours, two.reference))
    assert a.tokens == b.tokens
    assert a.stats.histogram == b.stats.histogram


# where it does not run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rare", "reason"),
    [("attn_sinks", "sinks"), ("post_attention_norm", "post norms"), ("post_ffw_norm", "post norms")],
)
def test_what_it_does_not_know_runs_through_llama_cpp(
    models: Models, caplog: pytest.LogCaptureFixture, rare: str, reason: str
) -> None:
    caplog.set_level(logging.INFO, "pyllama_dflash")
    with models.fresh(TARGET, Draft(rare=rare)) as spec:
        assert not spec.fused_draft
        assert (spec.memory.n_nodes, spec.memory.n_graph_hits, spec.memory.n_graph_misses) == (0, 0, 0)
        assert spec.memory.total.draft_kv > 0
        assert not any(graph.draft for graph in spec.memory.graphs)
        checked_run(spec, PROMPT, max_tokens=20)
    lines = [record for record in caplog.records if "llama.cpp's own draft graph" in record.getMessage()]
    assert [(record.levelno, reason in record.getMessage()) for record in lines] == [(logging.INFO, True)]


def test_it_has_no_effect_without_a_draft(models: Models) -> None:
    with pytest.raises(ValueError, match="fused_draft=False has no effect without a draft"):
        models.fresh(TARGET, fused_draft=False)


# what it keeps --------------------------------------------------------------------------------------------------------


def test_graphs_are_built_once_for_each_shape(models: Models) -> None:
    with models.fresh(TARGET, Draft()) as spec:
        for _ in range(2):
            checked_run(spec, PROMPT, max_tokens=100)
        before = spec.memory
        checked_run(spec, PROMPT, max_tokens=100)
        after = spec.memory
    assert after.n_graph_misses == before.n_graph_misses
    assert after.n_graph_hits > before.n_graph_hits
    ours = [graph for graph in after.graphs if graph.draft]
    assert 1 <= len(ours) <= 16
    assert {graph.n_rows for graph in ours} >= {8}
    theirs = {graph.n_rows: graph for graph in after.graphs if not graph.draft}
    assert theirs[8].n_hits > 0
    assert theirs[8].bytes > 0
    assert after.devices == before.devices


def test_the_graphs_kept_are_few(models: Models) -> None:
    with models.fresh(TARGET, Draft(block=16)) as spec:
        spec.prefill(PROMPT)
        for n in list(range(16)) * 3:
            if spec.state.n_past + n + 1 > spec.n_ctx:
                break
            spec.verify([0] * n)
            spec.draft(n_max=n)
        assert sum(graph.draft for graph in spec.memory.graphs) == 16
        assert spec.memory.n_graph_misses > 16


def test_nothing_grows_over_ten_thousand_rounds(models: Models) -> None:
    with models.fresh(Target(n_layer=1), Draft(n_layer=1, block=3, layers=(0,)), n_ctx=300, cache_ram=0) as spec:
        rng = random.Random(5)

        def rounds(n: int) -> None:
            for i in range(n):
                if i % 60 == 0:
                    spec.prefill([rng.choice(SAID) for _ in range(rng.randint(1, 40))])
                spec.verify(spec.draft(n_max=rng.randint(0, 2)))

        rounds(3000)  # until malloc has seen every size
        memory, grown = spec.memory, []
        while len(grown) < 3 and (not grown or grown[-1] >= 4 << 20):  # malloc may still grow; a leak does each time
            before = resident()
            rounds(7000)
            grown.append(resident() - before)
        assert min(grown) < 4 << 20  # 600 bytes a round
        after = spec.memory
        for kind in ("draft_kv", "draft_compute", "target_kv"):
            assert getattr(after.total, kind) == getattr(memory.total, kind)
        assert after.total.target_compute < 2 * memory.total.target_compute  # a few graphs take turns
        assert sum(graph.draft for graph in after.graphs) <= 16


def resident() -> int:
    """Bytes of memory in use."""
    statm = Path("/proc/self/statm")
    if not statm.exists() or "SANITIZE" in pd.build_info()["options"]:
        pytest.skip("needs /proc, and an allocator that does not keep what was freed")
    return int(statm.read_text(encoding="ascii").split()[1]) * 4096


# the demo pair --------------------------------------------------------------------------------------------------------


@contextmanager
def demo_pair(demo: tuple[Path, Path], **options: Any) -> Iterator[tuple[pd.Speculator, pd.Speculator]]:
    with (
        pd.Speculator(*demo, n_ctx=512, **options) as ours,
        pd.Speculator(*demo, n_ctx=512, fused_draft=False, **options) as reference,
    ):
        assert (ours.fused_draft, reference.fused_draft) == (True, False)
        yield ours, reference


@pytest.mark.model
@pytest.mark.parametrize("options", [{}, {"type_k_draft": "q8_0", "type_v_draft": "q8_0"}], ids=repr)
def test_drafts_of_the_demo_pair(demo: tuple[Path, Path], options: dict[str, Any]) -> None:
    n, n_same, n_accepted = 0, 0, [0, 0]
    with demo_pair(demo, **options) as both:
        for prompt in ("Write a quicksort in Python.", "Why is the sky blue?", "Count from one to twenty."):
            for spec in both:
                spec.prefill(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n")
            for _ in range(24):
                a, b = (spec.draft() for spec in both)
                n += len(a.tokens)
                n_same += sum(x == y for x, y in zip(a.tokens, b.tokens))
                verdicts = [spec.verify(b) for spec in both]
                assert verdicts[0].chosen == verdicts[1].chosen
                n_accepted[0] += sum(x == y for x, y in zip(a.tokens, verdicts[1].accepted))
                n_accepted[1] += len(verdicts[1].accepted)
    assert n_same > 0.97 * n, (n_same, n)
    assert n_accepted[0] >= n_accepted[1] - 2, n_accepted


@pytest.mark.model
def test_text_of_the_demo_pair(demo: tuple[Path, Path]) -> None:
    with demo_pair(demo) as both:
        for prompt in ("Write a quicksort in Python.", "Why is the sky blue?"):
            a, b = (checked_run(spec, messages=prompt, max_tokens=96) for spec in both)
            assert a.text == b.text
            assert a.stats.acceptance == pytest.approx(b.stats.acceptance, abs=0.02)
