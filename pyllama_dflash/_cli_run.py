"""The run command: generate a reply."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import _cli_common as common
from . import _cli_models, _cli_saved
from ._cli_options import HELP, SWITCHES, VALUES, add_options, described, given
from .result import Stats
from .speculator import Speculator

EXAMPLES = """examples:
  pyllama-dflash run --demo -p "Write a quicksort in Python."
  pyllama-dflash run -m target.gguf -md draft.gguf -p "Why is the sky blue?" --margin 2
  pyllama-dflash run -m target.gguf -md draft.gguf -f prompt.txt --raw -n 64 --json
  pyllama-dflash run -m target.gguf -p "Hello"          # plain decoding: the baseline
  pyllama-dflash run --demo --load chat.state --save chat.state -p "And shorter?"   # after one with --save
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options; their defaults and most help texts are those of Params and GenerateParams."""
    _cli_models.add_models(parser)
    prompt = parser.add_argument_group("prompt")
    source = prompt.add_mutually_exclusive_group()
    source.add_argument(
        "-p", "--prompt", type=common.utf8, help="the prompt; the target's chat template, if any, is put around it"
    )
    source.add_argument("-f", "--file", help="read the prompt from a file, - for stdin")
    prompt.add_argument("-sys", "--system-prompt", type=common.utf8, help="a system message before the prompt")
    prompt.add_argument("--raw", action="store_true", help="send the prompt as it is, without the chat template")
    _cli_saved.add_arguments(parser.add_argument_group("text that goes on"))
    reply = parser.add_argument_group("reply")
    reply.add_argument("-n", "--n-predict", dest="max_tokens", type=int, **described("max_tokens"))
    reply.add_argument(
        "--stop", action="append", type=common.utf8, help="a string that ends the reply; may be given several times"
    )
    reply.add_argument("--ignore-eos", action="store_true", help=HELP["ignore_eos"])
    reply.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    options = parser.add_argument_group("options")
    add_options(options, (*VALUES, *SWITCHES))
    common.add_log(options)


def run(args: argparse.Namespace) -> int:
    """Generate a reply: text to stdout, figures to stderr. Returns the exit code, 130 after Ctrl-C."""
    _cli_models.check(args)
    if args.system_prompt is not None and args.raw:
        raise ValueError("-sys needs the chat template; leave --raw or -sys out")
    _cli_saved.check(args)
    common.show_logs(args.verbose)
    prompt = args.prompt if args.file is None else _read(args.file)
    target, draft = _cli_models.chosen(args)
    with Speculator(target, draft, **given(args, (*VALUES, *SWITCHES), without_draft=args.no_draft)) as spec:
        return _generate(spec, args, prompt)


def _sent(spec: Speculator, args: argparse.Namespace, prompt: str | None) -> dict[str, Any]:
    """What stream() takes of the prompt."""
    if args.load is not None or prompt is None:
        return {"prompt": _cli_saved.loaded(spec, args, prompt)}
    if args.system_prompt is not None:
        turns = {"system": args.system_prompt, "user": prompt}
        return {"messages": [{"role": role, "content": content} for role, content in turns.items()]}
    return {"prompt" if args.raw or spec.target.chat_template is None else "messages": prompt}


def _generate(spec: Speculator, args: argparse.Namespace, prompt: str | None) -> int:
    text: list[str] = []
    tokens: list[int] = []
    finish, code = None, 0
    sent = _sent(spec, args, prompt)
    stream = spec.stream(**sent, max_tokens=args.max_tokens, stop=args.stop, ignore_eos=args.ignore_eos)
    try:
        for chunk in stream:
            finish = chunk.finish_reason
            text.append(chunk.text)
            tokens.extend(chunk.tokens)
            if not args.json:
                print(chunk.text, end="", flush=True)
    except KeyboardInterrupt:
        finish, code = "interrupted", 130
    stats = stream.stats
    stream.close()
    if args.json:
        figures = {"stats": stats.to_dict(), "memory": spec.memory.to_dict()}
        common.print_json({"text": "".join(text), "tokens": tokens, "finish_reason": finish, **figures})
    else:
        print(flush=True)
        _say_figures(stats, spec.draft_model is not None)
    if args.save is not None and (tokens or not code):  # half a prompt is nothing to go on with
        _cli_saved.save(spec, args.save, stats.prompt_n + stats.prompt_n_cached + len(tokens))
    return code


def _say_figures(stats: Stats, drafted: bool) -> None:
    said = common.count(stats.predicted_n, "token")
    speed = f"{said} in {stats.predicted_ms / 1000:.2f} s: {stats.predicted_per_second:.1f} tok/s"
    if drafted:
        speed += f", mean_len {stats.mean_len:.2f}, acceptance {stats.acceptance:.2f}"
        speed += f" ({stats.draft_n_accepted} of {stats.draft_n} drafted)"
    common.say(speed)
    prompt = f"prompt: {common.count(stats.prompt_n, 'token')} in {stats.prompt_ms / 1000:.2f} s"
    if stats.prompt_n > 1:
        prompt += f": {stats.prompt_per_second:.1f} tok/s"
    if stats.prompt_n_cached:
        prompt += f"; {stats.prompt_n_cached} were there"
    common.say(prompt)


def _read(name: str) -> str:
    if name == "-" and sys.stdin is None:
        raise OSError("stdin is closed; give a file or -p")
    raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    with suppress(UnicodeDecodeError):
        return raw.decode("utf-8")
    raise ValueError(f"{name} is not UTF-8 text")
