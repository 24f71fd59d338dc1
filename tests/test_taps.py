"""What a draft reads of a target: the inputs of its layers, on tiny models of every architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from arch_models import Arch
from arch_table import ARCHS, draft_reading

import pyllama_dflash as pd

Rows = npt.NDArray[Any]

PROMPT = np.random.default_rng(5).integers(0, 400, 21).tolist()  # longer than the sliding windows
SHORT = {"n_ctx": 64, "n_threads": 1}
COMPARED = [arch for arch in ARCHS.values() if arch.shown != "none" and arch.least < arch.n_layer]


def written(arch: Arch, folder: Path, n_layer: int) -> Path:
    """The model of the first layers. With several streams, the head is to read their mean, up to a factor."""
    file = arch.first(n_layer)
    for name in ("output_hc_fn.weight", "output_hc_base.weight"):
        if name in file.tensors:
            file.tensors[name][:] = 0
    return file.write(folder / f"{n_layer}.gguf")


def logits_of(path: Path, counts: tuple[int, ...]) -> Rows:
    """The logits after the first n tokens of the prompt, for each n."""
    rows = []
    with pd.Speculator(path, n_max=0, backend_argmax=False, **SHORT) as spec:
        for n in counts:
            spec.reset()
            spec.prefill(PROMPT[:n])
            spec.verify([])
            rows.append(spec.logits()[0])
    return np.stack(rows)


def unit(rows: Rows) -> Rows:
    out: Rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return out


def head_of(arch: Arch, rows: Rows) -> Rows:
    """The logits of what leaves the last layer, up to a factor that some models have."""
    tensors = arch.first(0).tensors
    rows = rows.astype(np.float64)
    rows = unit(rows - rows.mean(axis=1, keepdims=True) * arch.mean) * np.sqrt(rows.shape[1])
    rows = rows * tensors.get(f"{arch.norm}.weight", 1) + tensors.get("output_norm.bias", 0)
    head = tensors.get("output.weight", tensors["token_embd.weight"])
    out: Rows = rows @ head.T + tensors.get("output.bias", 0)
    return out


@pytest.mark.parametrize("arch", COMPARED, ids=repr)
def test_a_tap_is_what_leaves_the_layers_before(arch: Arch, tmp_path: Path) -> None:
    """The reference is a model that ends there, with the last norm and the head on what would go on."""
    counts = (1, 2, len(PROMPT))
    with pd.Model(written(arch, tmp_path, arch.n_layer)) as model:
        taps = {layer: model.layer_input(PROMPT, layer) for layer in range(arch.least, arch.n_layer)}
    for layer, rows in taps.items():
        expected = unit(logits_of(written(arch, tmp_path, layer), counts))
        found = unit(head_of(arch, rows[[n - 1 for n in counts]]))
        np.testing.assert_allclose(found, expected, atol=1e-3, err_msg=f"layer {layer}")
        assert (found @ found.T).min() < 0.9, "all rows are alike"


@pytest.mark.parametrize("arch", ARCHS.values(), ids=repr)
def test_a_layer_is_shown_or_refused_at_open(arch: Arch, tmp_path: Path) -> None:
    with pd.Model(arch.file().write(tmp_path / "model.gguf")) as model:
        for layer in (0, arch.n_layer - 1):
            if arch.shown == "all" or (arch.shown == "rest" and layer > 0):
                rows = model.layer_input(PROMPT[:2], layer)
                assert rows.shape == (2, model.info.n_embd)
                assert np.isfinite(rows).all()
                continue
            text = f"model.gguf: models of kind '{arch.name}' do not show a draft the input of layer {layer}; run it"
            with pytest.raises(pd.IncompatibleModelsError, match=text):
                model.layer_input(PROMPT[:2], layer)
            draft = draft_reading(layer).file().write(tmp_path / "draft.gguf")
            with pytest.raises(pd.IncompatibleModelsError, match=text):
                pd.Speculator(model, draft, n_max=0, **SHORT)


def test_what_deepstack_adds_is_in_the_tap(tmp_path: Path) -> None:
    """Of text it adds nothing, so the taps are those of a model without."""
    rows = []
    for name in ("qwen3vl", "qwen3vl-deepstack"):
        with pd.Model(ARCHS[name].file().write(tmp_path / f"{name}.gguf")) as model:
            rows.append([model.layer_input(PROMPT, layer) for layer in (1, 2, 3)])
    np.testing.assert_array_equal(*rows)
