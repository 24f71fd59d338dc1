"""What training makes, exported: the weights of the network, which drafts as the library does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from benching import ROOT

import pyllama_dflash as pd

pytest.importorskip("torch")
pytest.importorskip("tomllib")

import torch

from bench.draft import config, export, losses, network, target

pytestmark = pytest.mark.filterwarnings("ignore:CUDA initialization")  # of a driver that is older than torch

SETTINGS = ROOT / "bench/draft/smollm2-135m.toml"


def test_the_most_frequent_tokens_are_ascending_and_of_equals_the_lower(tmp_path: Path) -> None:
    np.save(tmp_path / "counts-0.npy", np.array([0, 5, 1, 3, 0, 2, 3]))
    np.save(tmp_path / "counts-1.npy", np.array([0, 0, 2, 0, 9, 1, 0]))
    assert export.frequent(tmp_path, 1) == [4]
    assert export.frequent(tmp_path, 4) == [1, 2, 3, 4]  # 3 of each of 2, 3, 5 and 6
    assert export.frequent(tmp_path, 6) == [1, 2, 3, 4, 5, 6]
    assert export.frequent(tmp_path, 7) == list(range(7))


def _read(path: Path) -> dict[str, np.ndarray]:
    return {t.name: np.array(gguf.dequantize(t.data, t.tensor_type)) for t in gguf.GGUFReader(path).tensors}


@pytest.fixture(scope="module")
def bundled(demo: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """The bundled draft as a network in float32, its target, and what export makes of it."""
    given = export.weights_of(demo[1])
    layers = sum(name.endswith(".q") for name in given)
    changes = [f'target.path="{demo[0]}"', f"draft.layers={layers}", "draft.vocabulary=0"]
    settings, out = config.read(SETTINGS, changes), tmp_path_factory.mktemp("run")
    read = target.Target(demo[0], "cpu", torch.float32)
    draft = network.Draft(settings.draft, read).float()
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            weight.copy_(given.pop(name))
    assert not given
    torch.save({"master": {name: w.detach() for name, w in draft.named_parameters()}}, out / "checkpoint.pt")
    return draft, read, export.export(settings, out)


@pytest.mark.model
def test_exported_weights_are_those_of_the_network(bundled: Any, demo: tuple[Path, Path]) -> None:
    ours, theirs = _read(bundled[2]), _read(demo[1])
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert ours[name].shape == weight.shape, name
        assert np.array_equal(ours[name], weight.astype(np.float16) if weight.ndim == 2 else weight), name
    one, other = (gguf.GGUFReader(path).fields for path in (bundled[2], demo[1]))
    assert set(other) - set(one) <= {"general.quantized_by", "general.quantization_version", "dflash.draft_vocab"}
    for name in set(other) & set(one):
        if not name.startswith(("GGUF.", "general.")):
            assert one[name].contents() == other[name].contents(), name


@torch.no_grad()
def drafts_of(draft: Any, read: Any, ids: list[int], at: list[int], block: int, mask: int) -> list[list[int]]:
    """What the network drafts at places of a text, each after the tokens before it."""
    settings = config.read(SETTINGS, [])
    cos, sin = read.rotary(len(ids) + block)
    rows, places = torch.tensor([ids]), torch.tensor(at)[:, None] + torch.arange(block)
    features, _ = read.rows(
        rows, settings.draft.taps, target.layer_in, target.layer_out, (cos[: len(ids)], sin[: len(ids)])
    )
    tokens = torch.full(places.shape, mask)
    tokens[:, 0] = rows[0, at]
    seen = torch.arange(len(ids)) < torch.tensor(at)[:, None]
    turn, block_turn = (cos[: len(ids)], sin[: len(ids)]), (cos[places][None, :, None], sin[places][None, :, None])
    hidden = draft(features, read.embedding[tokens][None], seen[None], turn, block_turn)[0, :, 1:]
    found, before = [], tokens[:, 0]
    for slot in range(block - 1):
        mine = hidden[:, slot]
        tables = (draft.predecessor, draft.successor, draft.selector)
        logits = mine @ read.head.T
        best = logits.argmax(-1)  # a candidate, so that none is put in for it
        picked = losses.select(mine, logits, best, before, tables, read.head, settings.draft.top_k)
        before = picked.candidates.gather(1, picked.scores.argmax(-1, keepdim=True))[:, 0]
        found.append(before)
    return torch.stack(found, 1).tolist()


@pytest.mark.model
def test_the_network_drafts_what_the_library_drafts(bundled: Any, demo: tuple[Path, Path]) -> None:
    """Up to near ties: the library's target rounds its activations to 8 bits."""
    draft, read, path = bundled
    with pd.Speculator(demo[0], path, n_ctx=512, n_threads=1) as spec:
        text = spec.target.apply_chat_template("Write a Python function that adds two numbers.")
        ids = spec.target.tokenize(text, add_special=False)
        spec.prefill(ids)
        at, theirs = [], []
        for _ in range(16):
            drafted = spec.draft()
            at.append(drafted.position)
            theirs.append(list(drafted.tokens))
            verdict = spec.verify(drafted)
            ids += [*verdict.accepted, verdict.bonus]
    settings = config.read(SETTINGS, [])
    ours = drafts_of(draft, read, ids, at, settings.draft.block, settings.draft.mask_token)
    same = np.array(ours) == np.array(theirs)
    print(same.sum(0), len(at))
    assert same.shape == (16, 7)
    assert same[:, 0].sum() >= 14
    assert same.mean() > 0.75
