"""Turn the bytes of tokens into text: whole UTF-8 characters only, cut before the first stop string. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextAssembler:
    """Collect the bytes of tokens one by one and give out the text that is certain.

    Held back are the bytes of an unfinished character, and text that may turn out to be the start of a stop string.

    Args:
        stops: strings that end the text; none of them is part of it.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ready = ""  # certain, not yet taken
        self._held = ""  # the longest tail that is a proper prefix of a stop string
        self.stopped = False

    def push(self, piece: bytes) -> bool:
        """Add the bytes of one token; True when it completes a stop string, after which nothing more is added."""
        self._add(self._decoder.decode(piece))
        return self.stopped

    def take(self) -> str:
        """Return the certain text that came in since the last call."""
        text, self._ready = self._ready, ""
        return text

    def finish(self) -> str:
        """Return the rest; an unfinished character becomes U+FFFD."""
        self._add(self._decoder.decode(b"", final=True))
        text, self._ready, self._held = self._ready + self._held, "", ""
        return text

    def _add(self, text: str) -> None:
        if self.stopped or not text:
            return
        # A stop string that ends in the new text starts in the held tail or later.
        text = self._held + text
        starts = [start for start in map(text.find, self._stops) if start >= 0]
        self.stopped = bool(starts)
        cut = min(starts) if starts else len(text) - self._n_held(text)
        self._ready += text[:cut]
        self._held = "" if starts else text[cut:]

    def _n_held(self, text: str) -> int:
        for n in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - n :]
            if any(len(stop) > n and stop.startswith(tail) for stop in self._stops):
                return n
        return 0
