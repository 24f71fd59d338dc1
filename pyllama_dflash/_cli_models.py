"""Which models a command that generates takes."""

from __future__ import annotations

import argparse
from typing import Any

from .models import demo_pair


def add_models(parser: argparse.ArgumentParser) -> None:
    """Add the flags that chosen() reads."""
    models = parser.add_argument_group("models")
    models.add_argument("-m", "--model", help="target GGUF")
    models.add_argument("-md", "--model-draft", help="DFlash or DFlash2 draft GGUF; without it: plain decoding")
    models.add_argument("--demo", action="store_true", help="use the demo pair; its target (98 MB) is fetched once")
    models.add_argument("--no-draft", action="store_true", help="open no draft; options of the draft are not used")


def check(args: argparse.Namespace) -> None:
    """Refuse flags that contradict each other; nothing is fetched yet."""
    if args.demo == bool(args.model):
        raise ValueError("give the target by -m, or --demo for the demo pair" + (", not both" if args.demo else ""))
    if args.demo and args.model_draft:
        raise ValueError("--demo brings its own draft; leave -md out")


def chosen(args: argparse.Namespace) -> tuple[Any, Any]:
    """Return the paths of the target and of the draft, None if there is none."""
    target, draft = demo_pair() if args.demo else (args.model, args.model_draft)
    draft = None if args.no_draft else draft
    if draft is None and not args.no_draft and args.n_max is not None:
        raise ValueError(f"n_max={args.n_max} has no effect without a draft; give one by -md, or leave it out")
    return target, draft
