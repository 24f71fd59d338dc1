"""The batch command: replies to many prompts, from a file to a file, to go on with after any interruption."""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields
from io import FileIO
from itertools import islice
from pathlib import Path
from reprlib import repr as short
from typing import Any

from . import _cli_common as common
from . import _cli_models
from ._batch import Output, state_of
from ._cli_options import HELP, SWITCHES, VALUES, add_options, described, given
from ._cli_progress import Progress
from ._fingerprint import fingerprint
from ._replace import Part, check_place
from .errors import ContextFullError, DFlashError
from .params import GenerateParams
from .result import ManyResult
from .speculator import Speculator

EXAMPLES = """each line of IN is a JSON object:
  {"prompt": "Once upon a time"}                                sent as it is; or a list of token ids
  {"messages": "Why is the sky blue?"}                          through the chat template; or a list of messages
  {"messages": "Name a colour.", "id": 7, "max_tokens": 8}      id: any value; other keys: arguments of run()
and so is each line of OUT, in the order of IN:
  {"index": 0, "id": 7, "text": "Blue.", "n_tokens": 2, "finish_reason": "stop"}
  {"index": 1, "error": "line 2: give either prompt or messages"}

examples:
  pyllama-dflash batch prompts.jsonl -o replies.jsonl --demo -n 128
  pyllama-dflash batch prompts.jsonl -o replies.jsonl -m target.gguf -md draft.gguf -c 4096 -np 8

Killed or interrupted at any moment, the same command goes on where it was: what OUT is made of is kept in OUT.state
until it is finished, and another input, model or option is refused without --restart.
"""
# They say where and how fast it runs, and may be others when a batch is gone on with.
_OF_PLACE = {
    *("n_threads", "n_ubatch", "use_mmap", "use_mlock", "cuda_graphs"),
    *("n_gpu_layers", "n_gpu_layers_draft", "devices", "devices_draft", "split_mode", "main_gpu", "tensor_split"),
}
_OF_REPLY = ("max_tokens", "stop", "ignore_eos")
_OF_LINE = {"prompt", "messages", "chat_template_kwargs", *(field.name for field in fields(GenerateParams))}
_AT_ONCE = 1 << 22  # bytes of an input that run_many() gets as a list: of a few prompts it asks what context they need


