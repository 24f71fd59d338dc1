"""Checkpoints that are odd or made to do harm: an error in one sentence, never a draft that is wrong without a word."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ggufile
import numpy as np
import pytest
from checkpoints import random, refused
from tiny import Draft, Files
from upstream_convert import TARGET

import pyllama_dflash as pd

LOAD = pd.ModelLoadError
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "beyond float32": ({"rms_norm_eps": 1e39}, "rms_norm_eps is out of range"),
    "400 digits": ({"rms_norm_eps": 10**400}, "rms_norm_eps is out of range"),
    "a share below 0": (
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": -1}},
        "partial_rotary_factor=-1.0 is no share",
    ),
    "a share above 1": (
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 2}},
        "partial_rotary_factor=2.0 is no share",
    ),
    "a list as a name": ({"speculators_model_type": ["dflash"]}, "speculators_model_type=.* is no name"),
}


@pytest.fixture
def target(files: Files) -> Path:
    return files.path(TARGET)


@pytest.mark.parametrize("name", CONFIGS)
def test_values_of_the_config(target: Path, tmp_path: Path, name: str) -> None:
    made, (changes, message) = random(), CONFIGS[name]
    made.config.update(changes)
    refused(made.write(tmp_path / "hf"), tmp_path / "out.gguf", target, LOAD, message)


@pytest.mark.parametrize("outtype", ["f16", "f32", "q8_0"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite(target: Path, tmp_path: Path, value: float, outtype: str) -> None:
    made = random()
    made.tensors["fc.weight"][3, 5] = value
    folder = made.write(tmp_path / "hf")
    refused(folder, tmp_path / "out.gguf", target, LOAD, "fc.weight has a weight that is not finite", outtype=outtype)


@pytest.mark.parametrize(("value", "outtype"), [(1e5, "f16"), (1e7, "q8_0")])
def test_weights_beyond_the_type(target: Path, tmp_path: Path, value: float, outtype: str) -> None:
    made = random()
    made.tensors["fc.weight"][3, 5] = value
    folder, out = made.write(tmp_path / "hf"), tmp_path / "out.gguf"
    refused(folder, out, target, LOAD, "fc.weight has weights beyond the range", outtype=outtype)
    pd.convert(folder, out, target=target, outtype="f32")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_is_no_file(target: Path, tmp_path: Path, name: str) -> None:
    folder = random().write(tmp_path / "hf")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    refused(folder, tmp_path / "out.gguf", target, LOAD, f"{name}: is no regular file")


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "mask_embedding.pt", "config.json"])
def test_a_part_of_the_checkpoint_is_no_place(target: Path, tmp_path: Path, name: str) -> None:
    made = random()
    folder = made.write(tmp_path / "hf")
    index = json.dumps({"weight_map": dict.fromkeys(made.tensors, "model.safetensors")})
    (folder / "model.safetensors.index.json").write_text(index)
    if name == "mask_embedding.pt":
        (folder / name).write_text("kept")
    kept = (folder / name).read_text()
    with pytest.raises(ValueError, match="a part of the checkpoint"):
        pd.convert(folder, folder / name, target=target, overwrite=True)
    assert (folder / name).read_text() == kept


def test_a_file_that_shrinks(target: Path, tmp_path: Path) -> None:
    folder, out = random().write(tmp_path / "hf"), tmp_path / "out.gguf"
    stored = folder / "model.safetensors"

    def cut(done: int, total: int) -> None:
        os.truncate(stored, stored.stat().st_size // 2)

    refused(folder, out, target, LOAD, "is cut off: truncated or damaged", progress=cut)


def test_a_folder_whose_name_is_not_utf_8(target: Path, tmp_path: Path) -> None:
    folder = random().write(tmp_path / os.fsdecode(b"ck\xff"))
    pd.convert(folder, tmp_path / "out.gguf", target=target)
    assert pd.Model.header(tmp_path / "out.gguf").name


def test_quantizing_a_tensor_without_weights(files: Files, tmp_path: Path) -> None:
    parts = ggufile.read(files.path(Draft()))
    parts.tensor("blk.0.attn_q.weight").dims = [320, 0]
    parts.lay_out()
    (tmp_path / "empty.gguf").write_bytes(bytes(parts))
    with pytest.raises(pd.ModelLoadError, match=r"attn_q\.weight has no weights; download"):
        pd.quantize(tmp_path / "empty.gguf", tmp_path / "out.gguf", "q8")
    assert not (tmp_path / "out.gguf").exists()
