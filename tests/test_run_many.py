"""run_many: each reply is that of its own run(), whatever goes on beside it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from laws import Models, check_accounting
from tiny import EOS, Draft, Files, Target

import pyllama_dflash as pd
from pyllama_dflash import _ffi_engine

TARGET = Target(weights="Q8_0")
DRAFTS = [None, Draft(weights="Q8_0"), Draft(version=1, block=5, weights="Q8_0"), Draft(window=16, weights="Q8_0")]
PROMPTS = ["the", "an owl sat ", "in the end ", "the owl and the cat sat in the sun", "no", "a tree " * 30, "so it"]
OPTIONS: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}


def ids(draft: Draft | None) -> str:
    return f"dflash{draft.version}" if draft else "plain"


@pytest.fixture(params=DRAFTS[:2], ids=ids)
def spec(request: pytest.FixtureRequest, models: Models) -> pd.Speculator:
    return models.get(TARGET, request.param)


def good(result: pd.ManyResult) -> pd.Result:
    assert result.error is None
    assert result.result is not None
    return result.result


def tokens(results: Any) -> list[tuple[int, ...]]:
    return [good(result).tokens for result in results]


def solo(spec: pd.Speculator, prompts: Any = PROMPTS, **options: Any) -> list[tuple[int, ...]]:
    return [spec.run(prompt, **{**OPTIONS, **options}).tokens for prompt in prompts]


# what comes out ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_parallel", [1, 2, 3, 8])
@pytest.mark.parametrize("draft", DRAFTS, ids=ids)
def test_each_text_is_that_of_its_own_run(models: Models, draft: Draft | None, n_parallel: int) -> None:
    spec = models.get(TARGET, draft)
    lengths = [3, 40, 1, 17, 60, 8, 30]
    jobs = [{"prompt": prompt, "max_tokens": n} for prompt, n in zip(PROMPTS, lengths)]
    many = spec.run_many(jobs, n_parallel=n_parallel, ignore_eos=True)
    results = list(many)
    assert [result.index for result in results] == list(range(len(PROMPTS)))
    for prompt, n, result in zip(PROMPTS, lengths, map(good, results)):
        own = spec.run(prompt, max_tokens=n, ignore_eos=True)
        models.assert_same(TARGET, prompt, result.tokens, own.tokens)
        assert (len(result.tokens), result.finish_reason) == (n, "length")
        check_accounting(spec, result, max_tokens=n)
        stats = result.stats
        assert stats.prompt_n + stats.prompt_n_cached == len(spec.target.tokenize(prompt))
    assert (many.n_done, many.n_failed, many.predicted_n) == (len(PROMPTS), 0, sum(lengths))
    assert many.predicted_per_second == 1000 * many.predicted_n / many.t_ms > 0


@pytest.mark.parametrize("draft", [None, Draft(), Draft(version=1, own=True, block=16)], ids=ids)
def test_float_weights_differ_at_near_ties_at_most(models: Models, draft: Draft | None) -> None:
    spec = models.get(Target(), draft)
    for prompt, said in zip(PROMPTS, tokens(spec.run_many(PROMPTS, n_parallel=5, **OPTIONS))):
        models.assert_same(Target(), prompt, said, spec.run(prompt, **OPTIONS).tokens)


@pytest.mark.parametrize("options", [{"kv_unified": True}, {"backend_argmax": False}, {"fused_draft": False}], ids=str)
def test_other_ways_to_get_there(models: Models, options: dict[str, Any]) -> None:
    draft = DRAFTS[1]
    spec, own = models.get(TARGET, draft, **options), models.get(TARGET, draft)
    for prompt, said in zip(PROMPTS, tokens(spec.run_many(PROMPTS, n_parallel=3, **OPTIONS))):
        models.assert_same(TARGET, prompt, said, own.run(prompt, **OPTIONS).tokens)


def test_drafts_are_as_good_as_alone(models: Models) -> None:
    """S52: rows of all sequences fit into a launch, however small n_ubatch is."""
    spec = models.get(TARGET, DRAFTS[1], n_ubatch=4)
    alone = [spec.run(prompt, **OPTIONS).stats for prompt in PROMPTS]
    beside = [good(result).stats for result in spec.run_many(PROMPTS, n_parallel=7, **OPTIONS)]
    assert sum(stats.draft_n_accepted for stats in beside) > 0
    for one, other in zip(alone, beside):
        assert (one.histogram, one.per_position) == (other.histogram, other.per_position)


def test_options_of_each_prompt(spec: pd.Speculator) -> None:
    said = spec.run("the", **OPTIONS)
    stop = said.text[5:8]
    jobs: list[dict[str, Any]] = [
        {"prompt": "the"},
        {"prompt": "the", "stop": stop},
        {"prompt": "the", "max_tokens": 0},
        {"prompt": "the", "max_tokens": 1},
        {"prompt": "the", "speculate": False},
        {"messages": "the"},
        {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "the"}], "max_tokens": 5},
        {"prompt": [EOS, 3, 4], "stop": ["zz", "yy"]},
    ]
    if spec.draft_model:
        jobs += [{"prompt": "the", "n_max": n} for n in (0, 1, 4)]
        jobs += [{"prompt": "the", "n_min": 3, "margin": 0.1}, {"prompt": "the", "p_min": 0.5}]
    for job, result in zip(jobs, list(map(good, spec.run_many(jobs, n_parallel=3, **OPTIONS)))):
        own = spec.run(**{**OPTIONS, **job})
        assert (result.text, result.tokens, result.finish_reason) == (own.text, own.tokens, own.finish_reason)
        assert len(result.stats.histogram) == len(own.stats.histogram)
        assert result.stats.draft_n == own.stats.draft_n
    assert spec.run("the", **{**OPTIONS, "stop": stop}).finish_reason == "stop"


def test_prompts_of_each_form(spec: pd.Speculator) -> None:
    own = tokens(spec.run_many([{"prompt": "the"}], **OPTIONS))
    turn = [{"role": "user", "content": "the"}]
    forms: list[Any] = ["the", spec.target.tokenize("the"), np.array(spec.target.tokenize("the")), turn, tuple(turn)]
    said = tokens(spec.run_many(forms, n_parallel=2, **OPTIONS))
    assert said[:3] == own * 3
    assert said[3:] == [spec.run(messages="the", **OPTIONS).tokens] * 2
    rows = np.array([[3, 4, 5], [6, 7, 8]])
    assert tokens(spec.run_many(rows, **OPTIONS)) == solo(spec, rows)


def test_an_end_of_generation_token_ends_one_reply_alone(files: Files) -> None:
    target = Target(weights="Q8_0", eos=ord("n"))
    with pd.Speculator(files.path(target), n_ctx=256, n_threads=1) as spec:
        own = [spec.run(prompt, max_tokens=40) for prompt in PROMPTS]
        results = [good(result) for result in spec.run_many(PROMPTS, n_parallel=3, max_tokens=40)]
    assert [(r.tokens, r.finish_reason) for r in results] == [(r.tokens, r.finish_reason) for r in own]
    assert {result.finish_reason for result in own} == {"stop", "length"}


def test_the_context_ends_as_alone(models: Models) -> None:
    for draft in DRAFTS[:2]:
        spec = models.get(TARGET, draft, n_ctx=40)
        results = [good(result) for result in spec.run_many(PROMPTS[:5], n_parallel=5, max_tokens=99, ignore_eos=True)]
        own = [spec.run(prompt, max_tokens=99, ignore_eos=True) for prompt in PROMPTS[:5]]
        assert [(r.tokens, r.finish_reason) for r in results] == [(r.tokens, "length") for r in own]
        assert len({len(result.tokens) for result in own}) > 1


def test_as_they_are_ready(spec: pd.Speculator) -> None:
    jobs = [{"prompt": "the", "max_tokens": n} for n in (60, 1, 1, 1, 1, 1)]
    results = list(spec.run_many(jobs, n_parallel=2, ordered=False, ignore_eos=True))
    assert [result.index for result in results] == [1, 2, 3, 4, 5, 0]
    assert [len(good(result).tokens) for result in results] == [1] * 5 + [60]


@pytest.mark.parametrize("n", [0, 1, 2, 5])
@pytest.mark.parametrize("n_parallel", [1, 2, 64])
def test_any_number_of_prompts(spec: pd.Speculator, n: int, n_parallel: int) -> None:
    prompts = PROMPTS[:n]
    expected = solo(spec, prompts, max_tokens=6)
    for form in (prompts, iter(prompts)) if n_parallel < 64 else (prompts,):
        assert tokens(spec.run_many(form, n_parallel=n_parallel, max_tokens=6, ignore_eos=True)) == expected


# prompts that fail ----------------------------------------------------------------------------------------------------


class Sly:
    """Looks like ids until one looks closer."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no array today")


