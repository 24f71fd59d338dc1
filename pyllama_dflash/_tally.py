"""Count rounds while they run. Pure."""

from __future__ import annotations

from .result import Stats


class Tally:
    """Figures of one call so far.

    Args:
        n_max: most tokens that a round of this call drafts.
    """

    def __init__(self, n_max: int) -> None:
        self._prompt_n = 0
        self._prompt_n_cached = 0
        self._prompt_ms = 0.0
        self._predicted_n = 0
        self._predicted_ms = 0.0
        self._t_draft_us = 0
        self._t_verify_us = 0
        self._by_drafted = [0] * (n_max + 1)
        self._by_accepted = [0] * (n_max + 1)

    def add_prefill(self, n_evaluated: int, n_cached: int, t_ms: float) -> None:
        """Count the prompt: tokens evaluated, tokens found in the cache, and the time."""
        self._prompt_n, self._prompt_n_cached, self._prompt_ms = n_evaluated, n_cached, t_ms

    def add_round(
        self, n_drafted: int, n_accepted: int, n_emitted: int, t_draft_us: int, t_verify_us: int, t_ms: float
    ) -> None:
        """Count a round that took t_ms in all."""
        self._by_drafted[n_drafted] += 1
        self._by_accepted[n_accepted] += 1
        self._predicted_n += n_emitted
        self._predicted_ms += t_ms
        self._t_draft_us += t_draft_us
        self._t_verify_us += t_verify_us

    def stats(self) -> Stats:
        """Return the figures."""
        positions = range(1, len(self._by_drafted))
        return Stats(
            prompt_n=self._prompt_n,
            prompt_n_cached=self._prompt_n_cached,
            prompt_ms=self._prompt_ms,
            predicted_n=self._predicted_n,
            predicted_ms=self._predicted_ms,
            histogram=tuple(self._by_accepted),
            per_position=tuple((sum(self._by_drafted[n:]), sum(self._by_accepted[n:])) for n in positions),
            t_draft_ms=self._t_draft_us / 1000.0,
            t_verify_ms=self._t_verify_us / 1000.0,
        )