@dataclass(frozen=True)
class Line:
    """A line of the input: what run_many() takes of it, or why it takes nothing."""

    number: int
    job: dict[str, Any]
    head: dict[str, Any]
    error: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options; their defaults and most help texts are those of Params and GenerateParams."""
    files = parser.add_argument_group("files")
    files.add_argument(
        "input", metavar="IN", help="prompts, a JSON object a line; -: stdin, which cannot be gone on with"
    )
    files.add_argument(
        "-o", "--output", metavar="OUT", required=True, help="the replies, a JSON object a line; -: stdout"
    )
    files.add_argument("--restart", action="store_true", help="begin anew; what OUT holds is replaced")
    _cli_models.add_models(parser)
    replies = parser.add_argument_group("replies")
    text = "prompts side by side (default: 4); each has a context of its own"
    replies.add_argument("-np", "--parallel", dest="n_parallel", metavar="N", type=int, default=4, help=text)
    replies.add_argument("-n", "--n-predict", dest="max_tokens", type=int, **described("max_tokens"))
    replies.add_argument(
        "--stop", action="append", type=common.utf8, help="a string that ends a reply; may be given several times"
    )
    replies.add_argument("--ignore-eos", action="store_true", help=HELP["ignore_eos"])
    options = parser.add_argument_group("options")
    add_options(options, (*VALUES, *SWITCHES))
    common.add_log(options)


def run(args: argparse.Namespace) -> int:
    """Write the replies. Returns the exit code: 0; 1 if a line failed; 130 after Ctrl-C."""
    _cli_models.check(args)
    if args.output == "-" and args.restart:
        raise ValueError("--restart has no effect on stdout; leave it out")
    common.show_logs(args.verbose)
    raw = None if args.input == "-" else Path(args.input).read_bytes()
    pair = _cli_models.chosen(args)
    options = given(args, (*VALUES, *SWITCHES), without_draft=args.no_draft)
    with ExitStack() as stack:
        out: Output | Stdout
        if args.output == "-":
            out = Stdout()
        else:
            _check_places(Path(args.output), args.input, [path for path in pair if path])
            out = stack.enter_context(Output(Path(args.output), _made_of(args, pair, options, raw), args.restart))
        try:
            return _answer(args, pair, options, raw, out)
        except KeyboardInterrupt:
            common.say(f"interrupted after {out.n_lines} lines" + _how_to_go_on(args, out))
            return 130


def _check_places(out: Path, given: str, models: list[str | Path]) -> None:
    """Refuse a place of OUT, or of its state, where no file may be written."""
    check_place(out, True)
    for place in (out, state_of(out)):
        check_place(place, True, [Path(given)] if given != "-" else (), "the input")
        check_place(place, True, map(Path, models), "one of the models")


def _made_of(
    args: argparse.Namespace, pair: tuple[Any, Any], options: dict[str, Any], raw: bytes | None
) -> dict[str, Any]:
    """What the text of the replies depends on."""
    target, draft = (path and fingerprint(Path(path)) for path in pair)
    made_of = {"input": None if raw is None else hashlib.sha256(raw).hexdigest(), "target": target, "draft": draft}
    made_of.update((name, getattr(args, name)) for name in _OF_REPLY)
    made_of.update((name, value) for name, value in options.items() if name not in _OF_PLACE)
    return made_of


def _answer(
    args: argparse.Namespace, pair: tuple[Any, Any], options: dict[str, Any], raw: bytes | None, out: Output | Stdout
) -> int:
    n_before = out.n_lines
    given_lines = islice(_numbered(_stdin() if raw is None else io.BytesIO(raw)), n_before, None)
    n_all = None if raw is None else sum(1 for _ in _numbered(io.BytesIO(raw)))
    if n_all == n_before:
        out.finish()
        common.say(f"all {common.count(n_before, 'line')} already there" if n_before else "there are no prompts")
        return 1 if out.n_failed else 0
    waiting: dict[int, Line] = {}
    jobs: Iterable[dict[str, Any]] = _jobs(given_lines, waiting)
    if raw is not None and len(raw) <= _AT_ONCE:
        jobs = list(jobs)
    for_all = {name: getattr(args, name) for name in ("n_parallel", *_OF_REPLY)}
    with Speculator(*pair, **options) as spec, Progress("answering", "prompts") as progress:
        with spec.run_many(jobs, **for_all) as many:
            for _ in _written(many, waiting, out, args.n_parallel):
                if n_all is not None:
                    progress(out.n_lines, n_all)
    out.finish()
    if out.n_lines == n_before:
        common.say("there are no prompts")
        return 0
    speed = (
        f"{common.count(many.predicted_n, 'token')} in {many.t_ms / 1000:.2f} s: {many.predicted_per_second:.1f} tok/s"
    )
    before = f"; {common.count(n_before, 'line')} already there" if n_before else ""
    common.say(f"{common.count(out.n_lines - n_before, 'prompt')}, {speed}{before}")
    if out.n_failed:
        common.say(f"{out.n_failed} of {out.n_lines} lines have an error instead of a text")
    return 1 if out.n_failed else 0


def _written(
    many: Iterable[ManyResult], waiting: dict[int, Line], out: Output | Stdout, n_parallel: int
) -> Iterator[ManyResult]:
    """Write each result. After n_parallel that were lost in a row nothing is written: the device may be gone."""
    lost: list[bytes] = []
    n_before = out.n_lines
    for found in many:
        line = waiting.pop(found.index)
        text = _said(n_before + found.index, line, found)
        if _is_lost(line, found):
            lost.append(text)
            if len(lost) > n_parallel:
                kept = f"{out.n_lines} lines are good, and the same command goes on after them"
                raise DFlashError(f"{found.error}; {kept}")
            continue
        while lost:
            out.write(lost.pop(0), failed=True)
        out.write(text, failed=line.error is not None or found.error is not None)
        yield found
    for text in lost:
        out.write(text, failed=True)


class Stdout:
    """Takes lines as Output does, for whoever reads stdout."""

    def __init__(self) -> None:
        self.n_lines = self.n_failed = 0
        sys.stdout.flush()
        # Beside Python's buffer, in which a line that could not be written would fail once more at exit.
        self._part = Part(FileIO(sys.stdout.fileno(), "w", closefd=False), Path("stdout"))

    def write(self, line: bytes, failed: bool = False) -> None:
        """Write a line, without its line feed."""
        self._part.write(line + b"\n")
        self.n_lines += 1
        self.n_failed += failed

    def finish(self) -> None:
        """There is nothing left to do."""


def _stdin() -> Iterable[bytes]:
    if sys.stdin is None:
        raise OSError("stdin is closed; give a file")
    return sys.stdin.buffer


def _numbered(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty with their numbers, from 1."""
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip(b" \t\r\n\f\v"))


