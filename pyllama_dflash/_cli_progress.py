"""How much of a long command is done."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

from ._cli_common import say


class Progress:
    """How much is done, on stderr if that is a terminal: a bar where tqdm is installed, else a line each tenth.

    Args:
        what: is being done, as "quantising".
        of: what is counted.
    """

    def __init__(self, what: str, of: str = "weights") -> None:
        self._what, self._of = what, of
        self._shown = sys.stderr is not None and sys.stderr.isatty()
        self._bar: Any = None  # Any: tqdm is optional
        self._tenths = 0

    def __call__(self, n_done: int, n_all: int) -> None:
        """Show that n_done of n_all are done."""
        if not self._shown:
            return
        if self._bar is None:
            self._bar = self._open(n_all)
        if self._bar is not False:
            self._bar.update(n_done - self._bar.n)
        elif n_done * 10 // n_all > self._tenths:
            self._tenths = n_done * 10 // n_all
            say(f"{self._what}: {self._tenths * 10}%")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.close()

    def _open(self, n_all: int) -> Any:
        with suppress(ImportError):
            tqdm = import_module("tqdm").tqdm
            return tqdm(total=n_all, unit=f" {self._of}", unit_scale=True, desc=self._what, leave=False)
        return False
