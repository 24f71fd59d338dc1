"""Where a reply ends: limits, end-of-generation tokens, stop strings; and how its text is cut into chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import Models, checked_run
from tiny import BYTES, EOS, SAID, TOKENS, Draft, Target

import pyllama_dflash as pd
from pyllama_dflash import _ffi_engine
from pyllama_dflash._text import TextAssembler

CLOCK = Target(wobble=0.0)  # says SAID in turn for ever
FAIR = Draft()
N_MAX = FAIR.block - 1
LEAD = list(range(97, 120))


def prompt_before(index: int) -> list[int]:
    """A prompt after which the clock says SAID[index]."""
    return [*LEAD, SAID[index - 1]]


def said_from(index: int, n: int) -> tuple[int, ...]:
    return tuple(SAID[i % len(SAID)] for i in range(index, index + n))


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, int], Sequence[int]]], None]:
    """Let a function of the anchor's position and of the number of tokens draft instead of the draft model."""

    def install(script: Callable[[int, int], Sequence[int]]) -> None:
        def draft(
            engine: _ffi_engine.EngineHandle, requests: Sequence[_ffi_engine.DraftRequest], *_: Any
        ) -> list[_ffi_engine.Drafted]:
            n_past, n_max = _ffi_engine.state(engine).n_past, requests[0].n_max
            return [_ffi_engine.Drafted(list(script(n_past, n_max)), None, 0)]

        monkeypatch.setattr(_ffi_engine, "draft", draft)

    return install


def right(start: int) -> Callable[[int, int], Sequence[int]]:
    """The script that is always right after prompt_before(start)."""
    return lambda n_past, n: said_from(start + n_past - len(LEAD), n)


def spelled(tokens: Sequence[int]) -> str:
    return bytes(BYTES.index(letter) for token in tokens for letter in TOKENS[token]).decode("utf-8", "replace")


