"""What the tests of the laws share: open models, run and count, compare with one-token-at-a-time decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import Draft, Files, Target

import pyllama_dflash as pd

# A row of logits comes out a little different in a batch of another width, unless the build's kernels are
# batch-invariant. Two tokens whose logits are closer than this are a near tie: either may be chosen. With float weights
# the difference is that of summing in another order. A quantised model rounds its activations to 8 bits on the way:
# there the rows are the same, bit by bit, or the smallest change comes back as one of nearly this size.
NEAR_TIE = 0.05
NEAR_TIE_QUANTISED = 1.0

TINY: dict[str, Any] = {"n_ctx": 512, "n_threads": 1}


class Models:
    """Tiny models, those used last kept open for the tests to share."""

    MOST = 16

    def __init__(self, files: Files) -> None:
        self.files = files
        self._open: dict[Any, pd.Speculator] = {}
        self._invariant: dict[Path, bool] = {}

    def get(self, target: Target, draft: Draft | None = None, **options: Any) -> pd.Speculator:
        """A Speculator with nothing cached."""
        key = (target, draft, *sorted(options.items()))
        spec = self._open.pop(key, None) or self.fresh(target, draft, **options)
        self._open[key] = spec
        if len(self._open) > self.MOST:
            self._open.pop(next(iter(self._open))).close()
        spec.reset()
        return spec

    def fresh(self, target: Target, draft: Draft | None = None, **options: Any) -> pd.Speculator:
        """A Speculator of one's own, to close."""
        other = None if draft is None else self.files.path(draft)
        return pd.Speculator(self.files.path(target), other, **{**TINY, **options})

    def plain(self, target: Target, prompt: Any, max_tokens: int, **options: Any) -> pd.Result:
        """What the target says by itself, token by token."""
        return checked_run(self.get(target), prompt, max_tokens=max_tokens, **options)

    def invariant(self, target: Target) -> bool:
        """Whether this target's rows do not depend on the width of the batch, in a few samples of up to 32 rows."""
        path = self.files.path(target)
        if path not in self._invariant:
            prompts = ["the", "in the end an owl sat " * 4]
            spread = [width_spread(path, prompt, 16, **TINY) for prompt in prompts]
            steps = [prefill_spread(path, prompts[1], (1, 8, 32), **TINY)]
            self._invariant[path] = not any(map(max, spread + steps))
        return self._invariant[path]

    def assert_same(self, target: Target, prompt: Any, ours: Sequence[int], reference: Sequence[int]) -> None:
        """L3: the same tokens; a near tie at the first difference will do where rows depend on the width."""
        at = first_difference(ours, reference)
        if at is None:
            return
        assert not self.invariant(target), (
            f"{ours[at]} for {reference[at]} at {at}, and rows do not depend on the width"
        )
        assert_near_tie(self.files.path(target), prompt, reference[:at], (ours[at], reference[at]), **TINY)

    def close(self) -> None:
        for spec in self._open.values():
            spec.close()


def checked_run(spec: pd.Speculator, prompt: Any = None, **options: Any) -> pd.Result:
    """run(), with L4 checked on what comes back."""
    result = spec.run(prompt, **options)
    check_accounting(spec, result, **options)
    if prompt is not None:
        n_prompt = len(spec.target.tokenize(prompt) if isinstance(prompt, str) else prompt)
        stats, state = result.stats, spec.state
        assert stats.prompt_n + stats.prompt_n_cached == n_prompt
        assert stats.prompt_n >= 1
        assert state.n_past == n_prompt - 1 + stats.n_rounds + stats.draft_n_accepted
        assert state.n_past_draft == (state.n_past if spec.draft_model else 0)
    return result


