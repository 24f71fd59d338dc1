"""What does not fit is refused before it is opened, with the figures; what fits is opened."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import child
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import Models
from tiny import Draft, Files, Target

import pyllama_dflash as pd
from pyllama_dflash import _fit
from pyllama_dflash._host import HostMemory
from pyllama_dflash.memory import DeviceMemory

GIB = 1 << 30
CPU_ONLY = not any(device.is_gpu for device in pd.devices())
cpu_only = pytest.mark.skipif(not CPU_ONLY, reason="says what lies on the CPU")


def plan(row: DeviceMemory, free: float, total: float = 64, n_ctx: int = 100_000) -> _fit.Plan:
    return _fit.Plan(n_ctx, [row], [HostMemory(int(free * GIB), int(total * GIB))])


def row(device: str = "CPU", scale: float = 1.0, **gibs: float) -> DeviceMemory:
    fixed = ("target_weights", "draft_weights", "mapped")
    return DeviceMemory(device, **{name: int(n * GIB * (1 if name in fixed else scale)) for name, n in gibs.items()})


# the rule -------------------------------------------------------------------------------------------------------------


def test_a_context_that_is_too_long_says_how_long_it_may_be() -> None:
    whole, half = (plan(row(scale=s, target_kv=46.9, target_compute=1), 12.1, n_ctx=int(1e6 * s)) for s in (1, 0.5))
    assert _fit.shortage(whole) == 0
    said = _fit.message(whole, 0, half, wide=True)
    assert said == (
        "n_ctx=1000000 needs 47.9 GiB on CPU (the target's K/V cache 46.9 GiB, the target's compute buffers 1.0 GiB) "
        "and 12.1 GiB are free; lower n_ctx to about 250000, or use type_k='q8_0' and type_v='q8_0'"
    )
    assert _fit.message(whole, 0, half, wide=False).endswith("lower n_ctx to about 250000")


def test_large_compute_buffers_point_to_the_step() -> None:
    whole, half = (plan(row(scale=s, target_kv=4, target_compute=20), 12, n_ctx=int(1e5 * s)) for s in (1, 0.5))
    assert _fit.message(whole, 0, half, wide=True).endswith("lower n_ctx to about 50000, or lower n_ubatch")


def test_weights_that_are_too_large() -> None:
    gpu = plan(row("CUDA0", target_weights=30, target_kv=1), 22)
    assert _fit.message(gpu, 0, None, wide=True).endswith("lower n_gpu_layers or use a smaller quantisation")
    assert "(the target's weights 30.0 GiB, the target's K/V cache 1.0 GiB) and 22.0 GiB are free" in (
        _fit.message(gpu, 0, gpu._replace(n_ctx=50_000), wide=True)
    )


def test_pages_of_a_mapped_file_need_not_be_free_but_must_exist() -> None:
    mapped = row(target_weights=30, mapped=30, target_kv=1)
    assert _fit.shortage(plan(mapped, 12, 64)) is None
    assert _fit.shortage(plan(mapped, 0.5, 64)) == 0
    small = plan(mapped, 12, 16)
    assert _fit.shortage(small) == 0
    assert _fit.message(small, 0, None, wide=True) == (
        "weights of 30.0 GiB are to be mapped and CPU has 16.0 GiB in all; use a smaller quantisation"
    )


def test_the_device_that_is_short_of_most_is_named() -> None:
    rows = [row("CUDA0", target_kv=2), row("CUDA1", target_kv=9), row(target_kv=3)]
    free = [HostMemory(n * GIB, 64 * GIB) for n in (1, 4, 64)]
    assert _fit.shortage(_fit.Plan(8, rows, free)) == 1
    assert _fit.shortage(_fit.Plan(8, rows, [HostMemory(0, 0)] * 3)) is None  # a device that does not say


@given(
    kv=st.integers(1, 1 << 45),
    fixed=st.integers(0, 1 << 34),
    share=st.floats(0.01, 0.99),
    n_ctx=st.integers(10_000, 1 << 28),
)
def test_the_length_that_is_named_fits(kv: int, fixed: int, share: float, n_ctx: int) -> None:
    def at(n: int) -> _fit.Plan:
        used = DeviceMemory("CPU", target_kv=kv * n // n_ctx, draft_compute=fixed)
        return _fit.Plan(n, [used], [HostMemory(fixed + int(kv * share), 1 << 60)])

    whole = at(n_ctx)
    if _fit.shortage(whole) is None:
        return
    named = re.search(r"n_ctx to about (\d+)", _fit.message(whole, 0, at(n_ctx // 2), wide=True))
    if named is not None:
        assert _fit.need(at(int(named[1])).devices[0]) <= whole.free[0].available + kv // n_ctx + 2
        assert int(named[1]) >= 0.8 * share * n_ctx - 64


# the objects ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the host have a number of bytes free."""

    def set_free(available: int, total: int = 64 * GIB) -> None:
        monkeypatch.setattr(_fit, "host_memory", lambda *_, **__: HostMemory(available, total))

    return set_free