def _jobs(lines: Iterable[tuple[int, bytes]], waiting: dict[int, Line]) -> Iterator[dict[str, Any]]:
    """What run_many() takes, in the order of the lines; an empty mapping, which fails, for a line that is wrong."""
    for index, (number, raw) in enumerate(lines):
        waiting[index] = line = _parsed(number, raw)
        yield line.job


def _parsed(number: int, raw: bytes) -> Line:
    try:
        value = json.loads(raw.strip().decode("utf-8-sig"), parse_float=_finite, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        return Line(number, {}, {}, f"it is not JSON: {error.msg}: character {error.pos + 1}")
    except UnicodeDecodeError:
        return Line(number, {}, {}, "it is not UTF-8 text")
    except RecursionError:
        return Line(number, {}, {}, "it is nested too deeply")
    except _NumberError as error:
        return Line(number, {}, {}, str(error))
    except ValueError:
        return Line(number, {}, {}, "it has an integer of too many digits; give it as a string")
    if not isinstance(value, dict):
        return Line(number, {}, {}, 'it is no JSON object; give {"prompt": ...} or {"messages": ...}')
    head = {"id": value.pop("id")} if "id" in value else {}
    unknown = sorted(set(value) - _OF_LINE)
    if unknown:
        return Line(number, {}, head, f"run() has no argument {', '.join(map(repr, unknown))}; leave it out")
    return Line(number, value, head)


class _NumberError(ValueError):
    """What a number of a line cannot be."""


def _no_number(text: str) -> None:
    raise _NumberError(f"it is not JSON: {text} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):  # its reply would repeat it as Infinity, which is no JSON
        raise _NumberError(f"{short(text)} exceeds 1.8e308; give a smaller number, or a string")
    return value


def _said(index: int, line: Line, found: ManyResult) -> bytes:
    """The line of output; it has no times, so that it is the same each time."""
    head = {"index": index, **line.head}
    if line.error is None and found.result is not None:
        reply = found.result
        facts = {"text": reply.text, "n_tokens": len(reply.tokens), "finish_reason": reply.finish_reason}
        return json.dumps({**head, **facts}).encode()
    why = line.error or " ".join(str(found.error).split()) or type(found.error).__name__
    return json.dumps({**head, "error": f"line {line.number}: {why}"}).encode()


def _is_lost(line: Line, found: ManyResult) -> bool:
    """Whether it failed by no fault of its own, as all that follow may, too: they are not written then."""
    own = line.error is not None or isinstance(found.error, ContextFullError)
    return not own and isinstance(found.error, (DFlashError, MemoryError))


def _how_to_go_on(args: argparse.Namespace, out: Output | Stdout) -> str:
    if isinstance(out, Stdout):
        return ""
    if args.input == "-":
        return f"; prompts from stdin cannot be gone on with: --restart writes {args.output} anew"
    return "; the same command goes on from there" + (", without --restart" if args.restart else "")
