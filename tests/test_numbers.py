"""Numbers that are none, and numbers that are equal."""

from __future__ import annotations

import logging

import pytest
from laws import Models, checked_run
from tiny import SAID, Draft, Target


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=str)
def test_a_draft_that_is_not_a_number_is_cut_with_one_warning(
    models: Models, caplog: pytest.LogCaptureFixture, version: int, poison: float
) -> None:
    target, like = Target(weights="Q8_0"), Draft(version=version, poison=poison)
    reference = models.plain(target, "the quick", max_tokens=30)
    with caplog.at_level(logging.WARNING), models.fresh(target, like) as spec:
        for _ in range(2):
            result = checked_run(spec, "the quick", max_tokens=30)
            assert result.tokens == reference.tokens
            assert result.stats.draft_n == 0
    warnings = [record for record in caplog.records if "not a number" in record.message]
    assert [(record.levelname, record.name) for record in warnings] == [("WARNING", "pyllama_dflash")]


@pytest.mark.parametrize("weights", ["F32", "Q8_0"])
def test_of_equal_logits_the_lowest_id_wins_in_each_row(models: Models, weights: str) -> None:
    target = Target(twins=True, weights=weights)
    twin = dict(zip(SAID[1::2], SAID[0::2]))
    twin |= {b: a for a, b in twin.items()}
    host, device = (models.get(target, n_max=15, backend_argmax=on_device) for on_device in (False, True))
    ties = 0
    for start in range(4):
        block = [SAID[(5 * i + start) % len(SAID)] for i in range(15)]
        for spec in (host, device):
            spec.reset()
            spec.prefill("in the")
        verdicts = [spec.verify(block) for spec in (host, device)]
        logits = host.logits()
        assert list(verdicts[0].chosen) == list(verdicts[1].chosen) == logits.argmax(axis=1).tolist()
        assert len(set(verdicts[1].chosen)) > 3  # each row its own
        for row, token in zip(logits, verdicts[1].chosen):
            if token in twin and row[token] == row[twin[token]]:
                ties += 1
                assert token < twin[token]
    assert ties > 20
