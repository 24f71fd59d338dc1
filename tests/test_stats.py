"""The figures of a call, counted from any rounds."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pyllama_dflash as pd
from pyllama_dflash._tally import Tally

# (drafted, accepted) of each round of a call that drafts up to 7 tokens
rounds = st.lists(st.integers(0, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=30)


def counted(pairs: list[tuple[int, int]], n_max: int = 7) -> pd.Stats:
    tally = Tally(n_max)
    for drafted, accepted in pairs:
        tally.add_round(drafted, accepted, accepted + 1, 100, 200, 0.5)
    return tally.stats()


@given(pairs=rounds)
def test_l4_figures_are_sums_over_rounds(pairs: list[tuple[int, int]]) -> None:
    stats = counted(pairs)
    drafted, accepted = (sum(pair[side] for pair in pairs) for side in (0, 1))
    assert (stats.n_rounds, stats.draft_n, stats.draft_n_accepted) == (len(pairs), drafted, accepted)
    assert stats.predicted_n == accepted + len(pairs)
    assert stats.acceptance == (accepted / drafted if drafted else 0)
    assert stats.mean_len == (pytest.approx(stats.predicted_n / len(pairs)) if pairs else 0)
    for position, (n_drafted, n_accepted) in enumerate(stats.per_position, 1):
        assert n_drafted == sum(d >= position for d, _ in pairs)
        assert n_accepted == sum(a >= position for _, a in pairs)
    assert stats.t_other_ms == pytest.approx(0.2 * len(pairs))


def test_an_acceptance_of_0_15_over_15_positions_is_3_25_tokens_a_round() -> None:
    stats = counted([(15, 0)] * 11 + [(15, 5)] * 9, n_max=15)
    assert stats.acceptance == pytest.approx(0.15)
    assert stats.mean_len == pytest.approx(3.25)
    assert stats.per_position[4] == (20, 9)
    assert stats.per_position[5] == (20, 0)


def test_no_rounds_divide_by_nothing() -> None:
    stats = counted([])
    assert (stats.acceptance, stats.mean_len, stats.predicted_per_second, stats.prompt_per_second) == (0, 0, 0, 0)


def test_figures_as_json_have_the_derived_ones() -> None:
    stats = counted([(7, 3), (7, 7)])
    values = json.loads(json.dumps(stats.to_dict()))
    assert values["mean_len"] == 6
    assert values["draft_n_accepted"] == 10
    assert values["histogram"] == [0, 0, 0, 1, 0, 0, 0, 1]
