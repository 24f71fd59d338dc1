"""Rounds with acceptance given by hand: a draft is paid for, then tokens known to be right stand in for its own.

What is measured is real: the draft, the verify, the rollback of what was rejected, the features of what was accepted.
Only how many tokens a round accepts is made up.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from ..records import Record

if TYPE_CHECKING:
    from pyllama_dflash import Speculator


def acceptance(n_accepted: float, n_max: int) -> float:
    """Chance p of each token, after accepted ones, that makes a round accept n_accepted of n_max on average."""
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        low, high = (p, high) if sum(p**j for j in range(1, n_max + 1)) < n_accepted else (low, p)
    return low


def counts(n_accepted: float, n_max: int, n_rounds: int, rng: np.random.Generator) -> list[int]:
    """How many tokens each round accepts, geometric and cut at n_max: even quantiles in random order."""
    p = acceptance(n_accepted, n_max)
    levels = (np.arange(n_rounds) + 0.5) / n_rounds  # P(n >= j) = p^j
    found = [sum(level < p**j for j in range(1, n_max + 1)) for level in levels]
    return [int(n) for n in rng.permutation(found)]


def run(
    spec: Speculator, prompt: Sequence[int], known: Sequence[int], mean_len: float, n_max: int, seed: int
) -> Record:
    """Go along the target's own continuation of the prompt, `known`, some mean_len tokens a round.

    Where the target says something else in a batch of other tokens, a near tie, the text is put right between rounds,
    outside of the time.

    Returns:
        mean_len as it came out, predicted_n, n_rounds, n_slips (rounds put right), predicted_ms and its parts.
    """
    wanted = counts(mean_len - 1, n_max, max(1, int((len(known) - n_max - 1) / mean_len)), np.random.default_rng(seed))
    spec.reset()
    spec.prefill(prompt)
    at = n_rounds = n_slips = 0
    total = draft_ms = verify_ms = 0.0
    for want in wanted:
        if at + n_max + 1 > len(known):
            break
        start = perf_counter()
        drafted = spec.draft(n_max=n_max)
        wrong = (known[at + want] + 1) % spec.target.info.n_vocab
        verdict = spec.verify([*known[at : at + want], *[wrong] * (n_max - want)])
        total += 1000 * (perf_counter() - start)
        draft_ms, verify_ms = draft_ms + drafted.t_ms, verify_ms + verdict.t_ms
        said = [*verdict.accepted, verdict.bonus]
        at, n_rounds = at + len(said), n_rounds + 1
        if said != list(known[at - len(said) : at]):
            n_slips += 1
            spec.prefill([*prompt, *known[:at]])
    parts = {"t_draft_ms": draft_ms, "t_verify_ms": verify_ms, "t_other_ms": total - draft_ms - verify_ms}
    figures = {"mean_len": at / n_rounds, "predicted_n": at, "n_rounds": n_rounds, "n_slips": n_slips}
    return {"record": "given", "wanted": mean_len, "n_max": n_max, **figures, "predicted_ms": total, **parts}
