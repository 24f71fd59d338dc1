"""Chat templates: rendered as the model's own, with one beginning token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from laws import TINY, checked_run
from tiny import BOS, Target

import pyllama_dflash as pd

TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the <end>é"}]
Open = Callable[..., pd.Speculator]


@pytest.fixture
def with_template(tmp_path: Path) -> Iterator[Open]:
    """A Speculator on a target with that template, or with none."""
    opened: list[pd.Speculator] = []

    def open_one(template: str | None, add_bos: bool = False) -> pd.Speculator:
        file = Target(weights="Q8_0").file()
        file.keys["tokenizer.ggml.add_bos_token"] = add_bos
        file.keys.pop("tokenizer.chat_template")
        if template is not None:
            file.keys["tokenizer.chat_template"] = template
        opened.append(pd.Speculator(file.write(tmp_path / f"{len(opened)}.gguf"), **TINY))
        return opened[-1]

    yield open_one
    for spec in opened:
        spec.close()


def test_messages_become_the_text_of_the_template(pair: tuple[Path, Path]) -> None:
    with pd.Speculator(pair[0], **TINY) as spec:
        text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nthe <end>é<|im_end|>\n"
        assert spec.target.apply_chat_template(TURNS, add_generation_prompt=False) == text
        whole = text + "<|im_start|>assistant\n"
        assert spec.target.apply_chat_template(TURNS) == whole
        assert spec.target.apply_chat_template("hi") == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        ids = spec.target.tokenize(whole)
        assert spec.target.detokenize(ids, special=True) == whole
        assert len(ids) < len(whole)  # control tokens are one token each
        ours = checked_run(spec, messages=TURNS, max_tokens=8)
        assert ours.stats.prompt_n == len(ids)
        assert ours.tokens == checked_run(spec, ids, max_tokens=8).tokens
        assert "".join(chunk.text for chunk in spec.stream(messages=TURNS, max_tokens=8)) == ours.text


def test_variables_reach_the_template(with_template: Open) -> None:
    template = "{% if enable_thinking %}think {% endif %}{{ tools | tojson }}{{ messages[0].content }}"
    spec = with_template(template)
    assert spec.target.apply_chat_template("a&b", enable_thinking=True, tools=[]) == "think []a&b"
    for thinking in (True, False):
        kwargs = {"enable_thinking": thinking, "tools": ["<x>"]}
        text = ("think " if thinking else "") + '["<x>"]hello'
        spec.reset()
        result = checked_run(spec, messages="hello", chat_template_kwargs=kwargs, max_tokens=8)
        assert result.stats.prompt_n == len(spec.target.tokenize(text))
        spec.reset()
        assert checked_run(spec, text, max_tokens=8).tokens == result.tokens


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("template", ["{{ bos_token }}the", "the"])
def test_a_reply_starts_after_one_beginning_token(with_template: Open, template: str, add_bos: bool) -> None:
    spec = with_template(template, add_bos)
    rest = spec.target.tokenize("the", add_special=False)
    expected = [BOS, *rest] if add_bos or "bos" in template else rest
    result = checked_run(spec, messages="x", max_tokens=8)
    assert result.stats.prompt_n == len(expected)
    spec.reset()
    assert checked_run(spec, expected, max_tokens=8).tokens == result.tokens
    assert spec.target.tokenize("the") == ([BOS, *rest] if add_bos else rest)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, "hi", "has no chat template; render the messages yourself and pass them as prompt"),
        ("{{ raise_exception('user first') }}", "hi", "the chat template failed: user first"),
        ("{{ messages[0].content", "hi", "the chat template failed"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "hi", "the chat template failed"),
        ("x", [], "has no message; give at least one"),
        ("x", [{"content": "hi"}], r"messages\[0\] has no 'role'"),
    ],
)
def test_what_cannot_be_rendered_is_a_value_error(
    with_template: Open, template: str | None, messages: Any, message: str
) -> None:
    spec = with_template(template)
    before = spec.state
    with pytest.raises(ValueError, match=message):
        spec.run(messages=messages)
    assert spec.state == before


PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text if p.text else '<mask>' }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "image_url"),
        ({"type": "image"}, "image"),
        ({"image": "owl.png"}, "image"),
        ({"type": "input_audio", "input_audio": {}}, "input_audio"),
        ({"type": "video", "text": "a text all the same"}, "video"),
    ],
)
def test_a_part_that_is_no_text_is_refused(with_template: Open, part: Any, name: str) -> None:
    """S14: the template has a token for it, and there would be nothing behind that."""
    spec = with_template(PARTS)
    text = {"type": "text", "text": "the image of an owl"}
    message = rf"messages\[1\] has a part that is no text, '{name}'; send text alone"
    with pytest.raises(ValueError, match=message):
        spec.run(messages=[TURNS[0], {"role": "user", "content": [text, part]}])
    result = checked_run(spec, messages=[{"role": "user", "content": [text, text]}], max_tokens=8)
    assert result.stats.prompt_n == len(spec.target.tokenize(2 * text["text"]))


def test_either_a_prompt_or_messages(with_template: Open) -> None:
    spec = with_template("x")
    for arguments, message in (
        ({}, "give either prompt or messages"),
        ({"prompt": "a", "messages": "a"}, "not both"),
        ({"prompt": "a", "chat_template_kwargs": {"b": 1}}, "chat_template_kwargs needs messages"),
        ({"prompt": []}, "the prompt has no tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            spec.run(**arguments)
