"""Quantising: the types that come out, how near the weights stay, and that the file is there whole or not at all."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gguf
import ggufile
import numpy as np
import pytest
import tiny
from laws import checked_run
from tiny import Draft, Files, Target

import pyllama_dflash as pd
from pyllama_dflash._files import shipped

# Greatest error of a type, as a part of the weights' deviation, for weights of about a normal distribution.
ERRORS = {"Q8_0": 0.01, "Q6_K": 0.025, "Q5_0": 0.05, "Q4_K": 0.09, "Q4_0": 0.12, "Q2_K": 0.45}
F16 = Draft(weights="F16")
# By the first word after the layer's number: width 320, so K-quants do not fit, and selector rows of 32.
NARROW = {
    "q8": {"attn_q": "Q8_0", "fc": "Q8_0", "selector_predecessor": "Q8_0", "attn_conv_proj": "Q8_0"},
    "q4-mix": {"attn_q": "Q4_0", "fc": "Q8_0", "selector_predecessor": "Q8_0", "attn_conv_proj": "Q8_0"},
    "q4": {"attn_q": "Q4_0", "fc": "Q4_0", "selector_predecessor": "Q4_0", "attn_conv_proj": "Q8_0"},
    "q4-k-m": {"attn_q": "Q5_0", "fc": "Q8_0", "selector_predecessor": "Q8_0", "attn_conv_proj": "Q8_0"},
    "q2-hybrid": {"attn_q": "Q4_0", "fc": "Q4_0", "selector_predecessor": "Q8_0", "attn_conv_proj": "Q8_0"},
    "q2": {"attn_q": "Q4_0", "fc": "Q4_0", "selector_predecessor": "Q4_0", "attn_conv_proj": "Q8_0"},
}
# Width 512, selector rows of 256: all fits.
WIDE = {
    "q8": {"attn_q": "Q8_0", "fc": "Q8_0", "selector_predecessor": "Q8_0", "output": "Q8_0"},
    "q4-mix": {"attn_q": "Q4_0", "fc": "Q8_0", "selector_predecessor": "Q8_0", "output": "Q8_0"},
    "q4": {"attn_q": "Q4_0", "fc": "Q4_0", "selector_predecessor": "Q4_0", "output": "Q4_0"},
    "q4-k-m": {"attn_q": "Q4_K", "fc": "Q6_K", "selector_predecessor": "Q8_0", "output": "Q6_K"},
    "q2-hybrid": {"attn_q": "Q2_K", "fc": "Q2_K", "selector_predecessor": "Q8_0", "output": "Q8_0"},
    "q2": {"attn_q": "Q2_K", "fc": "Q2_K", "selector_predecessor": "Q2_K", "output": "Q2_K"},
}
FILE_TYPES = {"q8": 7, "q4-mix": 2, "q4": 2, "q4-k-m": 15, "q2-hybrid": 10, "q2": 10}


def tensors(path: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def keys(path: Path) -> dict[str, Any]:
    return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items() if not key.startswith("GGUF.")}


def bare(name: str) -> str:
    return name.split(".")[2 if name.startswith("blk.") else 0]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A pair that all K-quants fit: the sizes are read when its files are written, and its world is its own."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in {"N_EMBD": 512, "N_HEAD": 16, "N_FF": 512, "RANK": 256}.items():
            patch.setattr(tiny, name, size)
        files = Files(tmp_path_factory.mktemp("wide"))
        return files.path(Target(seed=512)), files.path(Draft(seed=512, own=True, weights="BF16"))


@pytest.fixture
def narrow(files: Files) -> Path:
    return files.path(F16)


# what comes out -------------------------------------------------------------------------------------------------------


def check_file(source: Path, out: Path, expected: dict[str, str]) -> None:
    before, after = tensors(source), tensors(out)
    assert list(before) == list(after)
    seen = set()
    for name, tensor in after.items():
        was, kind, part = before[name], tensor.tensor_type.name, bare(name)
        assert list(tensor.shape) == list(was.shape)
        if len(tensor.shape) == 1 or part.endswith("conv_base"):
            assert kind == "F32", name
        elif part in expected:
            assert kind == expected[part], name
            seen.add(part)
        old = gguf.dequantize(was.data, was.tensor_type).ravel()
        new = gguf.dequantize(tensor.data, tensor.tensor_type).ravel()
        if kind == "F32":
            assert (old == new).all(), name
        else:
            assert 0 < np.sqrt(np.mean((old - new) ** 2)) < ERRORS[kind] * old.std(), name
    assert seen == set(expected)


@pytest.mark.parametrize("recipe", NARROW)
def test_types_and_errors_of_a_narrow_draft(recipe: str, narrow: Path, alone: Path) -> None:
    result = pd.quantize(narrow, alone / "q.gguf", recipe, n_threads=2)
    check_file(narrow, alone / "q.gguf", NARROW[recipe])
    found = tensors(alone / "q.gguf")
    assert {t.name: t.type.upper() for t in result.tensors} == {n: t.tensor_type.name for n, t in found.items()}
    assert {t.name: t.n_bytes for t in result.tensors} == {n: t.n_bytes for n, t in found.items()}
    assert {t.name: t.shape for t in result.tensors} == {n: tuple(t.shape[::-1]) for n, t in found.items()}
    assert result.n_bytes == (alone / "q.gguf").stat().st_size
    assert (result.path, result.recipe) == (str(alone / "q.gguf"), recipe)
    assert {t.source_type for t in result.tensors} == {"f16", "f32"}


@pytest.mark.parametrize("recipe", WIDE)
def test_types_and_errors_of_a_draft_that_k_quants_fit(recipe: str, wide: Any, alone: Path) -> None:
    result = pd.quantize(wide[1], alone / "q.gguf", recipe, strict=True)
    check_file(wide[1], alone / "q.gguf", WIDE[recipe])
    assert result.fallbacks == result.requantized == ()
    assert keys(alone / "q.gguf")["general.file_type"] == FILE_TYPES[recipe]
    low, high = {"q8": (8.5, 8.6), "q4": (4.5, 5.0), "q2": (2.6, 3.3)}.get(recipe, (3.3, 8.5))
    assert low < result.bits_per_weight < high


@pytest.mark.parametrize("recipe", WIDE)
def test_the_quantised_draft_opens_and_drafts(recipe: str, wide: Any, alone: Path) -> None:
    pd.quantize(wide[1], alone / "q.gguf", recipe)
    with pd.Speculator(wide[0], alone / "q.gguf", n_ctx=512, n_threads=1) as spec:
        stats = checked_run(spec, "the owl", max_tokens=48, ignore_eos=True).stats
    with pd.Speculator(*wide, n_ctx=512, n_threads=1) as spec:
        whole = checked_run(spec, "the owl", max_tokens=48, ignore_eos=True).stats
    assert whole.mean_len > 1.5
    assert stats.mean_len > (1.2 if recipe == "q2" else 0.8 * whole.mean_len)


def test_blocks_are_those_of_an_independent_implementation(narrow: Path, alone: Path) -> None:
    for recipe in ("q4", "q4-k-m"):  # q8_0, q4_0 and q5_0
        pd.quantize(narrow, alone / recipe, recipe)
        before = tensors(narrow)
        for name, tensor in tensors(alone / recipe).items():
            values = gguf.dequantize(before[name].data, before[name].tensor_type)
            some = values.reshape(-1, values.shape[-1]).any(axis=1)  # a scale of 0 has either sign
            wanted = gguf.quantize(values, tensor.tensor_type).reshape(len(some), -1)
            found = tensor.data.reshape(len(some), -1)
            assert (found[some] == wanted[some]).all(), name


def test_the_file_does_not_depend_on_the_number_of_threads(wide: Any, alone: Path) -> None:
    written = []
    for n in (1, 2, 7):
        pd.quantize(wide[1], alone / f"{n}.gguf", "q2", n_threads=n)
        written.append((alone / f"{n}.gguf").read_bytes())
    assert written[0] == written[1] == written[2]


@pytest.mark.parametrize("like", [Draft(version=1, weights="F16"), Draft(reduced=True), Draft(window=16, block=16)])
def test_other_drafts_keep_their_keys_and_what_is_no_weight(like: Draft, files: Files, alone: Path) -> None:
    source = files.path(like)
    pd.quantize(source, alone / "q.gguf", "q4")
    new = {"general.file_type": 2, "general.quantization_version": 2}
    assert keys(alone / "q.gguf") == {**keys(source), **new}
    if like.reduced:
        before, after = (tensors(path)["d2t"] for path in (source, alone / "q.gguf"))
        assert after.tensor_type.name == "I64"
        assert (before.data == after.data).all()
    with pd.Model.header(source) as a, pd.Model.header(alone / "q.gguf") as b:
        assert (a.info.kind, a.info.block_size, a.info.n_params) == (b.info.kind, b.info.block_size, b.info.n_params)


def test_norms_of_sixteen_bits_become_f32(alone: Path) -> None:
    file = F16.file()
    file.tensors["output_norm.weight"] = file.tensors["output_norm.weight"].astype(np.float16)
    source = file.write(alone / "in.gguf")
    assert tensors(source)["output_norm.weight"].tensor_type.name == "F16"
    pd.quantize(source, alone / "q.gguf", "q8")
    assert tensors(alone / "q.gguf")["output_norm.weight"].tensor_type.name == "F32"


def test_a_source_with_another_alignment(narrow: Path, alone: Path) -> None:
    parts = ggufile.read(narrow)
    parts.keys.append(ggufile.Key(b"general.alignment", ggufile.U32, 32))
    (alone / "in.gguf").write_bytes(bytes(parts))
    writer = gguf.GGUFWriter(alone / "in64.gguf", "dflash")
    writer.add_custom_alignment(64)
    for key, field in gguf.GGUFReader(narrow).fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0], *field.types[1:2])
    for name, tensor in tensors(narrow).items():
        writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for name in ("in.gguf", "in64.gguf"):
        pd.quantize(alone / name, alone / "q.gguf", "q4", overwrite=True)
        check_file(narrow, alone / "q.gguf", NARROW["q4"])


# fallbacks and sources that are quantised -----------------------------------------------------------------------------


def test_fallbacks_are_named(narrow: Path, alone: Path) -> None:
    result = pd.quantize(narrow, alone / "q.gguf", "q2")
    names = {t.name for t in result.fallbacks}
    assert names == {n for n, t in tensors(alone / "q.gguf").items() if t.tensor_type.name == "Q4_0"}
    assert {(t.wanted, t.type) for t in result.fallbacks} == {("q2_K", "q4_0")}
    assert "blk.0.attn_q.weight" in names
    assert result.to_dict()["fallbacks"] == [t.name for t in result.fallbacks]
    assert keys(alone / "q.gguf")["general.file_type"] == 2
    assert pd.quantize(narrow, alone / "q.gguf", "q4", overwrite=True).fallbacks == ()


def test_strict_refuses_fallbacks(narrow: Path, alone: Path) -> None:
    with pytest.raises(ValueError, match=r"fc\.weight has rows of 640, q6_K needs a multiple of 256.*strict=False"):
        pd.quantize(narrow, alone / "q.gguf", "q4-k-m", strict=True)
    assert not list(alone.iterdir())


def test_a_quantised_source_is_warned_of(alone: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = shipped("models/*.gguf")
    assert source is not None
    with caplog.at_level(logging.WARNING):
        result = pd.quantize(source, alone / "q.gguf", "q4-mix")
    (record,) = caplog.records
    assert record.name == "pyllama_dflash.quantizing"
    assert "3 q4_0 are made anew" in record.getMessage()
    assert [t.name for t in result.requantized] == [
        "fc.weight",
        "selector_predecessor.weight",
        "selector_successor.weight",
    ]
    before, after = tensors(source), tensors(alone / "q.gguf")
    assert (before["blk.0.attn_q.weight"].data == after["blk.0.attn_q.weight"].data).all()
    assert after["fc.weight"].tensor_type.name == "Q8_0"


def test_a_second_time_changes_nothing(narrow: Path, alone: Path, caplog: pytest.LogCaptureFixture) -> None:
    pd.quantize(narrow, alone / "a.gguf", "q4-mix")
    pd.quantize(alone / "a.gguf", alone / "b.gguf", "q4-mix")
    assert (alone / "a.gguf").read_bytes() == (alone / "b.gguf").read_bytes()
    assert not caplog.records


# targets --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recipe", "kinds"), [("q8", "Q8_0 Q8_0"), ("q4", "Q4_0 Q8_0"), ("q4-k-m", "Q5_0 Q8_0")])
def test_a_target(recipe: str, kinds: str, files: Files, alone: Path) -> None:
    source = files.path(Target())
    pd.quantize(source, alone / "q.gguf", recipe)
    found = tensors(alone / "q.gguf")
    assert [found[n].tensor_type.name for n in ("blk.0.attn_q.weight", "output.weight")] == kinds.split()
    with pd.Speculator(alone / "q.gguf", n_ctx=128, n_threads=1) as spec:
        assert checked_run(spec, "the owl", max_tokens=8, ignore_eos=True).stats.predicted_n == 8


def test_embeddings_of_a_target_are_its_head_where_it_has_no_other(files: Files, alone: Path) -> None:
    file = Target().file()
    del file.tensors["output.weight"]
    for source, kind in ((files.path(Target()), "Q4_0"), (file.write(alone / "tied.gguf"), "Q8_0")):
        pd.quantize(source, alone / "q.gguf", "q4", overwrite=True)
        assert tensors(alone / "q.gguf")["token_embd.weight"].tensor_type.name == kind


def test_a_target_refuses_recipes_of_drafts(files: Files, alone: Path) -> None:
    for recipe in ("q4-mix", "q2-hybrid", "q2"):
        with pytest.raises(ValueError, match=r"for drafts, .* is an ordinary model; take one of: q8, q4, q4-k-m"):
            pd.quantize(files.path(Target()), alone / "q.gguf", recipe)
    assert not list(alone.iterdir())
