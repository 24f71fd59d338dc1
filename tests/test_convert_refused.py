"""What cannot be converted is refused in one sentence that says what to do, and nothing is left behind."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import upstream_convert
from checkpoints import Checkpoint, noise, refused, rename_type
from tiny import MASK, N_EMBD, N_VOCAB, Files
from upstream_convert import TARGET

import pyllama_dflash as pd

Change = Callable[[Checkpoint], None]


@pytest.fixture
def target(files: Files) -> Path:
    return files.path(TARGET)


def config(path: str = "", **changes: Any) -> Change:
    """Change keys of config.json, those in an object of it if a path is given; None takes them out."""

    def change(made: Checkpoint) -> None:
        inner = made.config[path] if path else made.config
        inner.update(changes)
        for key in [key for key, value in changes.items() if value is None]:
            del inner[key]

    return change


def own(**changes: Any) -> Change:
    return config("dflash_config", **changes)


def speculators(**changes: Any) -> Change:
    def change(made: Checkpoint) -> None:
        made.config = {**checkpoints.speculators_config(), **changes}

    return change


def tensor(name: str, *shape: int) -> Change:
    """Another shape; none: without the tensor."""

    def change(made: Checkpoint) -> None:
        made.tensors.pop(name, None)
        if shape:
            made.tensors[name] = noise(1, *shape)

    return change


def no_query(made: Checkpoint) -> None:
    for name in [name for name in made.tensors if "_proj.weight" in name]:
        del made.tensors[name]


def token_map(shift: int) -> Change:
    def change(made: Checkpoint) -> None:
        other = upstream_convert.reduced()
        made.config, made.tensors = other.config, other.tensors
        made.tensors["d2t"][-1] += shift

    return change


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("made-by-a-pickle",)


def mask_file(value: Any) -> Change:
    """A zip file as torch makes it, with another pickle in it."""
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        archive.writestr("mask_embedding/data.pkl", pickle.dumps(value))

    def change(made: Checkpoint) -> None:
        made.files["mask_embedding.pt"] = raw.getvalue()

    return change


LOAD, PAIR = pd.ModelLoadError, pd.IncompatibleModelsError
WRONG: dict[str, tuple[Change, type[Exception], str]] = {
    "no architecture": (
        config(architectures=None),
        LOAD,
        "architecture unknown is not one .* DFlash2DraftModel and check",
    ),
    "another": (
        config(architectures=["LlamaForCausalLM"]),
        LOAD,
        "architecture LlamaForCausalLM is not .*: DFlashDraft",
    ),
    "DSpark": (config(architectures=["Qwen3DSparkModel"]), LOAD, "is a DSpark draft; only DFlash and DFlash2 drafts"),
    "speculators' DSpark": (speculators(speculators_model_type="dspark"), LOAD, "is a DSpark draft; only DFlash and"),
    "speculators' EAGLE": (
        speculators(speculators_model_type="eagle3"),
        LOAD,
        "type='eagle3' is not .*: dflash, dflash2",
    ),
    "sampled from the anchor": (speculators(sample_from_anchor=True), LOAD, "sample_from_anchor=true: .* not run here"),
    "no width": (config(hidden_size=None), LOAD, "config.json: key hidden_size is missing; use the config.json that"),
    "no epsilon": (config(rms_norm_eps=None), LOAD, "key rms_norm_eps is missing"),
    "no layers to read": (own(target_layer_ids=None), LOAD, "key target_layer_ids is missing"),
    "no taps": (own(conv_kernel_size=None), LOAD, "key conv_kernel_size is missing"),
    "no theta": (config(rope_parameters=None), LOAD, "rope_theta=None is not positive"),
    "a width in words": (config(hidden_size="wide"), LOAD, "hidden_size='wide' is not a whole number; correct it"),
    "no layers": (config(num_hidden_layers=0), LOAD, "num_hidden_layers=0 is out of range, 1 to 512; correct it"),
    "an id in words": (own(target_layer_ids=["one"]), LOAD, r"target_layer_ids=\['one'\] is not a list of layer ids"),
    "another scaling": (
        config(rope_parameters={"rope_theta": 1e4, "rope_type": "longrope", "factor": 2.0}),
        LOAD,
        "RoPE scaling 'longrope' is not supported; known are linear, llama3 and yarn",
    ),
    "another activation": (
        config(hidden_act="relu2"),
        LOAD,
        "hidden_act='relu2' is not supported; known are silu, gelu",
    ),
    "quantised": (
        config(quantization_config={"quant_method": "fp8"}),
        LOAD,
        "is quantised .*; convert from the one in",
    ),
    "a group that does not divide": (
        own(conv_group_size=48),
        LOAD,
        "conv_group_size=48 does not divide hidden_size=320",
    ),
    "too many candidates": (
        own(selector_top_k=18),
        LOAD,
        "dflash.selector_top_k = 18 is too many for embedding_length 320",
    ),
    "another width": (
        config(hidden_size=384),
        PAIR,
        "is 384 wide .* and recorded-.*gguf is 320; use the target that the",
    ),
    "another vocabulary": (
        config(vocab_size=9),
        PAIR,
        f"has 9 tokens .* and recorded-.*gguf has {N_VOCAB}; use the target",
    ),
    "a layer beyond the target": (
        own(target_layer_ids=[30]),
        PAIR,
        "the output of layer 30 and .* has layers 0 to 2; use",
    ),
    "the last layer's output": (
        own(target_layer_ids=[2]),
        PAIR,
        r"draft.gguf reads the input of layer 3 .* has 3 layers",
    ),
    "a mask that is no token": (
        own(mask_token_id=N_VOCAB),
        LOAD,
        f"mask_token_id={N_VOCAB} is no token, there are {N_VOCAB}",
    ),
    "a tensor missing": (tensor("norm.weight"), LOAD, "tensor norm.weight is missing; download the checkpoint again"),
    "many missing": (
        no_query,
        LOAD,
        "tensor layers.0.self_attn.q_proj.weight, .*, .*v_proj.weight and 4 more is missing",
    ),
    "a tensor too many": (
        tensor("layers.1.norm.weight", 4),
        LOAD,
        "tensor layers.1.norm.weight is unexpected: DFlash2 in",
    ),
    "a bias": (
        tensor("layers.0.self_attn.q_proj.bias", 320),
        LOAD,
        "tensor layers.0.self_attn.q_proj.bias is unexpected",
    ),
    "another shape": (
        tensor("fc.weight", N_EMBD, 2 * N_EMBD),
        LOAD,
        r"tensor fc.weight has shape \[320, 640\] and config.json says \[320, 320\]; use the config.json that came",
    ),
    "a reduced DFlash2": (
        speculators(draft_vocab_size=99),
        LOAD,
        "draft_vocab_size=99 .* a DFlash2 draft needs all tokens",
    ),
    "a token beyond all": (
        token_map(999),
        LOAD,
        f"tensor d2t names token 1425, and there are {N_VOCAB}; download it again",
    ),
    "a token named twice": (token_map(-3), LOAD, r"reduced vocabulary \(d2t\) names token \d+ twice"),
    "a mask row of another token": (
        mask_file({"mask_token_id": 3, "embedding": np.zeros(1)}),
        LOAD,
        "mask_embedding.pt: not readable as a tensor that torch saved",
    ),
    "a mask row that is code": (
        mask_file(Evil()),
        LOAD,
        r"mask_embedding.pt: .* \(it names posix.mkdir\); download it",
    ),
    "a mask row that is none": (
        lambda made: made.files.update({"mask_embedding.pt": b"none"}),
        LOAD,
        "mask_embedding.pt: not readable as a tensor that torch saved",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_checkpoint_is_refused_in_a_sentence(target: Path, tmp_path: Path, fault: str) -> None:
    change, kind, message = WRONG[fault]
    made = checkpoints.random()
    change(made)
    refused(made.write(tmp_path / "hf"), tmp_path / "draft.gguf", target, kind, message)
    assert not Path("made-by-a-pickle").exists()


def test_a_mask_row_of_another_token_or_width(target: Path, tmp_path: Path) -> None:
    made = upstream_convert.masked()
    made.config["dflash_config"]["mask_token_id"] = 3
    message = f"mask_embedding.pt: is for token {MASK}, and mask_token_id=3; download the checkpoint again"
    refused(made.write(tmp_path / "hf"), tmp_path / "draft.gguf", target, LOAD, message)
    made = upstream_convert.masked()
    raw = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(made.files["mask_embedding.pt"])) as old, zipfile.ZipFile(raw, "w") as new:
        for name in old.namelist():  # 320 in a pickle becomes 319
            new.writestr(name, old.read(name).replace(b"M@\x01", b"M?\x01"))
    made.files["mask_embedding.pt"] = raw.getvalue()
    message = r"the embedding has shape \[319\], not \[320\]; download the checkpoint again"
    refused(made.write(tmp_path / "other"), tmp_path / "draft.gguf", target, LOAD, message)


# files ----------------------------------------------------------------------------------------------------------------


def cut(path: Path, n: int) -> None:
    path.write_bytes(path.read_bytes()[:n])


def longer_shape(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"[320]", b"[321]", 1))


MODEL = "model.safetensors"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: no such file; give the folder of a checkpoint"),
    "no JSON": (lambda f: cut(f / "config.json", 20), "config.json: not readable as JSON .*; download it again"),
    "a list": (lambda f: (f / "config.json").write_text("[]"), "config.json: not a JSON object; download it again"),
    "no tensors": (
        lambda f: (f / MODEL).unlink(),
        "has no model.safetensors; convert from the checkpoint in that format",
    ),
    "empty": (lambda f: cut(f / MODEL, 0), "model.safetensors: not a safetensors file, or truncated"),
    "half a header": (lambda f: cut(f / MODEL, 500), "model.safetensors: not a safetensors file, or truncated"),
    "half the data": (
        lambda f: cut(f / MODEL, 90000),
        r"tensor \S+ ends at byte \d+ and the file has 90000: truncated or",
    ),
    "a lying shape": (
        lambda f: longer_shape(f / MODEL),
        r"tensor \S+ of shape \[321\] has 1280 bytes: truncated or damaged",
    ),
    "no header": (lambda f: (f / MODEL).write_bytes(bytes(range(8)) + b"x" * 99), "not a safetensors file, or"),
    "bad JSON": (
        lambda f: (f / MODEL).write_bytes((9).to_bytes(8, "little") + b"{" * 9) and None,
        "the header of safetensors is not readable: truncated",
    ),
    "fp8": (
        lambda f: rename_type(f / MODEL, "F32", "F8_E4M3"),
        "has type F8_E4M3: convert from a checkpoint in bf16, f16",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_in_a_sentence(target: Path, tmp_path: Path, damage: str) -> None:
    folder = checkpoints.random().write(tmp_path / "hf")
    DAMAGE[damage][0](folder)
    refused(folder, tmp_path / "draft.gguf", target, LOAD, DAMAGE[damage][1])


def test_parts_that_do_not_fit_their_index(target: Path, tmp_path: Path) -> None:
    folder = checkpoints.random().write(tmp_path / "hf", parts=3)
    index, out = folder / "model.safetensors.index.json", tmp_path / "draft.gguf"
    whole = json.loads(index.read_text())
    for change, message in (
        (
            {"ghost.weight": "model-00001-of-00003.safetensors"},
            "tensor ghost.weight of .*index.json is missing; download",
        ),
        (
            {"norm.weight": "model-00009-of-00003.safetensors"},
            "00009-of-00003.safetensors: no such file, and .* names it",
        ),
        ({"norm.weight": "../other.safetensors"}, "other.safetensors is outside the checkpoint's folder"),
        ({"norm.weight": 3}, "weight_map is missing or names no files; download it again"),
    ):
        index.write_text(json.dumps({**whole, "weight_map": {**whole["weight_map"], **change}}))
        refused(folder, out, target, LOAD, message)
    index.unlink()
    (folder / "model-00004-of-00003.safetensors").write_bytes(
        (folder / "model-00001-of-00003.safetensors").read_bytes()
    )
    refused(folder, out, target, LOAD, r"tensor \S+ is in model-00001-of-00003.safetensors, too; remove one of the two")
