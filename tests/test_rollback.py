"""What was rejected leaves no trace in the target: of a cache that is cut, a state with snapshots, one put back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import child
import numpy as np
import pytest
from arch_models import Arch
from arch_table import ARCHS
from laws import Models, assert_near_tie, checked_run, first_difference
from tiny import N_VOCAB, Draft, File

import pyllama_dflash as pd
from pyllama_dflash import _fit
from pyllama_dflash._open import engine_fields, load_of_target
from pyllama_dflash.memory import total_of

PROMPT = [(7 * i) % 250 for i in range(21)]
OTHER = [(11 * i + 3) % 240 for i in range(40)]
N_MAX = 7
OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_max": N_MAX, "backend_argmax": False}

WINDOW = {"attention.sliding_window": 16}
WINDOWED = dataclasses.replace(ARCHS["lfm2"], keys=ARCHS["lfm2"].keys | WINDOW, note="lfm2-window")
# With these weights, no expert is chosen by so little that the width of the batch decides.
KIMI = dataclasses.replace(ARCHS["kimi-linear"], seed=1)
RECURRENT = [*(arch for arch in (ARCHS | {"kimi-linear": KIMI}).values() if arch.recurrent), WINDOWED]
SNAPSHOTS = {
    "bailingmoe3",
    "deepseek4",
    "glm5-next",
    "kimi-k3",
    "lfm2",
    "lfm2moe",
    "lfm2-window",
    "nemotron_h",
    "nemotron_h_moe",
    "qwen35",
    "qwen35moe",
    "qwen4exp",
}
CUT = [ARCHS[name] for name in ("llama", "gemma3", "deepseek2", "minimax-m3", "qwen2vl")]

each = pytest.mark.parametrize("arch", [*CUT, *RECURRENT], ids=repr)
each_recurrent = pytest.mark.parametrize("arch", RECURRENT, ids=repr)


def wrong(token: int) -> int:
    return (token + 1) % N_VOCAB


def spoilt(guess: Sequence[int], at: int | None, by: int = 1) -> list[int]:
    """The guess with a wrong token at that place, and wrong ones after it."""
    if at is None:
        return list(guess)
    return [*guess[:at], *((token + by) % N_VOCAB for token in guess[at:])]


def plain(spec: pd.Speculator, prompt: Sequence[int], n: int) -> list[int]:
    """One token at a time."""
    spec.reset()
    spec.prefill(prompt)
    return [spec.verify([]).bonus for _ in range(n)]


def assert_same(
    models: Models, arch: Arch, prompt: Sequence[int], ours: Sequence[int], reference: Sequence[int]
) -> None:
    """The same text; or it goes apart where one that rejected nothing chooses so, too, in a batch of this width."""
    at = first_difference(ours, reference)
    if at is None:
        return
    spec = models.get(arch, n_ubatch=256, **OPTIONS)
    spec.prefill([*prompt, *reference[:at]])
    if spec.verify(reference[at : at + N_MAX]).chosen[0] != ours[at]:  # unless another expert was chosen, say
        rivals = ours[at], reference[at]
        assert_near_tie(models.files.path(arch), prompt, reference[:at], rivals, N_MAX + 1, n_ctx=512, n_threads=1)


@each
def test_text_is_that_of_one_token_at_a_time_whatever_is_rejected(models: Models, arch: Arch) -> None:
    """L3 with a draft that goes wrong at each place in turn, of several widths."""
    spec = models.get(arch, **OPTIONS)
    n_tokens = 256
    reference = plain(spec, PROMPT, n_tokens + N_MAX)
    for places in ([0], [1], [N_MAX // 2], [N_MAX - 1], [None], [0, None, 3, 1, 2, None, 6, 5]):
        spec.reset()
        spec.prefill(PROMPT)
        said: list[int] = []
        n_rounds = 0
        while len(said) < n_tokens and reference[: len(said)] == said:
            n = (N_MAX, 3, N_MAX, 1, 5)[n_rounds % 5] if len(places) > 1 else N_MAX
            place = places[n_rounds % len(places)]
            at = None if place is None else min(place, n - 1)
            verdict = spec.verify(spoilt(reference[len(said) :][:n], at))
            said += [*verdict.accepted, verdict.bonus]
            n_rounds += 1
            assert len(verdict.accepted) <= (n if at is None else at)
            assert spec.state.n_past == len(PROMPT) - 1 + len(said)
        assert_same(models, arch, PROMPT, said, reference)


@each
def test_what_was_rejected_has_no_influence_on_what_follows(models: Models, arch: Arch) -> None:
    """L2, bit by bit: rounds of equal widths and acceptance, but for the tokens that are rejected."""
    spec = models.get(arch, **OPTIONS)
    reference = plain(spec, PROMPT, 80)
    seen: list[list[Any]] = []
    for by in (1, 100):
        spec.reset()
        spec.prefill(PROMPT)
        said, rows = 0, []
        for n, at in ((7, 0), (7, 3), (3, 1), (7, 6), (1, 0), (5, 2), (7, 3)):
            verdict = spec.verify(spoilt(reference[said : said + n], at, by))
            assert len(verdict.accepted) == at, "the reference is at a near tie; change the prompt"
            rows.append(spec.logits()[: at + 1])
            said += at + 1
        seen.append(rows)
    for one, other in zip(*seen):
        np.testing.assert_array_equal(one, other)


@each
def test_the_state_after_a_rejection_is_that_of_the_accepted_prefix(models: Models, arch: Arch) -> None:
    """Against an object that has never seen the rejected tokens."""
    spec, fresh = models.get(arch, **OPTIONS), models.get(arch, n_ubatch=256, **OPTIONS)
    reference = plain(spec, PROMPT, 40)
    exact = spec.rollback == "checkpoint"
    for at in range(N_MAX):
        for one, first in ((spec, spoilt(reference[:N_MAX], at)), (fresh, reference[:at])):
            one.reset()
            one.prefill(PROMPT)
            verdict = one.verify(first)
            assert (len(verdict.accepted), verdict.bonus) == (at, reference[at])
            one.verify(reference[at + 1 : at + 5])
        ours, theirs = spec.logits(), fresh.logits()
        if exact:  # the same rows ran in a batch of the same width
            np.testing.assert_array_equal(ours, theirs)
        else:
            np.testing.assert_allclose(ours, theirs, atol=5e-3)
            assert np.abs(ours - theirs).max() < 0.1 * np.abs(theirs - theirs.mean()).max()


@each
def test_logits_of_rejected_rows_can_be_read_until_the_next_step(models: Models, arch: Arch) -> None:
    spec = models.get(arch, **OPTIONS)
    reference = plain(spec, PROMPT, 8)
    spec.reset()
    spec.prefill(PROMPT)
    verdict = spec.verify(spoilt(reference[:N_MAX], 2))
    assert spec.logits().argmax(axis=1).tolist() == list(verdict.chosen)


def test_the_mode_is_the_best_that_the_memory_has(models: Models) -> None:
    found = {repr(arch): models.get(arch, **OPTIONS).rollback for arch in [*CUT, *RECURRENT]}
    expected = {repr(arch): "cut" for arch in CUT} | {repr(arch): "checkpoint" for arch in RECURRENT}
    assert found == expected | dict.fromkeys(SNAPSHOTS, "snapshots")


@each_recurrent
def test_nothing_of_one_prompt_is_left_in_the_next(models: Models, arch: Arch) -> None:
    spec = models.get(arch, **OPTIONS)
    alone = {tuple(prompt): plain(spec, prompt, 24) for prompt in (PROMPT, OTHER)}
    spec.reset()
    for i, prompt in enumerate([PROMPT, OTHER] * 5):
        spec.prefill(prompt)  # no reset between them
        said: list[int] = []
        reference = alone[tuple(prompt)]
        while len(said) < 16 and reference[: len(said)] == said:
            verdict = spec.verify(spoilt(reference[len(said) :][:N_MAX], (i + len(said)) % N_MAX))
            said += [*verdict.accepted, verdict.bonus]
        assert_same(models, arch, prompt, said[:16], reference)


@each_recurrent
def test_reset_leaves_nothing_of_the_state(models: Models, arch: Arch) -> None:
    """S9: A, reset(), then B, which begins like A, is B of an object that has seen nothing; so is A again."""
    turns = [PROMPT, [*PROMPT[:15], *OTHER], PROMPT]
    with models.fresh(arch, **OPTIONS) as spec:
        for i, prompt in enumerate(turns):
            spec.prefill(prompt)
            said = [spec.verify([]).bonus for _ in range(12)]
            spec.verify([wrong(said[-1])] * N_MAX)  # leaves rows that were rejected and not yet taken back
            with models.fresh(arch, **OPTIONS) as other:
                other.prefill(prompt)
                assert said == [other.verify([]).bonus for _ in range(12)], i
            spec.reset()
            assert spec.state.n_past == 0


@each
@pytest.mark.parametrize("at", [0, 2, N_MAX])
def test_the_next_turn_goes_on_from_what_was_said(models: Models, arch: Arch, at: int) -> None:
    spec, fresh = models.get(arch, **OPTIONS), models.get(arch, n_ubatch=256, **OPTIONS)
    reference = plain(spec, PROMPT, 40)
    for n_kept in range(-1, at + 1):  # of the last verify's rows, after the first of them
        spec.reset()
        spec.prefill(PROMPT)
        spec.verify([])
        spec.verify(spoilt(reference[1 : 1 + N_MAX], None if at == N_MAX else at))
        kept = [*PROMPT, *reference[: 1 + n_kept]]
        turn = [*kept, wrong(reference[1 + n_kept]), *OTHER]
        n_cached = spec.prefill(turn)
        # All of it; but there is no snapshot before the first row.
        assert n_cached == (0 if n_kept < 0 and spec.rollback == "snapshots" else len(kept))
        ours = [spec.verify([]).bonus for _ in range(12)]
        assert_same(models, arch, turn, ours, plain(fresh, turn, 12))


@each_recurrent
def test_a_prompt_that_needs_an_earlier_state_starts_over(models: Models, arch: Arch) -> None:
    spec, fresh = models.get(arch, **OPTIONS), models.get(arch, n_ubatch=256, **OPTIONS)
    reference = plain(spec, PROMPT, 20)
    for n_wide, variation in (
        (3, [*PROMPT[:15], *OTHER]),
        (3, PROMPT[:12]),
        (3, [*PROMPT, reference[0], *OTHER]),
        (0, [*PROMPT, reference[0], *OTHER]),  # no more than n_max tokens back, but of these there are no snapshots
    ):
        spec.reset()
        spec.prefill(PROMPT)
        for i in range(n_wide):
            spec.verify(spoilt(reference[4 * i :][:N_MAX], 3))
        for _ in range(4):
            spec.verify([])
        assert spec.prefill(variation) == 0
        ours = [spec.verify([]).bonus for _ in range(12)]
        assert_same(models, arch, variation, ours, plain(fresh, variation, 12))


@dataclasses.dataclass(frozen=True)
class Twins:
    """A model whose tokens have twins: logits that differ less than those of one row in batches of two widths."""

    arch: Arch

    def file(self) -> File:
        out = self.arch.file()
        head = out.tensors["output.weight"]
        noise = np.random.default_rng(3).standard_normal(head[1::2].shape).astype(np.float32)
        head[1::2] = head[: 2 * (len(head) // 2) : 2] + 1e-8 * noise
        return out


@pytest.mark.parametrize("name", ["llama", "qwen35", "mamba", "jamba", "rwkv7"])
def test_a_near_tie_is_not_tried_again_for_ever(models: Models, name: str) -> None:
    """Which twin wins may depend on the batch, so what was chosen once is rejected, or the other way round."""
    spec: pd.Speculator = models.get(Twins(ARCHS[name]), **OPTIONS)  # type: ignore[arg-type]
    reference = plain(spec, PROMPT, 60)
    spec.reset()
    spec.prefill(PROMPT)
    said: list[int] = []
    for n_rounds in range(1, 41):
        twins = [min(token ^ (n_rounds & 1), N_VOCAB - 1) for token in reference[len(said) :][: 1 + n_rounds % N_MAX]]
        verdict = spec.verify(twins)
        said += [*verdict.accepted, verdict.bonus]
        assert len(said) >= n_rounds
        assert spec.state.n_past == len(PROMPT) - 1 + len(said)
        if len(said) >= 50:
            break


@each_recurrent
@pytest.mark.parametrize("options", [{"n_ctx": 5}, {"n_ctx": 24, "n_ubatch": 1}, {"n_max": 0}, {"n_max": 1}], ids=repr)
def test_small_sizes_do(models: Models, arch: Arch, options: dict[str, Any]) -> None:
    """llama.cpp asserts that a batch may be larger than the rows that are taken back."""
    prompt = PROMPT[:3]
    with models.fresh(arch, **{**OPTIONS, **options}) as spec:
        reference = plain(models.get(arch, **OPTIONS), prompt, 40)
        spec.prefill(prompt)
        said: list[int] = []
        while spec.state.n_past < spec.n_ctx:
            n = min(spec.n_max, spec.n_ctx - spec.state.n_past - 1)
            verdict = spec.verify(spoilt(reference[len(said) :][:n], 1 if n > 1 else None))
            said += [*verdict.accepted, verdict.bonus]
        with pytest.raises(pd.ContextFullError):
            spec.verify([])
    assert_same(models, arch, prompt, said, reference)


@pytest.mark.parametrize("name", ["llama", "qwen35", "mamba", "jamba"])
def test_a_depth_of_any_size_is_an_answer(models: Models, name: str) -> None:
    """S21: it opens and takes that many wrong tokens back, or it is refused; the process goes on."""
    code = """
        import sys, pyllama_dflash as pd
        for n_max in map(int, sys.argv[2:]):
            try:
                with pd.Speculator(sys.argv[1], n_max=n_max, n_ctx=300, n_threads=1) as spec:
                    spec.prefill([5, 6, 7])
                    for _ in range(2):
                        assert len(spec.verify([9] * spec.n_max).accepted) < 9
                    print(spec.n_max, end=" ")
            except ValueError as error:
                assert f"n_max={n_max} " in str(error), error
                print("refused", end=" ")
    """
    depths = (0, 1, 16, 64, 255, 256, 100000, 2**31 - 1, 2**31, -1)
    said = child.output(code, models.files.path(ARCHS[name]), *depths).split()
    assert said == ["0", "1", "16", "64", "255", *["refused"] * 5]


def test_what_rollback_takes_is_in_the_figures(models: Models) -> None:
    for name, n_states in (("qwen35", 1 + N_MAX), ("mamba", 2)):
        sizes = []
        for n_max in (0, N_MAX):
            with models.fresh(ARCHS[name], **{**OPTIONS, "n_max": n_max}) as spec:
                sizes.append(spec.memory.total.target_kv)
                file = _fit.File(str(spec.target.path).encode(), load_of_target(spec.params))
                planned = _fit.make_plan(file, None, engine_fields(spec.params))
            assert total_of(planned.devices).target_kv == sizes[-1]
        # K and V of 2 layers, 2 heads of 16 values in F16
        attention = 2 * 2 * 512 * 2 * 16 * 2 if name == "qwen35" else 0
        assert sizes[1] - attention == n_states * (sizes[0] - attention)


# with a draft ---------------------------------------------------------------------------------------------------------


def wide(name: str, **keys: Any) -> Arch:
    """As wide as the tiny drafts are."""
    arch = ARCHS[name]
    return dataclasses.replace(arch, keys=arch.keys | {"embedding_length": 320} | keys, note=f"{name}-320")


PAIRED = {name: wide(name) for name in ("qwen35", "nemotron_h", "qwen3next")}
PAIRED |= {name: wide(name, **{"attention.head_count": 20}) for name in ("lfm2", "minimax-01")}


@pytest.mark.parametrize("name", PAIRED)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "llama.cpp's"])
def test_drafts_come_from_the_features_of_what_was_accepted(models: Models, name: str, fused: bool) -> None:
    arch, draft = PAIRED[name], Draft(layers=(2, 1))
    options = {"fused_draft": fused, "backend_argmax": False}
    spec = models.get(arch, draft, **options)
    result = checked_run(spec, PROMPT, max_tokens=100, ignore_eos=True)
    reference = models.plain(arch, PROMPT, max_tokens=100, ignore_eos=True)
    assert_same(models, arch, PROMPT, result.tokens, reference.tokens)
    fresh = models.get(arch, draft, n_ubatch=256, **options)
    spec.reset()
    spec.prefill(PROMPT)
    said: list[int] = []
    for at in (0, 3, 6, None, 2):
        verdict = spec.verify(spoilt(reference.tokens[len(said) : len(said) + N_MAX], at))
        said += [*verdict.accepted, verdict.bonus]
        assert said == list(reference.tokens[: len(said)])
        fresh.reset()
        fresh.prefill([*PROMPT, *said])
        ours, theirs = spec.draft(), fresh.draft()
        assert ours.tokens == theirs.tokens
        np.testing.assert_allclose(ours.scores, theirs.scores, atol=0.02)
