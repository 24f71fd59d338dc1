"""Launches are counted: none without a GPU, kernels by name on one."""

from __future__ import annotations

from pathlib import Path

import pytest

import pyllama_dflash as pd
from pyllama_dflash import cuda

ON_GPU = any(device.is_gpu for device in pd.devices())


@pytest.mark.skipif(ON_GPU, reason="there is a GPU")
def test_without_a_gpu_nothing_is_launched(pair: tuple[Path, Path]) -> None:
    with pd.Speculator(*pair, n_ctx=128) as spec, cuda.trace() as kernels:
        spec.run("the", max_tokens=8)
    assert kernels == {}
    assert cuda.launches() == 0


def test_a_trace_within_a_trace_is_refused_and_the_first_goes_on() -> None:
    with cuda.trace():
        with pytest.raises(pd.OrderError, match="another trace is running"), cuda.trace():
            pass
    with pytest.raises(ZeroDivisionError), cuda.trace():
        1 / 0  # noqa: B018
    with cuda.trace() as kernels:
        pass
    assert kernels == {}


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="no GPU")
def test_a_traced_verify_names_its_kernels(pair: tuple[Path, Path]) -> None:
    with pd.Speculator(*pair, n_ctx=128, cuda_graphs="off") as spec:
        spec.prefill("the")
        before = cuda.launches()
        with cuda.trace() as kernels:
            spec.verify([5, 6, 7])
        assert sum(kernels.values()) == cuda.launches() - before > 10
        assert any("argmax" in name for name in kernels)
        assert all(name.startswith("_Z") for name in kernels)
        with cuda.trace() as none:
            pass
    assert none == {}
