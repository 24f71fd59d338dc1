"""A converted draft is what upstream's converter makes of the checkpoint, and drafts as the checkpoint would."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import math
import tracemalloc
from pathlib import Path
from typing import Any

import checkpoints
import gguf
import numpy as np
import pytest
import tiny
import upstream_convert
from checkpoints import Checkpoint, hf_name, noise
from laws import TINY, Models, checked_run
from tiny import MASK, N_EMBD, N_VOCAB, Array, Draft, Files, Target
from upstream_convert import CASES, TARGET, facts

import pyllama_dflash as pd

RECORDED = json.loads(upstream_convert.RECORD.read_text(encoding="utf-8"))
PROMPT = "in the end an owl sat"


@pytest.fixture
def target(files: Files) -> Path:
    return files.path(TARGET)


def tensors(path: Path) -> dict[str, Array]:
    return {
        each.name: each.data if each.name == "d2t" else gguf.dequantize(each.data, each.tensor_type)
        for each in gguf.GGUFReader(path).tensors
    }


def keys_of(made: Checkpoint, target: Path, folder: Path, **options: Any) -> dict[str, str]:
    """Keys of what a checkpoint becomes, as upstream_convert.facts() has them, without the architecture's name."""
    out = folder / "draft.gguf"
    pd.convert(made.write(folder / "hf"), out, target=target, **{"outtype": "f16", **options})
    return {key[len("dflash.") :]: value for key, value in facts(out)["keys"].items() if key.startswith("dflash.")}


# upstream's converter -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [f"{name} {outtype}" for name, (_, outtypes) in CASES.items() for outtype in outtypes])
def test_keys_and_tensors_are_those_of_upstreams_converter(case: str, target: Path, tmp_path: Path) -> None:
    name, outtype = case.split()
    folder, out = CASES[name][0]().write(tmp_path / name), tmp_path / "draft.gguf"
    pd.convert(folder, out, target=target, outtype=outtype)
    assert facts(out) == RECORDED[case]


@pytest.mark.slow
def test_the_record_is_what_upstreams_converter_makes(tmp_path: Path) -> None:
    for module in ("torch", "transformers"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"upstream's converter needs {module}")
    assert upstream_convert.record(tmp_path) == RECORDED


# layouts --------------------------------------------------------------------------------------------------------------


DRAFTS = {
    "second": Draft(layers=(2, 1)),
    "first": Draft(version=1, layers=(1,), block=16),
    "tables of its own": Draft(version=1, layers=(1,), own=True),
    "a part of the vocabulary": Draft(version=1, layers=(2,), reduced=True),
}
STYLES = [(name, "speculators") for name in DRAFTS if name != "tables of its own"]
STYLES += [(name, "z-lab") for name in DRAFTS if "part" not in name]


@pytest.mark.parametrize(("name", "style"), STYLES)
def test_a_draft_comes_back_from_its_checkpoint(
    files: Files, target: Path, tmp_path: Path, name: str, style: str
) -> None:
    like, out = DRAFTS[name], tmp_path / "draft.gguf"
    info = pd.convert(checkpoints.of_draft(like, style).write(tmp_path / "hf"), out, target=target, outtype="f32")
    with pd.Model.header(files.path(like)) as original:
        expected = dataclasses.replace(original.info, own_embd=like.own, n_params=info.n_params, n_bytes=info.n_bytes)
    assert info == expected
    ours, theirs = tensors(out), tensors(files.path(like))
    if like.reduced:  # it shares the target's embeddings
        del theirs["token_embd.weight"]
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert np.array_equal(ours[key], tensor), key


def test_parts_prefixes_and_later_names_make_no_difference(target: Path, tmp_path: Path) -> None:
    made, written = checkpoints.random(), set()
    renamed = {name + ".weight" * name.endswith("codebook"): value for name, value in made.tensors.items()}
    unused = {"rotary_emb.inv_freq": noise(1, 16), "layers.0.self_attn.rotary_emb.inv_freq": noise(1, 16)}
    variants = [
        (made, 1),
        (made, 3),
        (dataclasses.replace(made, prefix="model."), 1),
        (dataclasses.replace(made, tensors={**renamed, **unused}), 2),
    ]
    for i, (variant, parts) in enumerate(variants):
        out = tmp_path / f"{i}.gguf"
        pd.convert(variant.write(tmp_path / str(i) / "draft", parts), out, target=target)
        written.add(out.read_bytes())
    assert len(written) == 1