def check_accounting(
    spec: pd.Speculator,
    result: pd.Result,
    *,
    max_tokens: int = 256,
    n_max: int | None = None,
    speculate: bool = True,
    stop: Any = None,
    **_: Any,
) -> None:
    """L4."""
    stats = result.stats
    drafts = speculate and spec.draft_model is not None
    most = (spec.n_max if n_max is None else n_max) if drafts else 0
    assert len(stats.histogram) == most + 1
    assert len(stats.per_position) == most
    assert sum(stats.histogram) == stats.n_rounds
    assert sum(n * rounds for n, rounds in enumerate(stats.histogram)) == stats.draft_n_accepted
    assert stats.draft_n_accepted <= stats.draft_n <= stats.n_rounds * most
    assert sum(accepted for _, accepted in stats.per_position) == stats.draft_n_accepted
    for (drafted, accepted), (drafted_next, accepted_next) in zip(stats.per_position, stats.per_position[1:]):
        assert drafted_next <= drafted <= stats.n_rounds
        assert accepted_next <= accepted <= drafted
    assert stats.acceptance == (stats.draft_n_accepted / stats.draft_n if stats.draft_n else 0)
    assert stats.predicted_n == len(result.tokens) <= max_tokens
    emitted = stats.n_rounds + stats.draft_n_accepted
    if result.finish_reason == "length":
        assert stats.predicted_n == emitted
        assert stats.n_rounds <= stats.predicted_n
        assert result.text == spec.target.detokenize(result.tokens)
    else:
        assert result.finish_reason == "stop"
        assert stats.predicted_n <= emitted
        assert stats.n_rounds <= stats.predicted_n + 1
        assert stop or result.text == spec.target.detokenize(result.tokens)
    if stats.n_rounds:
        assert 1 <= stats.mean_len <= most + 1
        assert math.isclose(stats.mean_len, emitted / stats.n_rounds)
    assert min(stats.prompt_ms, stats.t_draft_ms, stats.t_verify_ms, stats.t_other_ms) >= 0


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs; tokens that only the longer one has are no difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)


def assert_near_tie(
    path: Path, prompt: Any, said: Sequence[int], rivals: tuple[int, int], width: int = 8, **options: Any
) -> None:
    """Both rivals are all but the best token after prompt + said, scored alone and in a wider batch."""
    with pd.Speculator(path, n_max=width - 1, backend_argmax=False, **options) as spec:
        ids = [*(spec.target.tokenize(prompt) if isinstance(prompt, str) else prompt), *said]
        for n in (0, min(width, spec.n_ctx - len(ids) + 1) - 1):
            spec.reset()
            spec.prefill(ids)
            spec.verify([rivals[0]] * n)
            row = spec.logits()[0]
            short, limit = row.max() - row[list(rivals)], near_tie(spec.target)
            assert (short <= limit).all(), f"{rivals} fall short of the best logit by {short} at width {n + 1}"


def near_tie(model: pd.Model) -> float:
    """The epsilon of a model's near ties."""
    kinds = {kind.split()[0] for kind in model.tensor_types.split(", ")}
    return NEAR_TIE if kinds <= {"F32", "F16", "BF16"} else NEAR_TIE_QUANTISED


def width_spread(path: Path, prompt: str, width: int, **options: Any) -> list[float]:
    """Greatest difference of any logit from that of a batch of one, by the width of the batch, 1 to `width`."""
    with pd.Speculator(path, n_max=width - 1, backend_argmax=False, **options) as spec:
        spec.prefill(prompt)
        said, rows = [], []
        for _ in range(width):
            said.append(spec.verify([]).bonus)
            rows.append(spec.logits()[0])
        spread = []
        for n in range(width):
            spec.reset()
            spec.prefill(prompt)
            spec.verify(said[:n])
            spread.append(float(np.abs(spec.logits() - np.stack(rows[: n + 1])).max()))
        return spread


def prefill_spread(path: Path, prompt: str, steps: Sequence[int], **options: Any) -> list[float]:
    """Greatest difference of any logit after a prompt from that of the first size, by the size of a prefill step."""
    rows = []
    for n_ubatch in steps:
        with pd.Speculator(path, backend_argmax=False, **{**options, "n_ubatch": n_ubatch}) as spec:
            spec.prefill(prompt)
            spec.verify([])
            rows.append(spec.logits()[0])
    return [float(np.abs(row - rows[0]).max()) for row in rows]


def compare_drafts(a: Any, b: Any, tolerance: float) -> int:
    """Positions at which candidates and scores agree; an assertion fails at one that does not.

    Both have tokens, margins, candidates and scores as a pd.Draft.
    After a tie at the top the two may walk on from different tokens: what follows is not compared.
    """
    assert len(a.tokens) == len(b.tokens)
    for i in range(len(a.tokens)):
        ours, theirs = (dict(zip(d.candidates[i].tolist(), d.scores[i].tolist())) for d in (a, b))
        least = min(b.scores[i])
        for token in ours.keys() ^ theirs.keys():  # only the last few may change places
            assert abs(ours.get(token, theirs.get(token)) - least) < tolerance, (i, token)
        for token in ours.keys() & theirs.keys():
            assert ours[token] == pytest.approx(theirs[token], abs=tolerance), (i, token)
        if a.tokens[i] != b.tokens[i]:
            assert b.margins[i] < tolerance, i
            return i
    return len(a.tokens)
