"""Attention over a deep cache, which is summed in stretches: the same whatever rows and threads share the work."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from arch_table import ARCHS
from laws import Models
from tiny import Target

DEEP = [(7 * i) % 390 + 3 for i in range(1100)]
DEPTHS = (250, 256, 257, 511, 513, 770, 1025)
TARGETS = {"plain": Target(weights="Q8_0"), "window": ARCHS["gemma3"], "groups": ARCHS["qwen35"]}


def scored(models: Models, name: str, width: int, **options: Any) -> list[npt.NDArray[np.float32]]:
    """Logits [n_vocab] of the first of `width` rows after each depth."""
    out = []
    sizes = {"n_ctx": 1200, "n_max": 7, "n_ubatch": 128, "cache_ram": 0, "backend_argmax": False}
    with models.fresh(TARGETS[name], None, **{**sizes, **options}) as spec:
        for n in DEPTHS:
            spec.prefill(DEEP[:n])
            spec.verify(DEEP[n : n + width - 1])
            out.append(spec.logits()[0])
    return out


@pytest.mark.parametrize("name", TARGETS)
def test_a_row_alone_is_a_row_among_others(models: Models, name: str) -> None:
    alone = scored(models, name, 1)
    for width in (2, 5, 8):
        for n, a, b in zip(DEPTHS, alone, scored(models, name, width)):
            assert np.abs(a - b).max() < 1e-4 * np.abs(a).max(), (n, width)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(
    "options", [{"n_threads": 2}, {"n_threads": 3}, {"n_ubatch": 1200}, {"flash_attn": False}], ids=repr
)
def test_threads_and_steps_change_nothing(models: Models, name: str, options: dict[str, Any]) -> None:
    close = 2e-2 if "flash_attn" in options else 1e-4  # other kernels round elsewhere
    for width in (1, 8):
        for n, a, b in zip(DEPTHS, scored(models, name, width), scored(models, name, width, **options)):
            assert np.abs(a - b).max() < close * np.abs(a).max(), (n, width)


@pytest.mark.parametrize("types", [("f32", "f32"), ("q8_0", "q8_0")], ids=repr)
def test_caches_of_other_types(models: Models, types: tuple[str, str]) -> None:
    kinds: dict[str, Any] = {"type_k": types[0], "type_v": types[1], "flash_attn": True}
    for n, a, b in zip(DEPTHS, scored(models, "plain", 8), scored(models, "plain", 8, **kinds)):
        assert np.abs(a - b).max() < 5e-2 * np.abs(a).max(), n
