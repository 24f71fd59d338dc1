"""What comes back: drafts, verdicts, chunks of text, results and their figures. All frozen."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

SLOTS: dict[str, bool] = {"slots": True} if sys.version_info >= (3, 10) else {}

_DERIVED = (
    "draft_n",
    "draft_n_accepted",
    "n_rounds",
    "acceptance",
    "mean_len",
    "predicted_per_second",
    "prompt_per_second",
    "t_other_ms",
)


@dataclass(frozen=True, eq=False, **SLOTS)
class Draft:
    """A drafted block of n tokens, n = 0 included. Arrays are copies that the caller owns.

    Args:
        tokens: the drafted token ids.
        margins: float32 [n], top-1 minus top-2 score at each position (DFlash2: selector scores along the walked path;
            DFlash: logits).
        candidates: int32 [n, k], token ids at each position by descending score; k = 0 without a draft model.
        scores: float32 [n, k], their scores.
        position: position of the anchor, the token that the block follows. verify() takes the draft only there.
        t_ms: time of the native call.
    """

    tokens: tuple[int, ...]
    margins: npt.NDArray[np.float32]
    candidates: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]
    position: int
    t_ms: float


@dataclass(frozen=True, eq=False, **SLOTS)
class Verdict:
    """The target's answer to n tokens.

    Args:
        accepted: the longest prefix of them that equals the target's own choices.
        bonus: the target's token after that prefix; the next round's anchor.
        chosen: the target's choice at each of the n + 1 rows. Rows after the accepted ones follow a rejected token.
        margins: float32 [n + 1], top-1 minus top-2 logit of each row; None with backend_argmax.
        t_ms: time of the native call.
    """

    accepted: tuple[int, ...]
    bonus: int
    chosen: tuple[int, ...]
    margins: npt.NDArray[np.float32] | None
    t_ms: float


@dataclass(frozen=True, **SLOTS)
class State:
    """Where a Speculator stands.

    Args:
        n_past: tokens in the target's cache; the anchor's position.
        n_pending: prompt tokens that still wait for prefill.
        anchor: the last token, not in the cache yet; None before a prompt.
        n_past_draft: positions whose target features the draft holds.
        n_injected: target feature rows written into the draft's cache since the object was opened.
        n_prefilled: prompt tokens evaluated by the target since the object was opened.
    """

    n_past: int
    n_pending: int
    anchor: int | None
    n_past_draft: int
    n_injected: int
    n_prefilled: int


@dataclass(frozen=True, **SLOTS)
class Stats:
    """Figures of one call. Names are llama-server's where it has them; times are in milliseconds.

    Every round drafts up to n_max tokens and emits the accepted ones and one more, so that

        mean_len = 1 + draft_n_accepted / n_rounds        acceptance = draft_n_accepted / draft_n

    With 15 tokens drafted a round and an acceptance of 0.15 that is 1 + 0.15 * 15 = 3.25 tokens a round. The last round
    may be cut by an end-of-generation token or a stop string inside the accepted block: its accepted tokens count here
    in full, while predicted_n has only what was emitted; hence predicted_n <= n_rounds + draft_n_accepted, and equal
    when nothing was cut off. Always sum(histogram) == n_rounds, and draft_n_accepted <= draft_n <= n_rounds * n_max.

    Args:
        prompt_n: prompt tokens that were evaluated. The last of them is evaluated in the first round's batch.
        prompt_n_cached: prompt tokens whose evaluation an earlier call left in the cache.
        prompt_ms: time of the prefill.
        predicted_n: tokens emitted.
        predicted_ms: time of the rounds; what the caller does between chunks is not in it.
        histogram: number of rounds by accepted tokens, for 0 to n_max of this call.
        per_position: (drafted, accepted) at each position 1 to n_max.
        t_draft_ms: time of the draft calls.
        t_verify_ms: time of the verify calls.
    """

    prompt_n: int
    prompt_n_cached: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    histogram: tuple[int, ...]
    per_position: tuple[tuple[int, int], ...]
    t_draft_ms: float
    t_verify_ms: float

    @property
    def n_rounds(self) -> int:
        """Number of rounds, each with one verify."""
        return sum(self.histogram)

    @property
    def draft_n(self) -> int:
        """Number of tokens drafted."""
        return sum(drafted for drafted, _ in self.per_position)

    @property
    def draft_n_accepted(self) -> int:
        """Number of drafted tokens that the target accepted."""
        return sum(n * rounds for n, rounds in enumerate(self.histogram))

    @property
    def acceptance(self) -> float:
        """Accepted part of the drafted tokens, 0 to 1; 0 if none was drafted."""
        return self.draft_n_accepted / self.draft_n if self.draft_n else 0.0

    @property
    def mean_len(self) -> float:
        """Tokens a round, the target's own included: 1 to n_max + 1; 0 without a round."""
        return 1.0 + self.draft_n_accepted / self.n_rounds if self.n_rounds else 0.0

    @property
    def predicted_per_second(self) -> float:
        """Tokens emitted per second of the rounds."""
        return 1000.0 * self.predicted_n / self.predicted_ms if self.predicted_ms else 0.0

    @property
    def prompt_per_second(self) -> float:
        """Prompt tokens per second of the prefill, without the one that is left to the first round."""
        return 1000.0 * max(0, self.prompt_n - 1) / self.prompt_ms if self.prompt_ms else 0.0

    @property
    def t_other_ms(self) -> float:
        """Time of the rounds outside the native calls."""
        return max(0.0, self.predicted_ms - self.t_draft_ms - self.t_verify_ms)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures, derived ones included, in types that JSON has."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        values["histogram"] = list(self.histogram)
        values["per_position"] = [list(pair) for pair in self.per_position]
        values.update((name, getattr(self, name)) for name in _DERIVED)
        return values


@dataclass(frozen=True, **SLOTS)
class Chunk:
    """One round of a stream.

    Args:
        text: whole characters, "" while a character or a possible stop string is unfinished.
        tokens: ids emitted in this round.
        stats: figures of the call, in the last chunk only.
        finish_reason: None, and in the last chunk "stop" (end-of-generation token or stop string) or "length"
            (max_tokens or the context's end).
    """

    text: str
    tokens: tuple[int, ...]
    stats: Stats | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, **SLOTS)
class Result:
    """A whole reply; str() of it is its text.

    Args:
        text: the reply. A stop string is not part of it.
        tokens: ids emitted. An end-of-generation token is not among them; after a stop string they end with the token
            that completed it.
        finish_reason: "stop" or "length", as in Chunk.
        stats: figures of the call.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    stats: Stats

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, **SLOTS)
class ManyResult:
    """What became of one of many prompts.

    Args:
        index: its place among the prompts, from 0.
        result: the reply; None if it failed. Times of its stats are those of whole rounds, which all replies share.
        error: why it failed, or None.
    """

    index: int
    result: Result | None
    error: Exception | None
