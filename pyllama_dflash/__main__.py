"""The command line: pyllama-dflash, or python -m pyllama_dflash."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, Callable

from . import _cli_batch, _cli_convert, _cli_info, _cli_options, _cli_quantize, _cli_run
from . import _cli_common as common
from .build import build_info
from .errors import DFlashError

Command = Callable[[argparse.Namespace], int]
_BROKEN_PIPE, _INTERRUPTED = 141, 130  # what a shell reports for SIGPIPE and SIGINT


class _Parser(argparse.ArgumentParser):
    """Takes no shortened option: allow_abbrev leaves those with one dash, and -t would be -ts where it is none."""

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        found = super()._get_option_tuples(option_string)
        return [match for match in found if match[1] in (option_string[:2], option_string.partition("=")[0])]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=common.PROGRAM,
        description="DFlash and DFlash2 speculative decoding.",
        epilog=_cli_run.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{common.PROGRAM} {build_info().get('version')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    def add(name: str, text: str, command: Command, examples: str = "") -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        sub.set_defaults(command=command)
        return sub

    _cli_run.add_arguments(add("run", "generate a reply", _cli_run.run, _cli_run.EXAMPLES))
    text = "answer many prompts, side by side, from a file to a file"
    _cli_batch.add_arguments(add("batch", text, _cli_batch.run, _cli_batch.EXAMPLES))
    _cli_info.add_info_arguments(add("info", "say what a GGUF file is", _cli_info.info, _cli_info.INFO_EXAMPLES))
    text = "write a draft's weights, or a target's, in smaller types"
    _cli_quantize.add_arguments(add("quantize", text, _cli_quantize.run, _cli_quantize.EXAMPLES))
    text = "make a GGUF draft of a checkpoint in Hugging Face's layout"
    _cli_convert.add_arguments(add("convert", text, _cli_convert.run, _cli_convert.EXAMPLES))
    _cli_info.add_version_arguments(add("version", "say what this build is", _cli_info.version))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0; 1 for a failure; 2 for a bad argument; 130 after Ctrl-C."""
    common.prepare_output()
    args = _parser().parse_args(argv)
    try:
        if sys.stdout is None:
            raise OSError("stdout is closed; send it to a file or to /dev/null")
        code: int = args.command(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read stdout has left; what Python still flushes at exit must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        return _INTERRUPTED
    except ValueError as error:
        return _fail(error, 2)
    except (DFlashError, OSError, MemoryError) as error:
        return _fail(error, 1)


def _fail(error: Exception, code: int) -> int:
    text = str(error)
    if isinstance(error, OSError) and isinstance(error.filename, str) and error.strerror:
        text = f"{error.filename}: {error.strerror.lower()}"
    common.say(f"{common.PROGRAM}: error: {' '.join(_cli_options.in_flags(text).split()) or type(error).__name__}")
    return code


if __name__ == "__main__":
    sys.exit(main())