BAD: list[tuple[Any, type[Exception], str]] = [
    (None, ValueError, "either prompt or messages"),
    (3.5, TypeError, "not a flat sequence"),
    (b"the", TypeError, "are text, not ids"),
    ("", ValueError, "no tokens"),
    ([], ValueError, "no tokens"),
    ([1, 10**6], ValueError, "not in the vocabulary"),
    ([[1], [2, 3]], TypeError, "not a flat sequence"),
    ("the " * 3000, pd.ContextFullError, "n_ctx=512"),
    (Sly(), RuntimeError, "no array today"),
    ({}, ValueError, "either prompt or messages"),
    ({"prompt": "a", "messages": "b"}, ValueError, "not both"),
    ({"prompt": "a", "temperature": 1.0}, TypeError, "no temperature"),
    ({"prompt": "a", "max_tokens": -1}, ValueError, "max_tokens=-1 is below 0"),
    ({"prompt": "a", "max_tokens": "5"}, TypeError, "max_tokens='5'"),
    ({"prompt": "a", "n_max": 99}, ValueError, "n_max=99"),
    ({"prompt": "a", "stop": ""}, ValueError, "stop=''"),
    ({"messages": []}, ValueError, "no message"),
    ({"messages": [{"content": "x"}]}, ValueError, "no 'role'"),
]