def test_speculators_and_zlab_describe_the_same_draft(target: Path, tmp_path: Path) -> None:
    made = checkpoints.random(n_layer=2, ids=(1, 0))
    nested = Checkpoint(checkpoints.speculators_config(n_layer=2, ids=(1, 0)), dict(made.tensors))
    for name in ("embed_tokens", "lm_head", "verifier_lm_head"):  # older checkpoints have copies of the target's
        nested.tensors[f"{name}.weight"] = noise(9, N_VOCAB, N_EMBD)
    nested.tensors["verifier_norm.weight"] = noise(9, N_EMBD)
    for i, each in enumerate((made, nested)):
        pd.convert(each.write(tmp_path / str(i) / "draft"), tmp_path / f"{i}.gguf", target=target)
    assert (tmp_path / "0.gguf").read_bytes() == (tmp_path / "1.gguf").read_bytes()


# what a config.json says ----------------------------------------------------------------------------------------------

SLIDING: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "sliding_attention"],
}
MIXED = {**SLIDING, "layer_types": ["full_attention", "sliding_attention"]}
NO_WINDOW = {"attention.sliding_window": None, "attention.causal": None}
ZLAB: dict[str, tuple[dict[str, Any], dict[str, str | None]]] = {
    "windows are causal": (SLIDING, {"attention.sliding_window": "UINT32 64", "attention.causal": "BOOL true"}),
    "unless it says not": ({**SLIDING, "is_causal": False}, {"attention.causal": "BOOL false"}),
    "windows in some layers": (
        MIXED,
        {"attention.causal": None, "attention.sliding_window_pattern": "ARRAY BOOL [false, true]"},
    ),
    "causal without windows": ({"is_causal": True}, {"attention.causal": "BOOL true"}),
    "windows that are switched off": ({**SLIDING, "use_sliding_window": False}, NO_WINDOW),
    "windows that no layer has": ({**SLIDING, "layer_types": ["full_attention"] * 2}, NO_WINDOW),
    "windows from a layer on": (
        {**SLIDING, "layer_types": None, "max_window_layers": 1},
        {"attention.sliding_window_pattern": "ARRAY BOOL [false, true]"},
    ),
    "another activation": ({"hidden_act": "gelu"}, {"hidden_activation": 'STRING "gelu"'}),
    "no length": ({"max_position_embeddings": None}, {"context_length": "UINT32 2048"}),
    "no width of a head": ({"head_dim": None}, {"attention.key_length": "UINT32 32"}),
    "its keys at the top": (
        {"dflash_config": None, "target_layer_ids": [1], "mask_token_id": MASK, "output_multiplier": 2},
        {"target_layers": "ARRAY INT32 [2]", "block_size": "UINT32 16", "logit_scale": "FLOAT32 2.0"},
    ),
}
SPECULATORS = {
    "windows see both ways": ({"sliding_window_non_causal": True}, SLIDING, "BOOL false"),
    "windows are causal": ({"sliding_window_non_causal": False}, SLIDING, "BOOL true"),
    "windows by default": ({}, SLIDING, "BOOL true"),  # of version 1
    "windows in some layers": ({}, MIXED, None),
    "no windows": ({"sliding_window_non_causal": True}, {}, None),
}


@pytest.mark.parametrize("case", ZLAB)
def test_config_of_zlab(target: Path, tmp_path: Path, case: str) -> None:
    changes, expected = ZLAB[case]
    made = checkpoints.random(version=1, n_layer=2)
    made.config |= changes
    found = keys_of(made, target, tmp_path)
    assert {key: found.get(key) for key in expected} == expected


