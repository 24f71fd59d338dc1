"""Weights laid out for this CPU's matrix units give the same logits, to rounding, as weights left as in the file."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from pyllama_dflash import Model, Speculator, demo_pair

WIDTH = 8
PROMPT = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs."


def wide_logits(path: str, *, repack: bool) -> npt.NDArray[np.float32]:
    """Logits [WIDTH, n_vocab] of one batch of WIDTH rows after a prompt."""
    with Model(path, repack=repack) as model:
        tokens = model.tokenize(PROMPT)
        with Speculator(model, n_ctx=256, n_max=WIDTH - 1, backend_argmax=False) as spec:
            spec.prefill(tokens[:-WIDTH])
            spec.verify(tokens[-WIDTH:-1])
            return spec.logits()


@pytest.mark.model
def test_batch_of_eight_rows_equals_plain_weights_to_rounding() -> None:
    """On a CPU with AMX the packed weights run on it."""
    target = demo_pair()[0]
    packed, plain = (wide_logits(str(target), repack=repack) for repack in (True, False))
    assert packed.shape == plain.shape == (WIDTH, packed.shape[1])
    assert np.isfinite(packed).all()
    # Both multiply the same 4-bit weights with activations rounded to 8 bits, but in other blocks; thirty layers on,
    # one in a thousand of a row's variance is left unexplained.
    for ours, reference in zip(packed, plain):
        assert np.corrcoef(ours, reference)[0, 1] > 0.998
        # The best token is the same, or one that the reference puts as high to rounding.
        assert reference.max() - reference[ours.argmax()] <= 2 * (ours - reference).std()
