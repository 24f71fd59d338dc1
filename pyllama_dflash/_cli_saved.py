"""--load and --save of the run command: a text goes on in another process."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from . import _saved
from ._replace import check_place
from .model import Model
from .speculator import Speculator

_A_REPLY = "the reply before"


def add_arguments(parser: Any) -> None:
    """Add the flags."""
    text = (
        "go on with the text of a file that --save wrote: the prompt is the user's next turn, with --raw it is added "
        "to the text, and without one the text goes on as it is"
    )
    parser.add_argument("--load", metavar="FILE", help=text)
    text = "after the reply, write the text and all that is evaluated of it, for --load with the same models"
    parser.add_argument("--save", metavar="FILE", help=text)


def check(args: argparse.Namespace) -> None:
    """Refuse flags that contradict each other and files that will not do, before models are loaded."""
    without_prompt = args.prompt is None and args.file is None
    if without_prompt and args.load is None:
        raise ValueError("there is no prompt; give one by -p or -f, or a text to go on with by --load")
    if without_prompt and args.raw:
        raise ValueError("--raw has no effect without a prompt; give one by -p or -f, or leave it out")
    if args.load is not None and args.system_prompt is not None:
        raise ValueError("-sys is for the start of a text, which --load brings; leave one of them out")
    if args.load is not None:
        _saved.check_kind(Path(args.load))
    if args.save is not None:
        out, models = Path(args.save), (args.model, args.model_draft)
        check_place(out, True, [Path(model) for model in models if model], "one of the models")
        _saved.check_replaceable(out)


def loaded(spec: Speculator, args: argparse.Namespace, prompt: str | None) -> list[int]:
    """Load the text and return its token ids, the prompt's after them."""
    text = list(spec.load(args.load))
    ends = bool(text) and spec.target.is_eog(text[-1])
    if prompt is None:
        if ends and not args.ignore_eos:
            raise ValueError(
                f"{args.load} ends with a reply's end; give a prompt by -p or -f, or --ignore-eos to go on"
            )
        return text
    # The template writes the reply's end, and where the prompt is the text's own end there is none before it.
    return [*(text[:-1] if ends else text), *_more(spec.target, prompt, args.raw)]


def save(spec: Speculator, file: str, n_said: int) -> None:
    """Write the text.

    Args:
        spec: what generated it.
        file: the path.
        n_said: its tokens, prompt and reply. What was accepted after a stop string is taken back.
    """
    session = spec._session
    text = session.alone(lambda hold: _saved.text_of(session, hold))
    end = n_said + any(map(spec.target.is_eog, text[n_said : n_said + 1]))
    if end < len(text):
        spec.prefill(text[:end])
    spec.save(file)


def _more(model: Model, prompt: str, raw: bool) -> list[int]:
    if raw or model.chat_template is None:
        return model.tokenize(prompt, add_special=False)
    turns = (("user", "-"), ("assistant", _A_REPLY), ("user", prompt))
    whole = model.apply_chat_template([{"role": role, "content": content} for role, content in turns])
    _, found, after = whole.partition(_A_REPLY)
    if not found:
        raise ValueError("the chat template does not show what follows a reply; give the next turn as text, with --raw")
    return model.tokenize(after, add_special=False)
