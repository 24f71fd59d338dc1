"""Options: their defaults, ranges and messages, and what a wrong one leaves behind."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from laws import TINY, Models, checked_run
from tiny import N_VOCAB, SAID, Draft, Files, Target

import pyllama_dflash as pd

NAN, INF = float("nan"), float("inf")
PROMPT = "the quick brown fox"
TARGET = Target(weights="Q8_0")
OPEN = {
    "n_ctx": 0,
    "n_ubatch": 512,
    "n_gpu_layers": -1,
    "n_gpu_layers_draft": -1,
    "devices": None,
    "devices_draft": None,
    "n_ctx_draft": 0,
    "split_mode": "layer",
    "main_gpu": 0,
    "tensor_split": None,
    "use_mmap": True,
    "use_mlock": False,
    "n_threads": None,
    "flash_attn": "auto",
    "type_k": "f16",
    "type_v": "f16",
    "type_k_draft": "f16",
    "type_v_draft": "f16",
    "kv_unified": False,
    "cache_ram": 1024,
    "cuda_graphs": "auto",
    "n_max": None,
    "n_min": 0,
    "margin": 0.0,
    "p_min": 0.0,
    "backend_argmax": True,
    "fused_draft": True,
    "draft_vocab": True,
}
RUN = {
    "max_tokens": 256,
    "stop": (),
    "ignore_eos": False,
    "n_max": None,
    "n_min": None,
    "margin": None,
    "p_min": None,
    "speculate": True,
}


def defaults(function: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


# names and defaults ---------------------------------------------------------------------------------------------------


def test_defaults_are_frozen() -> None:
    assert dataclasses.asdict(pd.Params()) == OPEN
    assert dataclasses.asdict(pd.GenerateParams()) == RUN
    assert defaults(pd.Speculator.__init__) == OPEN
    for method in (pd.Speculator.run, pd.Speculator.stream):
        assert defaults(method) == {"messages": None, "chat_template_kwargs": None, **RUN}
    assert all(field.metadata["help"] for field in dataclasses.fields(pd.Params))


@pytest.mark.parametrize("name", ["n_batch", "seed", "ngram", "verbose", "draft_n_max", "device", "n_parallel"])
def test_an_unknown_option_of_the_object_is_refused(pair: tuple[Path, Path], name: str) -> None:
    options: dict[str, Any] = {name: 1}
    with pytest.raises(TypeError, match=name):
        pd.Speculator(*pair, **options)


@pytest.mark.parametrize(
    "name",
    ["temperature", "top_k", "top_p", "seed", "grammar", "response_format", "logits_processor", "penalty"],
)
def test_an_unknown_option_of_a_call_is_refused(models: Models, name: str) -> None:
    spec = models.get(TARGET, Draft())
    options: dict[str, Any] = {name: 1}
    for call in (spec.run, spec.stream):
        with pytest.raises(TypeError, match=name):
            call(PROMPT, **options)


@pytest.mark.parametrize("name", ["save_state", "load_state", "shift", "n_seq", "embed"])
def test_what_is_not_offered_does_not_exist(name: str) -> None:
    assert not hasattr(pd.Speculator, name)
    assert name not in inspect.signature(pd.Speculator).parameters


def test_positional_options_are_refused(pair: tuple[Path, Path]) -> None:
    with pytest.raises(TypeError):
        pd.Speculator(*pair, 512)  # type: ignore[call-arg]


# ranges ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_max": 8}, r"n_max=8 exceeds block_size-1=7 of draft-\d+\.gguf; lower n_max"),
        ({"n_max": 40}, "n_max=40 exceeds block_size-1=7"),
        ({"n_max": 100000}, "n_max=100000 exceeds block_size-1=7"),
        ({"n_max": 2**31}, "n_max=2147483648 exceeds"),
        ({"n_max": -1}, "n_max=-1 is below 0; raise n_max"),
        ({"n_min": 8}, "n_min=8 exceeds block_size-1=7"),
        ({"n_min": -1}, "n_min=-1 is below 0"),
        ({"n_min": 4, "n_max": 3}, "n_min=4 exceeds n_max=3; lower n_min or raise n_max"),
        ({"margin": NAN}, "margin=nan is out of range; use a finite number >= 0"),
        ({"margin": -0.1}, "margin=-0.1 is out of range"),
        ({"margin": INF}, "margin=inf is out of range"),
        ({"p_min": NAN}, "p_min=nan is out of range; use a number from 0 to 1"),
        ({"p_min": 1.01}, "p_min=1.01 is out of range"),
        ({"p_min": -0.01}, "p_min=-0.01 is out of range"),
        ({"n_ctx": -1}, "n_ctx=-1 is below 0"),
        ({"n_ubatch": 0}, "n_ubatch=0 is below 1"),
        ({"n_ubatch": 10**6}, "n_ubatch=1000000 is out of range, 1 to 65536"),
        ({"n_threads": 0}, "n_threads=0 is below 1"),
        ({"n_threads": 100000}, "n_threads=100000 is out of range, 1 to 512"),
        ({"flash_attn": "yes"}, "flash_attn='yes' is unknown; use auto, on or off"),
        ({"type_k": "q2_k"}, "type_k='q2_k' is not a type of K/V cache; use f16"),
        ({"type_v_draft": "Q8"}, "type_v_draft='Q8' is not a type of K/V cache"),
        ({"type_k_draft": ""}, "type_k_draft='' is not a type of K/V cache"),
        ({"n_gpu_layers": -2}, "n_gpu_layers=-2 is below -1"),
    ],
)
def test_a_value_out_of_range_names_itself_the_limit_and_the_fix(
    pair: tuple[Path, Path], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pd.Speculator(*pair, **{**TINY, **options})


@pytest.mark.parametrize(
    "options",
    [
        {"n_max": True},
        {"n_max": 3.5},
        {"n_max": "3"},
        {"margin": "1"},
        {"margin": None},
        {"p_min": True},
        {"n_ctx": None},
        {"n_threads": 1.0},
        {"backend_argmax": 1},
        {"type_k": 8},
        {"flash_attn": 1},
    ],
    ids=repr,
)
def test_a_value_of_another_type_is_a_type_error(pair: tuple[Path, Path], options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(options))):
        pd.Speculator(*pair, **{**TINY, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_max": 6}, "n_max=6 exceeds n_max=5 that this Speculator was opened with; lower n_max"),
        ({"n_max": -1}, "n_max=-1 is below 0"),
        ({"n_min": 6}, "n_min=6 exceeds n_max=5"),
        ({"n_min": 3, "n_max": 2}, "n_min=3 exceeds n_max=2"),
        ({"margin": NAN}, "margin=nan is out of range"),
        ({"p_min": 2}, "p_min=2"),
        ({"max_tokens": -1}, "max_tokens=-1 is below 0"),
        ({"max_tokens": 2**31}, "max_tokens=2147483648 exceeds"),
        ({"stop": ""}, "stop='' would end every reply at once"),
        ({"stop": ["a", ""]}, "stop=''"),
    ],
)
def test_a_call_out_of_range_leaves_the_object_as_it_was(models: Models, options: dict[str, Any], message: str) -> None:
    spec = models.get(TARGET, Draft(), n_max=5)
    reference = checked_run(spec, PROMPT, max_tokens=16)
    before = spec.state
    for call in (spec.run, spec.stream):
        with pytest.raises(ValueError, match=message):
            call(PROMPT, **options)
    assert spec.state == before
    assert checked_run(spec, PROMPT, max_tokens=16).tokens == reference.tokens


@pytest.mark.parametrize("name", ["n_min", "margin", "p_min", "type_k_draft", "type_v_draft", "n_gpu_layers_draft"])
def test_an_option_that_would_have_no_effect_is_refused(pair: tuple[Path, Path], name: str) -> None:
    value: Any = "q8_0" if name.startswith("type") else 1
    with pytest.raises(ValueError, match=f"{name}=.* has no effect without a draft"):
        pd.Speculator(pair[0], **TINY, **{name: value})


def test_options_are_not_changed_by_use(files: Files) -> None:
    params = pd.Params(n_max=2, margin=1)
    values = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    before = dict(values)
    for draft in (Draft(), Draft(version=1)):
        with pd.Speculator(files.path(TARGET), files.path(draft), **{**values, **TINY}) as spec:
            assert checked_run(spec, PROMPT, max_tokens=5).stats.predicted_n == 5
            assert spec.params == dataclasses.replace(params, **TINY)
    assert values == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n_max = 3  # type: ignore[misc]


@pytest.mark.parametrize("n_max", [0, 1, 3, 7])
def test_the_effective_n_max_can_be_read_and_holds(models: Models, n_max: int) -> None:
    spec = models.get(TARGET, Draft(), n_max=n_max)
    assert spec.n_max == n_max
    result = checked_run(spec, PROMPT, max_tokens=40)
    assert len(result.stats.histogram) == n_max + 1
    assert models.get(TARGET, Draft()).n_max == 7


# cuts -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [Draft(), Draft(version=1), Draft(reduced=True)], ids=["2", "1", "reduced"])
@pytest.mark.parametrize(("name", "values"), [("margin", [0, 0.2, 1, 5, 1e9]), ("p_min", [0, 0.2, 0.5, 0.9, 1])])
def test_a_higher_bar_drafts_no_more(models: Models, draft: Draft, name: str, values: list[float]) -> None:
    spec = models.get(TARGET, draft)
    spec.prefill(PROMPT)
    totals = dict.fromkeys(values, 0)
    for _ in range(30):
        whole = spec.draft()
        lengths = []
        for value in values:
            cut = spec.draft(margin=value) if name == "margin" else spec.draft(p_min=value)
            assert cut.tokens == whole.tokens[: len(cut.tokens)]
            assert len(cut.tokens) == bar(whole, name, value)
            lengths.append(len(cut.tokens))
            totals[value] += len(cut.tokens)
        assert lengths == sorted(lengths, reverse=True)
        spec.verify(whole)
    assert totals[values[0]] == 30 * 7
    assert len(set(totals.values())) >= 3  # the bars in between do cut


def bar(draft: pd.Draft, name: str, value: float) -> int:
    """How many tokens come before the first one that is less sure."""
    scores = draft.scores.astype(np.float64)
    sure = draft.margins if name == "margin" else 1 / np.exp(scores - scores[:, :1]).sum(axis=1)
    below = np.flatnonzero(np.asarray(sure, np.float32) < np.float32(value))
    return int(below[0]) if value and below.size else len(draft.tokens)


@given(n_min=st.integers(0, 7), margin=st.floats(0, 20), p_min=st.floats(0, 1))
def test_cuts_change_no_text(models: Models, n_min: int, margin: float, p_min: float) -> None:
    reference = models.plain(TARGET, PROMPT, max_tokens=32)
    spec = models.get(TARGET, Draft())
    result = checked_run(spec, PROMPT, max_tokens=32, n_min=n_min, margin=margin, p_min=p_min)
    models.assert_same(TARGET, PROMPT, result.tokens, reference.tokens)


def test_a_draft_shorter_than_n_min_is_dropped(models: Models) -> None:
    spec = models.get(TARGET, Draft())
    spec.prefill(PROMPT)
    seen = set()
    for _ in range(30):
        n = len(spec.draft(margin=1.0).tokens)
        for n_min in range(8):
            assert len(spec.draft(margin=1.0, n_min=n_min).tokens) == (n if n >= n_min else 0)
        seen.add(n)
        spec.verify([])
    assert len(seen) >= 3


def test_a_draft_tells_its_candidates(models: Models) -> None:
    for like, k in ((Draft(), 16), (Draft(version=1), 10), (Draft(reduced=True), 16)):
        spec = models.get(TARGET, like)
        spec.prefill(PROMPT)
        draft = spec.draft(n_max=4)
        assert draft.candidates.shape == draft.scores.shape == (4, k)
        assert draft.candidates[:, 0].tolist() == list(draft.tokens)
        assert (np.diff(draft.scores, axis=1) <= 0).all()
        np.testing.assert_allclose(draft.margins, draft.scores[:, 0] - draft.scores[:, 1])
        assert all(len(set(row)) == k for row in draft.candidates.tolist())


# order ----------------------------------------------------------------------------------------------------------------


def test_a_step_out_of_order_raises_and_the_object_stays_usable(models: Models) -> None:
    reference = checked_run(models.get(TARGET, Draft()), PROMPT, max_tokens=16)
    with models.fresh(TARGET, Draft(), backend_argmax=False) as spec:
        for step in (spec.draft, lambda: spec.verify([]), lambda: spec.verify([1, 2]), spec.logits):
            with pytest.raises(pd.OrderError, match="first"):
                step()
        spec.prefill(PROMPT)
        with pytest.raises(pd.OrderError, match="verify"):
            spec.logits()
        old = spec.draft()
        spec.verify(old)
        with pytest.raises(pd.OrderError, match="draft again"):
            spec.verify(old)
        spec.reset()
        with pytest.raises(pd.OrderError):
            spec.verify(old)
        assert checked_run(spec, PROMPT, max_tokens=16).tokens == reference.tokens


def test_steps_with_bad_tokens_change_nothing(models: Models) -> None:
    spec = models.get(TARGET, Draft())
    spec.prefill(PROMPT)
    before = spec.state
    for tokens in ([N_VOCAB], [-1], [0, 2**31], [0] * 8):
        with pytest.raises(ValueError, match=r"vocabulary|n_max=7"):
            spec.verify(tokens)
    for wrong in ("abc", [0.5], [[1]]):
        with pytest.raises(TypeError):
            spec.verify(wrong)  # type: ignore[arg-type]
    assert spec.state == before
    with pytest.raises(ValueError, match="backend_argmax=False"):
        spec.logits()


def test_steps_without_a_draft_are_plain_decoding(models: Models) -> None:
    spec = models.get(TARGET)
    spec.prefill(PROMPT)
    draft = spec.draft()
    assert draft.tokens == ()
    assert draft.candidates.shape == (0, 0)
    said = [spec.verify(spec.draft()).bonus for _ in range(10)]
    assert tuple(said) == models.plain(TARGET, PROMPT, max_tokens=10).tokens
    with pytest.raises(ValueError, match="has no effect without a draft"):
        spec.draft(n_max=1)


# K/V types ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("like", [Draft(), Draft(version=1)], ids=["DFlash2", "DFlash"])
@pytest.mark.parametrize("sides", [("k",), ("v",), ("k", "v")], ids="".join)
def test_a_q8_0_cache_of_the_draft_costs_little_acceptance(models: Models, like: Draft, sides: tuple[str, ...]) -> None:
    types: dict[str, Any] = {f"type_{side}_draft": "q8_0" for side in sides}
    prompts = [PROMPT, "in the end", [*SAID[3:9], *range(60, 90)]]
    accepted = {"f16": 0, "q8_0": 0}
    for prompt in prompts:
        reference = models.plain(TARGET, prompt, max_tokens=48)
        for name, options in (("f16", {}), ("q8_0", types)):
            result = checked_run(models.get(TARGET, like, **options), prompt, max_tokens=48)
            models.assert_same(TARGET, prompt, result.tokens, reference.tokens)
            accepted[name] += result.stats.draft_n_accepted
    assert accepted["q8_0"] >= 0.85 * accepted["f16"] > 0


@pytest.mark.parametrize("sides", [("k",), ("v",), ("k", "v")], ids="".join)
def test_a_q8_0_cache_of_the_target_speaks_its_own_text_with_or_without_a_draft(
    models: Models, sides: tuple[str, ...]
) -> None:
    types: dict[str, Any] = {f"type_{side}": "q8_0" for side in sides}
    reference = checked_run(models.get(TARGET, **types), PROMPT, max_tokens=48)
    result = checked_run(models.get(TARGET, Draft(), **types), PROMPT, max_tokens=48)
    assert result.tokens == reference.tokens
    assert result.stats.draft_n_accepted > 0


@pytest.mark.parametrize("option", ["type_k", "type_v"])
def test_a_quantised_cache_needs_heads_of_whole_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr(tiny, "D_HEAD", 40)
    monkeypatch.setattr(tiny, "N_HEAD", 8)
    path = Target().file().write(tmp_path / "target.gguf")
    message = f"{option}=q8_0 stores 32 values at a time and a head of target.gguf has 40; use f16"
    with pytest.raises(ValueError, match=message):
        pd.Speculator(path, **{option: "q8_0"})
    with pd.Speculator(path, n_ctx=64) as spec:
        assert spec.run("the quick", max_tokens=4).tokens