def streamed(spec: pd.Speculator, prompt: Any, **options: Any) -> tuple[pd.Result, list[pd.Chunk]]:
    """What run() returns, and the chunks of the same reply."""
    result = checked_run(spec, prompt, **options)
    chunks = list(spec.stream(prompt, **options))
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert tuple(token for chunk in chunks for token in chunk.tokens) == result.tokens
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [result.finish_reason]
    assert [chunk.stats is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert len(chunks) == max(1, result.stats.n_rounds)
    return result, chunks


# limits ---------------------------------------------------------------------------------------------------------------


each_limit = pytest.mark.parametrize("max_tokens", [0, 1, 2, N_MAX, N_MAX + 1, 37])


@pytest.mark.parametrize("draft", [FAIR, None], ids=["fair drafts", "no draft"])
@each_limit
def test_exactly_max_tokens(models: Models, draft: Draft | None, max_tokens: int) -> None:
    result, _ = streamed(models.get(CLOCK, draft), prompt_before(0), max_tokens=max_tokens)
    assert result.tokens == said_from(0, max_tokens)
    assert result.finish_reason == "length"


@each_limit
def test_exactly_max_tokens_of_right_drafts(models: Models, stub: Any, max_tokens: int) -> None:
    stub(right(0))
    result, _ = streamed(models.get(CLOCK, FAIR), prompt_before(0), max_tokens=max_tokens)
    assert result.tokens == said_from(0, max_tokens)
    assert result.stats.n_rounds == -(-max_tokens // (N_MAX + 1))
    assert result.stats.draft_n == result.stats.draft_n_accepted == max_tokens - result.stats.n_rounds


@pytest.mark.parametrize("n_max", [1, 2, N_MAX])
@pytest.mark.parametrize("target", [CLOCK, Target(twins=True)], ids=["clear choices", "exact ties"])
def test_drafts_that_are_always_wrong_still_give_a_token_a_round(
    models: Models, stub: Any, target: Target, n_max: int
) -> None:
    stub(lambda _, n: [EOS] * n)
    result, chunks = streamed(models.get(target, FAIR), prompt_before(0), max_tokens=100, n_max=n_max)
    assert len(result.tokens) == result.stats.n_rounds == len(chunks) == 100
    assert result.stats.draft_n_accepted == 0


# end of generation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", range(2 * N_MAX + 3))
def test_an_end_of_generation_token_ends_the_reply_at_every_offset_of_a_block(
    models: Models, stub: Any, offset: int
) -> None:
    start = 20 - offset
    stub(right(start))
    spec = models.get(Target(wobble=0.0, eos=SAID[20]), FAIR)
    result, _ = streamed(spec, prompt_before(start), max_tokens=60)
    assert result.finish_reason == "stop"
    assert result.tokens == said_from(start, offset)
    assert result.text == spelled(result.tokens)
    assert result.stats.histogram[N_MAX] == result.stats.n_rounds == offset // (N_MAX + 1) + 1
    on, _ = streamed(spec, prompt_before(start), max_tokens=60, ignore_eos=True)
    assert on.tokens == said_from(start, 60)
    assert on.finish_reason == "length"
    again, _ = streamed(spec, prompt_before(start), max_tokens=60)
    assert again.tokens == result.tokens


# stop strings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_max", [0, N_MAX])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_stop_string_at_every_place(models: Models, stub: Any, length: int, n_max: int) -> None:
    stub(right(0))
    spec = models.get(CLOCK, FAIR)
    whole = said_from(0, 30)
    text = spelled(whole)
    assert {"é", "…", "\n"} < set(text)
    for start in range(len(text) - length):
        stop = text[start : start + length]
        result, chunks = streamed(spec, prompt_before(0), max_tokens=30, stop=stop, n_max=n_max)
        assert result.text == text[: text.index(stop)]
        assert result.finish_reason == "stop"
        # The last token is the one that completes the string.
        assert stop in spelled(result.tokens)
        assert stop not in spelled(result.tokens[:-1])
        assert result.tokens == whole[: len(result.tokens)]
        assert len(chunks) == -(-len(result.tokens) // (n_max + 1))


def test_the_stop_string_that_is_complete_first_wins(models: Models) -> None:
    spec = models.get(CLOCK, FAIR)
    text = spelled(said_from(0, 24))
    for stops in (["out", "n o"], ["n out.", "zqw"], [text[4:40], "d"], ["never", "in"]):
        result, _ = streamed(spec, prompt_before(0), max_tokens=24, stop=stops)
        seen = next(text[:n] for n in range(len(text) + 1) if any(stop in text[:n] for stop in stops))
        assert result.text.startswith(seen[: min(seen.find(stop) for stop in stops if stop in seen)])
        assert not any(stop in result.text for stop in stops)
    held, _ = streamed(spec, prompt_before(0), max_tokens=5, stop="n out!")
    assert held.text == spelled(held.tokens)  # what was held back comes in the end
    assert held.finish_reason == "length"


# chunks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_max", range(N_MAX + 1))
def test_chunks_are_whole_characters(models: Models, stub: Any, n_max: int) -> None:
    stub(right(0))
    spec = models.get(CLOCK, FAIR)
    result, chunks = streamed(spec, prompt_before(0), max_tokens=48, n_max=n_max)
    assert result.text == spelled(said_from(0, 48))
    assert result.text.count("é") == result.text.count("…") == 2
    for chunk in chunks:
        assert "\ufffd" not in chunk.text


def test_a_character_that_the_limit_cuts_is_marked(models: Models) -> None:
    cut = SAID.index(0xE2) + 2  # two of three bytes
    result, chunks = streamed(models.get(CLOCK, FAIR), prompt_before(0), max_tokens=cut, n_max=0)
    assert result.text == spelled(said_from(0, cut))
    assert result.text.endswith(" s\ufffd")
    assert [chunk.text for chunk in chunks[-2:]] == ["", "\ufffd"]


pieces = st.lists(st.sampled_from([b"a", b"b", b"ab", b"ba", b"\xc3", b"\xa9", "é".encode(), b"", b"aab"]), max_size=20)
stop_strings = st.lists(st.text("abé", min_size=1, max_size=4), max_size=3)


@settings(max_examples=300)
@given(pieces=pieces, stops=stop_strings)
def test_text_is_given_out_as_soon_as_it_is_certain(pieces: list[bytes], stops: list[str]) -> None:
    text = TextAssembler(stops)
    given, raw = "", b""
    for piece in pieces:
        raw += piece
        stopped = text.push(piece)
        given += text.take()
        seen = _without_unfinished(raw)
        assert stopped == any(stop in seen for stop in stops)
        if stopped:
            break
        possible = [n for n in range(len(seen)) for stop in stops if stop.startswith(seen[n:])]
        assert given == seen[: min(possible, default=len(seen))]
    given += text.finish()
    seen = raw.decode("utf-8", "replace")
    assert given == seen[: min((seen.find(stop) for stop in stops if stop in seen), default=len(seen))]


def _without_unfinished(raw: bytes) -> str:
    tail = 1 if raw.endswith(b"\xc3") else 0
    return raw[: len(raw) - tail].decode("utf-8", "replace")