@pytest.mark.parametrize("places", [(0,), (3,), (6,), range(7), (0, 3, 6)], ids=str)
def test_the_others_go_on(spec: pd.Speculator, places: Sequence[int]) -> None:
    fine, jobs = iter(PROMPTS), []
    for at, (bad, _, _) in enumerate(BAD[:7]):
        jobs.append(bad if at in places else next(fine))
    own = solo(spec, PROMPTS[: 7 - len(places)], max_tokens=6)
    for form in (jobs, iter(jobs)):
        many = spec.run_many(form, n_parallel=2, max_tokens=6, ignore_eos=True)
        results = list(many)
        assert [result.index for result in results] == list(range(7))
        assert [result.index for result in results if result.error] == list(places)
        assert tokens(result for result in results if result.error is None) == own
        assert (many.n_done, many.n_failed) == (7, len(places))


def test_each_error_is_the_one_of_run(models: Models) -> None:
    spec = models.get(TARGET, DRAFTS[1])
    for (bad, kind, text), result in zip(BAD, spec.run_many([bad for bad, _, _ in BAD], n_parallel=3)):
        assert type(result.error) is kind, (bad, result.error)
        assert text in str(result.error)
        assert result.result is None


def test_a_fault_of_the_iterable_comes_after_what_is_in_flight(spec: pd.Speculator) -> None:
    def prompts() -> Iterator[str]:
        yield from PROMPTS[:3]
        raise KeyError("mine")

    for ordered in (True, False):
        many, got = spec.run_many(prompts(), n_parallel=2, ordered=ordered, **OPTIONS), []
        with pytest.raises(KeyError, match="mine"):
            got.extend(many)
        assert sorted(tokens(got)) == sorted(solo(spec, PROMPTS[:3]))
        assert list(many) == []
        assert spec.run("the", max_tokens=1).tokens


