"""Load the library; where the package is run as a program, what is wrong with it is one line and no traceback."""

from __future__ import annotations

import sys
from pathlib import Path

PROGRAM = "pyllama-dflash"


def is_program() -> bool:
    """Whether this process was started as pyllama-dflash, or as python -m pyllama_dflash."""
    if sys.argv and Path(sys.argv[0]).stem == PROGRAM:
        return True
    words = getattr(sys, "orig_argv", [])  # "-m" is all that sys.argv holds while the package is imported
    return any(pair == ("-m", "pyllama_dflash") for pair in zip(words, words[1:]))


try:
    from . import _ffi  # noqa: F401 - loading it is what matters
except ImportError as error:
    if not is_program():
        raise
    print(f"{PROGRAM}: error: {error}", file=sys.stderr)
    raise SystemExit(1) from None