@cpu_only
@pytest.mark.parametrize("like", [Draft(), None], ids=repr)
def test_a_context_that_does_not_fit_is_refused(files: Files, models: Models, free: Any, like: Draft | None) -> None:
    draft = None if like is None else files.path(like)
    free(20 << 20)
    with pytest.raises(
        MemoryError, match=r"n_ctx=1000000 needs .* GiB on CPU \(.*K/V cache.*\) and 20.0 MiB are free; lower"
    ):
        pd.Speculator(files.path(Target()), draft, n_ctx=10**6, n_threads=1)
    free(4 * GIB)
    with pd.Speculator(files.path(Target()), draft, n_ctx=512, n_threads=1) as spec:
        assert spec.run("the", max_tokens=4, ignore_eos=True).tokens


@cpu_only
def test_the_length_that_is_named_opens(files: Files, free: Any) -> None:
    free(20 << 20)
    with pytest.raises(MemoryError) as caught:
        pd.Speculator(*files.pair(), n_ctx=10**6, n_threads=1)
    named = re.search(r"n_ctx to about (\d+)", str(caught.value))
    assert named is not None
    with pd.Speculator(*files.pair(), n_ctx=int(named[1]), n_threads=1) as spec:
        assert spec.memory.total.total - spec.memory.total.mapped < 30 << 20


@cpu_only
def test_weights_that_are_read_must_fit_and_mapped_ones_need_not(pair: tuple[Path, Path], free: Any) -> None:
    size = pair[0].stat().st_size
    free(size // 2)
    with pytest.raises(MemoryError, match=r"the model needs .* on CPU \(the target's weights .*\) and .* are free"):
        pd.Model(pair[0], use_mmap=False)
    with pytest.raises(MemoryError, match="the target's weights"):
        pd.Model(pair[0], use_mlock=True)
    pd.Model(pair[0]).close()
    free(size // 2, size // 2)
    with pytest.raises(MemoryError, match="are to be mapped and CPU has"):
        pd.Model(pair[0])


@cpu_only
def test_a_model_that_is_open_counts_no_more(pair: tuple[Path, Path], free: Any) -> None:
    with pd.Model(pair[0], use_mmap=False) as target, pd.Model(pair[1], use_mmap=False) as draft:
        free(12 << 20)
        with pd.Speculator(target, draft, n_ctx=256, n_threads=1, n_ubatch=16) as spec:
            assert spec.memory.total.total > 12 << 20 or spec.memory.total.target_weights > 0
        with pytest.raises(MemoryError) as caught:
            pd.Speculator(target, draft, n_ctx=10**6, n_threads=1)
        assert "weights" not in str(caught.value)


@cpu_only
def test_a_file_that_is_gone_is_no_reason_to_refuse_an_open_model(files: Files, tmp_path: Path, free: Any) -> None:
    path = tmp_path / "copy.gguf"
    path.write_bytes(files.path(Target()).read_bytes())
    with pd.Model(path) as model:
        path.unlink()
        free(1)
        with pd.Speculator(model, n_ctx=256, n_threads=1) as spec:
            assert spec.run("the", max_tokens=2, ignore_eos=True).tokens


@cpu_only
def test_a_large_draft_in_the_place_of_a_target_is_not_read(
    pair: tuple[Path, Path], free: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyllama_dflash._ffi.model_open", lambda *_: pytest.fail("its weights are read"))
    free(1)
    with pytest.raises(pd.IncompatibleModelsError, match="cannot run alone"):
        pd.Speculator(pair[1], n_ctx=256)


@pytest.mark.parametrize("n_ctx", [10**8, 2 * 10**8, 10**9])
def test_absurd_contexts_do_not_end_the_process(pair: tuple[Path, Path], n_ctx: int) -> None:
    code = """
        import sys, pyllama_dflash as pd
        for draft in (sys.argv[2], None):
            try:
                pd.Speculator(sys.argv[1], draft, n_ctx=int(sys.argv[3]), n_threads=1)
            except (MemoryError, ValueError) as error:
                print(f"n_ctx={sys.argv[3]}" in str(error))
    """
    assert child.output(code, *pair, n_ctx).split() == ["True", "True"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs rlimits")
def test_a_limit_of_the_address_space_is_told_beforehand(pair: tuple[Path, Path]) -> None:
    code = """
        import resource, sys, pyllama_dflash as pd
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20),) * 2)
        try:
            pd.Speculator(*sys.argv[1:], n_ctx=10**6, n_threads=1)
        except MemoryError as error:
            print("lower n_ctx to about" in str(error))
        with pd.Speculator(*sys.argv[1:], n_ctx=512, n_threads=1) as spec:
            print(len(spec.run("the", max_tokens=4, ignore_eos=True).tokens))
    """
    assert child.output(code, *pair).split() == ["True", "4"]


@pytest.mark.model
@cpu_only
@pytest.mark.parametrize("n_ctx", [2 * 10**6, 10**7, 10**8])
def test_the_demo_pair(demo: tuple[Path, Path], n_ctx: int) -> None:
    with pytest.raises(MemoryError, match=f"n_ctx={n_ctx} needs .* on CPU .*the draft's K/V cache"):
        pd.Speculator(*demo, n_ctx=n_ctx)
