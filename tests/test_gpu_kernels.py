"""The kernels of a CUDA device: the CPU's logits at every width and weight type, with and without cuBLAS and graphs."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import benching  # noqa: F401  makes bench importable
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from laws import assert_near_tie, first_difference

import pyllama_dflash as pd
from bench.gpu import files, pair, shape

WORKER = Path(__file__).with_name("gpu_worker.py")
WIDTHS = (1, 2, 3, 5, 7, 8, 9, 16, 24, 40, 64)
PROSE = "The sea is"
# Kernels round activations to 8 bits in blocks of their own: the worst of 16,000 logits differs by a tenth.
ROUNDED = 0.15
TINY = dataclasses.replace(shape.SHAPES["tiny"], n_layer=2)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not any(d.is_gpu for d in pd.devices()), reason="no GPU")]


def work(job: dict[str, Any], **environment: str | None) -> dict[str, Any]:
    """What the worker prints; a variable that is None is taken out of its environment."""
    command = [sys.executable, str(WORKER), json.dumps(job)]
    merged = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=merged, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def scored(folder: Path, target: Path, **environment: str) -> tuple[dict[str, Any], dict[int, np.ndarray]]:
    """What the worker prints, and logits [width, n_vocab] by width after the same tokens, on the GPU."""
    folder.mkdir()
    tokens = np.random.default_rng(0).integers(20, 500, 108).tolist()
    options = {"n_ctx": 256, "n_max": 63, "backend_argmax": False, "type_k": "f32", "type_v": "f32"}
    job = {"target": str(target), "folder": str(folder), "scored": tokens, "widths": WIDTHS, "options": options}
    found = work(job, **environment)
    return found, {width: np.load(folder / f"{width}.npy") for width in WIDTHS}


@pytest.fixture(params=["Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0"])
def target(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target of random weights whose matrices are all of one type."""
    kind, tensors = Type[request.param], pair.target_tensors

    def alike(s: shape.Shape) -> list[pair.Tensor]:
        return [t if t.kind == Type.F32 else dataclasses.replace(t, kind=kind) for t in tensors(s)]

    monkeypatch.setattr(pair, "target_tensors", alike)
    return files.write(TINY, tmp_path / "models", seed=int(kind), pool_bytes=1 << 20).target


def assert_same(demo: tuple[Path, Path], a: list[int], b: list[int]) -> None:
    """The same tokens after PROSE, up to a near tie."""
    at = first_difference(a, b)
    if at is not None:
        assert_near_tie(demo[0], PROSE, a[:at], (a[at], b[at]), n_ctx=512)


def worst(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, in deviations of the logits."""
    return float(np.abs(found - expected).max() / expected.std())


def test_every_width_has_the_logits_of_the_cpu(target: Path, tmp_path: Path) -> None:
    _, gpu = scored(tmp_path / "gpu", target)
    _, cpu = scored(tmp_path / "cpu", target, CUDA_VISIBLE_DEVICES="")
    for width in WIDTHS:
        assert gpu[width].shape == cpu[width].shape == (width, TINY.n_vocab)
        assert worst(gpu[width], cpu[width]) < ROUNDED, width
        assert np.isfinite(gpu[width]).all()


def test_the_kernel_for_few_columns_agrees_with_upstreams(target: Path, tmp_path: Path) -> None:
    ours, with_it = scored(tmp_path / "ours", target, GGML_CUDA_FEW_COLS="2")
    theirs, without = scored(tmp_path / "theirs", target, GGML_CUDA_FEW_COLS="0")
    assert not any("few_cols" in name for kernels in theirs["kernels"].values() for name in kernels)
    if not any("few_cols" in name for name in ours["kernels"]["8"]):
        pytest.skip("this build multiplies by tensor cores")
    for width in WIDTHS:
        assert worst(with_it[width], without[width]) < (0.1 if width <= 8 else ROUNDED), width  # MMQ from 9 on


@pytest.mark.model
@pytest.mark.parametrize("flash_attn", ["off", "on"])
def test_products_without_cublas_are_those_of_cublas(demo: tuple[Path, Path], tmp_path: Path, flash_attn: str) -> None:
    # Without flash attention, attention's own products are of floats.
    options = {"n_ctx": 512, "flash_attn": flash_attn}
    job = {"target": str(demo[0]), "draft": str(demo[1]), "options": options, "prompt": PROSE, "n": 48}
    with_it, without = work(job), work(job, PYLLAMA_DFLASH_CUBLAS="off")
    assert_same(demo, with_it["tokens"], without["tokens"])


@pytest.mark.model
def test_graphs_change_launches_and_no_tokens(demo: tuple[Path, Path]) -> None:
    found = {}
    for mode in ("off", "on"):
        options = {"n_ctx": 512, "cuda_graphs": mode}
        job = {"target": str(demo[0]), "draft": str(demo[1]), "options": options, "prompt": PROSE, "n": 96}
        found[mode] = work(job, GGML_CUDA_DISABLE_GRAPHS=None)
    assert found["on"]["tokens"] == found["off"]["tokens"]
    assert found["on"]["launches"] < found["off"]["launches"] / 3


@pytest.mark.model
@pytest.mark.parametrize(
    "options",
    [
        {"split_mode": "layer", "tensor_split": [1, 1]},
        {"split_mode": "layer", "tensor_split": [3, 1], "devices_draft": ["CUDA0"]},
        {"devices": ["CUDA1"], "devices_draft": ["CUDA0"]},
        {"split_mode": "none", "main_gpu": 1},
        {"devices_draft": ["CPU"]},
        {"devices": ["CPU"], "devices_draft": ["CUDA1"]},
    ],
    ids=["halves", "draft-on-first", "apart", "main-gpu-1", "draft-on-cpu", "target-on-cpu"],
)
def test_models_lie_where_they_are_put(demo: tuple[Path, Path], options: dict[str, Any]) -> None:
    # One card stands for two.
    base = {"target": str(demo[0]), "draft": str(demo[1]), "prompt": PROSE, "n": 48}
    one = work({**base, "options": {"n_ctx": 512}})
    two = work({**base, "options": {"n_ctx": 512, **options}}, GGML_CUDA_DEVICES="2")
    assert_same(demo, one["tokens"], two["tokens"])
    assert two["mean_len"] > 1.3
