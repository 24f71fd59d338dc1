"""What the recipes give each tensor, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllama_dflash.recipes import FILE_TYPES, RECIPES, block_of, fitting, part_of, type_of

DRAFT = {
    "fc.weight": "q8_0 q8_0 q4_0 q6_K q2_K q2_K",
    "selector_predecessor.weight": "q8_0 q8_0 q4_0 q8_0 q8_0 q2_K",
    "selector_successor.weight": "q8_0 q8_0 q4_0 q8_0 q8_0 q2_K",
    "selector_hidden.weight": "q8_0 q8_0 q8_0 q8_0 q8_0 q8_0",
    "blk.0.attn_conv_proj.weight": "q8_0 q8_0 q8_0 q8_0 q8_0 q8_0",
    "blk.7.ffn_conv_proj.weight": "q8_0 q8_0 q8_0 q8_0 q8_0 q8_0",
    "blk.0.attn_q.weight": "q8_0 q4_0 q4_0 q4_K q2_K q2_K",
    "blk.0.attn_v.weight": "q8_0 q4_0 q4_0 q4_K q2_K q2_K",
    "blk.2.attn_v.weight": "q8_0 q4_0 q4_0 q6_K q2_K q2_K",
    "blk.2.attn_output.weight": "q8_0 q4_0 q4_0 q4_K q2_K q2_K",
    "blk.3.ffn_down.weight": "q8_0 q4_0 q4_0 q6_K q2_K q2_K",
    "blk.3.ffn_gate.weight": "q8_0 q4_0 q4_0 q4_K q2_K q2_K",
    "token_embd.weight": "q8_0 q8_0 q4_0 q4_K q8_0 q2_K",
    "output.weight": "q8_0 q8_0 q4_0 q6_K q8_0 q2_K",
}
TARGET = {
    "token_embd.weight": "q8_0 q4_0 q4_K",
    "output.weight": "q8_0 q6_K q6_K",
    "blk.2.attn_v.weight": "q8_0 q4_0 q6_K",
    "blk.0.ffn_up_exps.weight": "q8_0 q4_0 q4_K",
}
KEPT = (
    "output_norm.weight",
    "enc.output_norm.weight",
    "blk.0.attn_norm.weight",
    "blk.0.attn_q_norm.weight",
    "blk.0.attn_conv_base",
    "blk.0.ffn_conv_base",
    "blk.0.ffn_gate_inp.weight",
    "blk.0.ssm_conv1d.weight",
    "blk.0.attn_q.bias",
    "blk.0.fc.weight",
    "attn_q.weight",
    "attn_conv_proj.weight",
    "d2t",
    "rope_freqs.weight",
)


def test_the_readme_has_the_recipes() -> None:
    text = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
    for name, recipe in RECIPES.items():
        types = [recipe.draft[part] for part in ("backbone", "fc", "codebooks", "embeddings", "head")]
        types[0] += f", {recipe.more}" if recipe.more else ""
        assert f"| `{name}` | {' | '.join(types)} | {'yes' if recipe.target else 'no'} |" in text
        assert recipe.draft["small"] == "q8_0"


def test_recipes_are_those_that_were_asked_for() -> None:
    assert list(RECIPES) == ["q8", "q4-mix", "q4", "q4-k-m", "q2-hybrid", "q2"]
    assert [name for name, recipe in RECIPES.items() if recipe.target is not None] == ["q8", "q4", "q4-k-m"]


@pytest.mark.parametrize("name", DRAFT)
def test_types_of_a_draft(name: str) -> None:
    assert [type_of(recipe, name, 4) for recipe in RECIPES.values()] == DRAFT[name].split()


@pytest.mark.parametrize("name", TARGET)
def test_types_of_a_target(name: str) -> None:
    recipes = [RECIPES[recipe] for recipe in ("q8", "q4", "q4-k-m")]
    assert [type_of(recipe, name, 4, is_draft=False) for recipe in recipes] == TARGET[name].split()


def test_embeddings_of_a_target_that_are_its_head_have_the_heads_type() -> None:
    for recipe, kind in (("q4", "q6_K"), ("q8", "q8_0")):
        assert type_of(RECIPES[recipe], "token_embd.weight", 4, is_draft=False, tied=True) == kind
    assert type_of(RECIPES["q4"], "token_embd.weight", 4, is_draft=True, tied=True) == "q4_0"


@pytest.mark.parametrize("name", KEPT)
def test_what_no_recipe_names(name: str) -> None:
    assert part_of(name) is None
    assert {type_of(recipe, name, 4) for recipe in RECIPES.values()} == {None}


def test_layers_that_q4_k_m_gives_more_bits() -> None:
    """Counted by hand from 64 layers: the first and last eight, and each third between."""
    kinds = [type_of(RECIPES["q4-k-m"], f"blk.{i}.attn_v.weight", 64) for i in range(64)]
    found = [kinds[i] == "q6_K" for i in (0, 7, 8, 9, 10, 13, 54, 56, 63)]
    assert found == [True, True, False, False, True, True, False, True, True]
    assert kinds.count("q6_K") == 32


@pytest.mark.parametrize(
    ("kind", "row", "found"),
    [
        ("q4_K", 512, "q4_K"),
        ("q4_K", 576, "q5_0"),
        ("q6_K", 576, "q8_0"),
        ("q2_K", 576, "q4_0"),
        ("q2_K", 32, "q4_0"),
        ("q2_K", 48, "f16"),
        ("q4_0", 32, "q4_0"),
        ("q8_0", 40, "f16"),
        ("f32", 7, "f32"),
    ],
)
def test_fallbacks(kind: str, row: int, found: str) -> None:
    assert fitting(kind, row) == found


@given(st.sampled_from(sorted(FILE_TYPES)), st.integers(1, 4096))
def test_what_takes_a_types_place_fits_and_is_never_left_out(kind: str, row: int) -> None:
    found = fitting(kind, row)
    assert row % block_of(found) == 0
    assert (found == kind) == (row % block_of(kind) == 0)
    assert fitting(found, row) == found
