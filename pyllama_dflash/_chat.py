"""Render the chat template that a GGUF carries."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Union

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

Messages = Union[str, Sequence[Mapping[str, Any]]]


def render(
    template: str,
    messages: Messages,
    variables: Mapping[str, Any],
    *,
    bos: str = "",
    eos: str = "",
) -> str:
    """Render messages into the text that the model was trained on.

    Args:
        template: Jinja source, run in a sandbox.
        messages: mappings with "role" and "content", or a string as the one message of the user.
        bos: text of the beginning-of-sequence token.
        eos: text of the end-of-sequence token.
        variables: further variables of the template, e.g. enable_thinking or tools; add_generation_prompt=False leaves
            the start of the assistant's turn out.

    Raises:
        ValueError: the messages are malformed, or the template is faulty or refuses them.
    """
    turns = _checked(messages)
    own = {"messages": turns, "bos_token": bos, "eos_token": eos}
    for name in variables:
        if name in own:
            raise ValueError(f"{name} is set by the messages and the model; leave it out of the template's variables")
    try:
        return _compiled(template).render({"add_generation_prompt": True, **own, **variables})
    except Exception as error:  # a template runs code of the file: it may fail in any way
        raise ValueError(f"the chat template failed: {error}") from error


def _checked(messages: Messages) -> list[dict[str, Any]]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not isinstance(messages, Sequence):
        raise TypeError(f"messages={messages!r} is neither a string nor a list of mappings")
    if not messages:
        raise ValueError("messages=[] has no message; give at least one")
    turns: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(f"messages[{index}]={message!r} is not a mapping with 'role' and 'content'")
        if "role" not in message:
            raise ValueError(f"messages[{index}] has no 'role'; use system, user or assistant")
        _check_parts(f"messages[{index}]", message.get("content"))
        turns.append(dict(message))
    return turns


def _check_parts(name: str, content: Any) -> None:
    # A template may write a token in the place of an image, which would stand there for nothing.
    for part in content if isinstance(content, (list, tuple)) else ():
        words = {str(part.get("type")), *map(str, part)} if isinstance(part, Mapping) else set()
        found = next(
            (word for word in sorted(words) if any(kind in word for kind in ("image", "audio", "video"))), None
        )
        if found is not None:
            raise ValueError(f"{name} has a part that is no text, {found!r}; send text alone")


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _tojson(
    value: Any,
    indent: int | None = None,
    ensure_ascii: bool = False,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and &, which are ordinary text to a model. json.dumps has options that call what
    # they are given; a template must not reach those.
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