@pytest.mark.parametrize(
    ("prompts", "options", "kind", "text"),
    [
        ("the", {}, TypeError, "one str"),
        (b"the", {}, TypeError, "one bytes"),
        ({"prompt": "the"}, {}, TypeError, "one dict"),
        (7, {}, TypeError, "prompts is of type int"),
        (None, {}, TypeError, "NoneType"),
        ([1, 2, 3], {}, TypeError, "ids of one prompt"),
        (np.array([1, 2]), {}, TypeError, "ids of one prompt"),
        (["a"], {"n_parallel": 0}, ValueError, "n_parallel=0 is below 1"),
        (["a"], {"n_parallel": 65}, ValueError, "n_parallel=65 exceeds 64"),
        (["a"], {"n_parallel": True}, TypeError, "n_parallel=True"),
        (["a"], {"n_parallel": "4"}, TypeError, "n_parallel='4'"),
        (["a"], {"ordered": 1}, TypeError, "ordered=1"),
        (["a"], {"max_tokens": -1}, ValueError, "max_tokens=-1"),
        (["a"], {"n_max": 8}, ValueError, "n_max=8"),
        (["a"], {"stop": 5}, TypeError, "stop=5"),
        (["a"], {"temperature": 1}, TypeError, "temperature"),
    ],
)
def test_arguments_are_checked_at_the_call(
    models: Models, prompts: Any, options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        models.get(TARGET, DRAFTS[1]).run_many(prompts, **options)


# how much is taken, and when ------------------------------------------------------------------------------------------


def test_prompts_are_taken_as_there_is_room(spec: pd.Speculator) -> None:
    n_taken = 0

    def prompts() -> Iterator[dict[str, Any]]:
        nonlocal n_taken
        for n in itertools.count(1):
            n_taken += 1
            yield {"prompt": "the", "max_tokens": 1 + n % 5}

    with spec.run_many(prompts(), n_parallel=3, ignore_eos=True) as many:
        assert n_taken == 0
        for n_done, _ in enumerate(itertools.islice(many, 40), 1):
            assert n_taken <= n_done + 3 + 4  # those in flight, and of those that end in one round all but the first


@pytest.mark.parametrize("ordered", [True, False])
def test_a_million_prompts_that_fail_are_not_kept(spec: pd.Speculator, ordered: bool) -> None:
    n_taken = 0

    def prompts() -> Iterator[Any]:
        nonlocal n_taken
        yield {"prompt": "the", "max_tokens": 200}
        for _ in range(10**6):
            n_taken += 1
            yield None

    with spec.run_many(prompts(), n_parallel=2, ordered=ordered, ignore_eos=True) as many:
        first = next(many)
        assert first.index == (0 if ordered else 1)
        for n_done in range(2, 2000):
            assert n_taken - n_done <= 16 * 2
            next(many)


def test_rounds_wait_for_no_more_than_a_chunk_of_a_prompt(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, calls = models.get(TARGET, DRAFTS[1], n_ubatch=16), list[str]()
    for name in ("prefill", "verify"):
        native = getattr(_ffi_engine, name)

        def noted(*args: Any, name: str = name, native: Any = native) -> Any:
            calls.append(name)
            return native(*args)

        monkeypatch.setattr(_ffi_engine, name, noted)
    jobs = [{"prompt": "the", "max_tokens": 100}, "a tree " * 60, "the owl " * 50, "no"]
    said = tokens(spec.run_many(jobs, n_parallel=4, **OPTIONS))
    order = "".join(name[0] for name in calls)
    assert order.count("p") > 10
    assert "pp" not in order.replace("p", "", 1), order
    monkeypatch.undo()
    assert said == [solo(spec, ["the"], max_tokens=100)[0], *solo(spec, [*jobs[1:]])]


def test_a_round_is_one_draft_and_one_verify_for_all(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, seqs = models.get(TARGET, DRAFTS[1]), dict[str, list[list[int]]](draft=[], verify=[])
    for name in ("draft", "verify"):
        native = getattr(_ffi_engine, name)

        def noted(engine: Any, requests: Any, *args: Any, name: str = name, native: Any = native) -> Any:
            seqs[name].append([request[0] for request in requests])
            return native(engine, requests, *args)

        monkeypatch.setattr(_ffi_engine, name, noted)
    results = [good(result) for result in spec.run_many(["the"] * 4, n_parallel=4, max_tokens=20, ignore_eos=True)]
    assert {len(found) for found in seqs["verify"]} == {4}
    assert len(seqs["verify"]) == results[0].stats.n_rounds
    assert [*seqs["draft"], [0, 1, 2, 3]] == seqs["verify"]  # what is left of the last round is the target's own token
    seqs["verify"].clear()
    list(spec.run_many(PROMPTS, n_parallel=3, **OPTIONS))
    assert {max(found) for found in seqs["verify"]} <= {0, 1, 2}


def test_what_prompts_share_is_evaluated_once_a_sequence(spec: pd.Speculator) -> None:
    system = "the owl and the cat sat in the sun " * 4
    results = [good(result) for result in spec.run_many([system + prompt for prompt in PROMPTS], n_parallel=2)]
    shared = len(spec.target.tokenize(system)) - 2
    assert [result.stats.prompt_n_cached >= shared for result in results] == [False] * 2 + [True] * 5
