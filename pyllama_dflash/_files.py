"""Find the files that ship with the package: the shared library and the bundled draft."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "pyllama-dflash"
LIBRARY_VARIABLE = "PYLLAMA_DFLASH_LIBRARY"
PACKAGE = Path(__file__).resolve().parent
LIBRARY = {"win32": "pyllama_dflash.dll", "darwin": "libpyllama_dflash.dylib"}.get(sys.platform, "libpyllama_dflash.so")


def shipped(pattern: str) -> Path | None:
    """Find a file by its pattern relative to the package.

    The package's own directory comes first. In a source checkout, which shadows the installed package but holds nothing
    that is built, the file is where the installed distribution has it.
    """
    for path in sorted(PACKAGE.glob(pattern)):
        return path
    for distribution in metadata.distributions(name=DISTRIBUTION):
        for entry in distribution.files or ():
            path = Path(str(entry.locate()))
            if entry.match(f"{PACKAGE.name}/{pattern}") and path.is_file():
                return path
    return None


def find_library() -> Path:
    """Return the path of the shared library, or raise ImportError when there is none."""
    override = os.environ.get(LIBRARY_VARIABLE)
    if override:
        if Path(override).is_file():
            return Path(override)
        raise ImportError(f"{LIBRARY_VARIABLE}={override} is not a file; unset it or set it to {LIBRARY}")
    path = shipped(LIBRARY)
    if path is None:
        raise ImportError(
            f"{LIBRARY} is missing: it is neither in {PACKAGE} nor in an installed {DISTRIBUTION}; "
            f"run 'pip install .' in the source tree, or set {LIBRARY_VARIABLE} to the file"
        )
    return path