@pytest.mark.parametrize("case", SPECULATORS)
def test_causal_flag_of_speculators(target: Path, tmp_path: Path, case: str) -> None:
    changes, nested, expected = SPECULATORS[case]
    made = Checkpoint(
        checkpoints.speculators_config(version=1, n_layer=2), checkpoints.random(version=1, n_layer=2).tensors
    )
    made.config |= changes
    made.config["transformer_layer_config"] |= nested
    assert keys_of(made, target, tmp_path).get("attention.causal") == expected


def test_a_mix_of_causal_layers_and_others_is_warned_of(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = checkpoints.random(version=1, n_layer=2)
    made.config |= MIXED
    with caplog.at_level(logging.WARNING, "pyllama_dflash"):
        keys_of(made, target, tmp_path)
    assert "a GGUF has one flag for all of them: written as not causal" in caplog.text


def test_rope_of_llama_3_becomes_a_divisor_for_each_frequency(target: Path, tmp_path: Path) -> None:
    made = checkpoints.random(version=1)
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    made.config["rope_parameters"] = {"rope_theta": 5e5, "original_max_position_embeddings": 256, **scaling}
    assert "rope.scaling.type" not in keys_of(made, target, tmp_path)
    found = tensors(tmp_path / "draft.gguf")["rope_freqs.weight"]
    wavelengths = 2 * math.pi * 5e5 ** (np.arange(tiny.D_HEAD // 2) / (tiny.D_HEAD // 2))
    assert (found[wavelengths < 256 / 4] == 1).all()
    assert (found[wavelengths > 256] == 8).all()
    between = found[(wavelengths > 256 / 4) & (wavelengths < 256)]
    assert between.size > 0
    assert ((between > 1) & (between < 8)).all()
    assert (np.diff(found) >= 0).all()


def test_a_target_that_rotates_by_sections_gives_its_draft_one(files: Files, tmp_path: Path) -> None:
    file = TARGET.file()
    file.keys["rope.dimension_sections"] = [8, 4, 4, 0]
    target = file.write(tmp_path / "target.gguf")
    found = keys_of(checkpoints.random(version=1), target, tmp_path)
    assert found["rope.dimension_sections"] == f"ARRAY INT32 [{tiny.D_HEAD // 2}, 0, 0, 0]"


def test_the_mask_token_may_be_the_targets(target: Path, tmp_path: Path) -> None:
    made = checkpoints.random()
    del made.config["dflash_config"]["mask_token_id"]
    pd.convert(made.write(tmp_path / "hf"), tmp_path / "draft.gguf", target=target)
    with pd.Model.header(tmp_path / "draft.gguf") as draft:
        assert draft.info.mask_token == MASK


def test_a_mask_row_comes_with_the_tables_of_a_quantised_target(files: Files, tmp_path: Path) -> None:
    quantised = files.path(dataclasses.replace(TARGET, weights="Q8_0"))
    out = tmp_path / "draft.gguf"
    pd.convert(upstream_convert.masked().write(tmp_path / "hf"), out, target=quantised, outtype="f32")
    ours, theirs = tensors(out), tensors(quantised)
    row = ours["token_embd.weight"][MASK]
    assert np.array_equal(row[:257], np.arange(257) / 64)  # beyond that bfloat16 rounds
    assert np.allclose(row, np.arange(N_EMBD) / 64, rtol=0.01)
    others = np.arange(N_VOCAB) != MASK
    assert np.array_equal(ours["token_embd.weight"][others], theirs["token_embd.weight"][others])
    head = {each.name: each for each in gguf.GGUFReader(out).tensors}["output.weight"]
    assert head.tensor_type == gguf.GGMLQuantizationType.Q8_0
    assert np.array_equal(ours["output.weight"], theirs["output.weight"])


def test_rows_that_q8_0_cannot_take_are_f16(target: Path, tmp_path: Path) -> None:
    made = checkpoints.random()
    made.config["dflash_config"]["selector_rank"] = 24
    for name in ("predecessor_codebook", "successor_codebook"):
        made.tensors[f"candidate_selector.{name}"] = noise(7, N_VOCAB, 24)
    made.tensors["candidate_selector.hidden_projection.weight"] = noise(8, 24, N_EMBD)
    pd.convert(made.write(tmp_path / "hf"), tmp_path / "draft.gguf", target=target, outtype="q8_0")
    found = facts(tmp_path / "draft.gguf")["tensors"]
    assert found["selector_successor.weight"].startswith("F16 [24, ")
    assert found["selector_hidden.weight"].startswith("Q8_0 ")


def test_only_one_tensor_is_in_memory_at_a_time(target: Path, tmp_path: Path) -> None:
    made = checkpoints.random(version=1, n_layer=24, ids=(0,))
    folder = made.write(tmp_path / "hf")
    largest = max(tensor.nbytes for tensor in made.tensors.values())
    whole = sum(tensor.nbytes for tensor in made.tensors.values())
    pd.convert(folder, tmp_path / "first.gguf", target=target)  # what is imported does not count
    tracemalloc.start()
    try:
        pd.convert(folder, tmp_path / "draft.gguf", target=target, outtype="f32")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 * largest < whole / 4


# running --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("like", [DRAFTS["second"], DRAFTS["a part of the vocabulary"]], ids=["second", "reduced"])
def test_a_converted_draft_drafts_as_the_original_and_leaves_the_text_alone(
    models: Models, files: Files, tmp_path: Path, like: Draft
) -> None:
    target, out = Target(n_layer=3), tmp_path / "draft.gguf"
    made = checkpoints.of_draft(like, "speculators")
    pd.convert(made.write(tmp_path / "hf"), out, target=files.path(target), outtype="f32")
    reference = models.plain(target, PROMPT, 48, ignore_eos=True)
    known = checked_run(models.get(target, like), PROMPT, max_tokens=48, ignore_eos=True)
    with pd.Speculator(files.path(target), out, **TINY) as spec:
        ours = checked_run(spec, PROMPT, max_tokens=48, ignore_eos=True)
    models.assert_same(target, PROMPT, ours.tokens, reference.tokens)
    assert ours.tokens == known.tokens
    assert ours.stats.histogram == known.stats.histogram
    assert ours.stats.mean_len > 1.5


@pytest.mark.model
@pytest.mark.parametrize("outtype", ["f32", "f16"])
def test_the_bundled_draft_survives_a_round_trip(demo: tuple[Path, Path], tmp_path: Path, outtype: str) -> None:
    target, draft = demo
    with pd.Model.header(draft) as header:
        info, base = header.info, float(header.meta("dflash.rope.freq_base") or 0)
    config = checkpoints.zlab_config(2, info.n_layer, tuple(i - 1 for i in info.target_layers), info.block_size)
    config |= {"vocab_size": info.n_vocab, "hidden_size": info.n_embd, "intermediate_size": 1536, "head_dim": 64}
    config |= {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": info.n_ctx_train}
    config |= {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": base, "rope_type": "default"}}
    config["dflash_config"]["mask_token_id"] = info.mask_token
    known = tensors(draft)
    made = Checkpoint(config, {hf_name(name): tensor for name, tensor in known.items()})
    out = tmp_path / "draft.gguf"
    pd.convert(made.write(tmp_path / "hf"), out, target=target, outtype=outtype)
    with pd.Model.header(draft) as header, pd.Model.header(out) as again:
        left_out = {
            "general.name",
            "general.type",
            "general.license",
            "general.file_type",
            "general.quantization_version",
        }
        left_out |= {"dflash.draft_vocab"}  # made where it is trained
        ours = {
            key: value for key, value in again.metadata().items() if key not in left_out | {"tokenizer.chat_template"}
        }
        assert ours == {key: value for key, value in header.metadata().items() if key not in left_out}
    for name, tensor in tensors(out).items():
        same = known[name] if outtype == "f32" or tensor.ndim < 2 or "base" in name else known[name].astype(np.float16)
        assert np.array_equal(tensor, same), name
    accepted = []
    for each in (draft, out):
        with pd.Speculator(target, each, n_ctx=512) as spec:
            prompts = ["Write a Python function that adds two numbers.", "Count from one to twenty."]
            stats = [checked_run(spec, messages=prompt, max_tokens=64).stats for prompt in prompts]
            accepted.append(sum(s.draft_n_accepted for s in stats) / sum(s.draft_n for s in stats))
    assert accepted[1] == pytest.approx(accepted[0], abs=0.06)
    assert accepted[0] > 0.3
