"""The demo pair, real models: the text of plain decoding in fewer rounds."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from laws import NEAR_TIE_QUANTISED, assert_near_tie, checked_run, first_difference, width_spread

import pyllama_dflash as pd

pytestmark = pytest.mark.model

LINES = (Path(__file__).resolve().parents[1] / "bench/prompts.jsonl").read_text(encoding="utf-8").splitlines()
PROMPTS = [(line["kind"], line["text"]) for line in map(json.loads, LINES)]
# Of each prompt's first 64 tokens: rounds, tokens drafted and accepted.
GOLDEN = {
    0: (12, 78, 52),
    3: (9, 62, 55),
    5: (24, 150, 40),
    12: (14, 95, 50),
    14: (11, 76, 53),
    17: (24, 151, 40),
}
OPTIONS: dict[str, Any] = {"n_ctx": 512}
Same = Callable[[Any, pd.Result, pd.Result], None]


@pytest.fixture(scope="module")
def spec(demo: tuple[Path, Path]) -> Iterator[pd.Speculator]:
    with pd.Speculator(*demo, **OPTIONS) as spec:
        yield spec


@pytest.fixture(scope="module")
def plain(demo: tuple[Path, Path]) -> Iterator[pd.Speculator]:
    with pd.Speculator(demo[0], **OPTIONS) as plain:
        yield plain


@pytest.fixture(scope="module")
def spread(demo: tuple[Path, Path]) -> list[float]:
    """Greatest difference of a logit from that of a batch of one, at widths 1 to 8."""
    return width_spread(demo[0], PROMPTS[0][1], 8, **OPTIONS)


@pytest.fixture(scope="module")
def assert_same(demo: tuple[Path, Path], spec: pd.Speculator, spread: list[float]) -> Same:
    """L3: the same tokens; where rows depend on the width, a near tie at the first difference, which is named."""

    def assert_same(messages: Any, ours: pd.Result, reference: pd.Result) -> None:
        at = first_difference(ours.tokens, reference.tokens)
        if at is None:
            assert (ours.text, ours.finish_reason) == (reference.text, reference.finish_reason)
            return
        assert any(spread), "a difference, and rows do not depend on the width"
        ids = spec.target.tokenize(spec.target.apply_chat_template(messages), add_special=False)
        rivals = ours.tokens[at], reference.tokens[at]
        assert_near_tie(demo[0], ids, reference.tokens[:at], rivals, **OPTIONS)
        print(f"near tie at token {at} of the reply to {messages!r}: {rivals}")

    return assert_same


def test_l3_control_rows_at_widths_1_to_8(spread: list[float], record_property: Callable[[str, object], None]) -> None:
    record_property("greatest difference of a logit, by width", spread)
    print("demo", " ".join(f"{n}:{value:.2g}" for n, value in enumerate(spread, 1)))
    assert spread[0] == 0
    assert max(spread) < NEAR_TIE_QUANTISED


@pytest.mark.parametrize("index", GOLDEN)
def test_l3_text_is_that_of_plain_decoding(
    spec: pd.Speculator, plain: pd.Speculator, assert_same: Same, index: int
) -> None:
    prompt = PROMPTS[index][1]
    ours, reference = (checked_run(each, messages=prompt, max_tokens=64) for each in (spec, plain))
    assert_same(prompt, ours, reference)


def test_rounds_and_acceptance_are_those_known(spec: pd.Speculator) -> None:
    """All together: a near tie of other kernels turns a reply, and with it what is accepted of its draft."""
    stats = [checked_run(spec, messages=PROMPTS[index][1], max_tokens=64).stats for index in GOLDEN]
    n_rounds, draft_n, accepted = (sum(column) for column in zip(*GOLDEN.values()))
    assert sum(s.n_rounds for s in stats) == pytest.approx(n_rounds, rel=0.15)
    ours = sum(s.draft_n_accepted for s in stats) / sum(s.draft_n for s in stats)
    assert ours == pytest.approx(accepted / draft_n, abs=0.06)


@pytest.mark.slow
def test_l3_all_prompts(spec: pd.Speculator, plain: pd.Speculator, assert_same: Same) -> None:
    counts: dict[str, list[int]] = {"all": [0, 0], "code": [0, 0]}
    for kind, prompt in PROMPTS:
        ours, reference = (checked_run(each, messages=prompt, max_tokens=128) for each in (spec, plain))
        assert_same(prompt, ours, reference)
        for name in {"all", kind} & set(counts):
            counts[name][0] += ours.stats.n_rounds
            counts[name][1] += ours.stats.draft_n_accepted
    mean_len = {name: 1 + accepted / n_rounds for name, (n_rounds, accepted) in counts.items()}
    print(mean_len)
    assert mean_len["all"] >= 3.3
    assert mean_len["code"] >= 4.0


@pytest.mark.slow
def test_answers_to_short_sums_are_the_same(spec: pd.Speculator, plain: pd.Speculator, assert_same: Same) -> None:
    for i in range(30):
        prompt = f"What is {3 + 7 * i % 20} + {2 + 5 * i % 9}? Answer with one number."
        ours, reference = (checked_run(each, messages=prompt, max_tokens=12) for each in (spec, plain))
        assert_same(prompt, ours, reference)


def test_a_second_turn_reuses_the_first_and_drafts_as_well(
    demo: tuple[Path, Path], spec: pd.Speculator, plain: pd.Speculator, assert_same: Same
) -> None:
    question = {"role": "user", "content": "Write a Python function that adds two numbers."}
    other = {"role": "user", "content": "Name three colours."}  # has the start of the template in common
    spec.reset()
    plain.reset()
    chat, n_cached = [question], []
    for messages, max_tokens in (([question], 48), ([other], 8), (chat, 48), (chat, 48)):
        ours, reference = (checked_run(each, messages=messages, max_tokens=max_tokens) for each in (spec, plain))
        assert_same(messages, ours, reference)
        assert ours.stats.prompt_n_cached == reference.stats.prompt_n_cached
        n_cached.append(ours.stats.prompt_n_cached)
        if len(n_cached) == 3:
            n_first = n_cached[-1] + ours.stats.prompt_n + len(ours.tokens)
            chat += [{"role": "assistant", "content": ours.text}, {"role": "user", "content": "Now multiply them."}]
    assert n_cached[0] == 0 < n_cached[1] == n_cached[2]
    assert n_cached[3] == n_first - 1
    # A cold prefill takes more rows at once, and the text may differ; the drafts must be as good.
    with pd.Speculator(*demo, **OPTIONS) as fresh:
        cold = checked_run(fresh, messages=chat, max_tokens=48)
    assert ours.stats.mean_len >= 0.7 * cold.stats.mean_len > 1.5


@pytest.mark.slow
@pytest.mark.parametrize("sides", [("k",), ("v",), ("k", "v")], ids="".join)
def test_a_q8_0_cache_of_the_draft_costs_little_acceptance(
    demo: tuple[Path, Path], spec: pd.Speculator, assert_same: Same, sides: tuple[str, ...]
) -> None:
    types: dict[str, Any] = {f"type_{side}_draft": "q8_0" for side in sides}
    accepted = [0, 0]
    with pd.Speculator(*demo, **{**OPTIONS, **types}) as small:
        for index in (0, 14):
            results = [checked_run(each, messages=PROMPTS[index][1], max_tokens=48) for each in (spec, small)]
            assert_same(PROMPTS[index][1], results[1], results[0])
            accepted = [n + result.stats.draft_n_accepted for n, result in zip(accepted, results)]
    assert accepted[1] >= 0.85 * accepted[0]


def test_the_template_gives_one_beginning_token(spec: pd.Speculator) -> None:
    info, text = spec.target.info, spec.target.apply_chat_template("Hello")
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    ids = spec.target.tokenize(text, add_special=False)
    spec.reset()
    result = checked_run(spec, messages="Hello", max_tokens=1)
    assert result.stats.prompt_n == len(ids)
    assert ids[0] == info.bos != ids[1]
    spec.reset()
    assert checked_run(spec, ids, max_tokens=1).tokens == result.tokens


def test_a_healthy_start_logs_no_error(demo: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "pyllama_dflash"), pd.Speculator(*demo, **OPTIONS) as spec:
        checked_run(spec, messages="Hi", max_tokens=4)
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert len(caplog.records) > 10  # it was listening
