"""What quantising makes of each tensor. Pure: names and row sizes in, names of types out.

A recipe gives each part of a model a type. Where rows do not fit the type, the next one that stores no fewer bits takes
its place, as in llama.cpp: K-quants need rows of a multiple of 256 weights, the other types of 32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .result import SLOTS

__all__ = ["RECIPES", "Recipe", "block_of", "find_recipe", "fitting", "part_of", "type_of"]

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_BACKBONE = re.compile(r"(attn_(q|k|v|qkv|output)|ffn_(gate|up|down)(_exps|_shexp)?)\.weight")
_MORE = ("attn_v.weight", "ffn_down.weight")
_PARTS = {
    "fc.weight": "fc",
    "selector_predecessor.weight": "codebooks",
    "selector_successor.weight": "codebooks",
    "selector_hidden.weight": "small",
    "attn_conv_proj.weight": "small",
    "ffn_conv_proj.weight": "small",
    "token_embd.weight": "embeddings",
    "output.weight": "head",
}
_FALLBACKS = {"q2_K": "q4_0", "q3_K": "q4_0", "q4_K": "q5_0", "q5_K": "q5_1", "q6_K": "q8_0"}
# general.file_type of a file that holds mostly this type.
FILE_TYPES = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q8_0": 7,
    "q5_0": 8,
    "q5_1": 9,
    "q2_K": 10,
    "q3_K": 12,
    "q4_K": 15,
    "q5_K": 17,
    "q6_K": 18,
    "iq4_nl": 25,
    "bf16": 32,
}


@dataclass(frozen=True, **SLOTS)
class Recipe:
    """Types by the parts of a model.

    Args:
        name: as `--recipe` takes it.
        help: what it does, in a line.
        draft: the type of each part of a draft: backbone, fc, codebooks, small, embeddings, head.
        target: the same of an ordinary model: backbone, embeddings, head; None: the recipe is for drafts only.
        more: type of attn_v and ffn_down in the layers that need more bits than the rest; "": none.
    """

    name: str
    help: str
    draft: Mapping[str, str]
    target: Mapping[str, str] | None = None
    more: str = ""


def _parts(backbone: str, fc: str, codebooks: str, tables: str, head: str = "") -> dict[str, str]:
    parts = {"backbone": backbone, "fc": fc, "codebooks": codebooks, "embeddings": tables, "head": head or tables}
    return {**parts, "small": "q8_0"}  # a few percent of the weights, and acceptance is lost there first


_ALL = (
    Recipe("q8", "all q8_0", _parts("q8_0", "q8_0", "q8_0", "q8_0"), _parts("q8_0", "", "", "q8_0")),
    Recipe("q4-mix", "backbone q4_0, all else q8_0", _parts("q4_0", "q8_0", "q8_0", "q8_0")),
    Recipe(
        "q4",
        "all q4_0, for drafts trained with 4-bit weights; of a target all but the head",
        _parts("q4_0", "q4_0", "q4_0", "q4_0"),
        _parts("q4_0", "", "", "q4_0", "q6_K"),
    ),
    Recipe(
        "q4-k-m",
        "llama.cpp's Q4_K_M: q4_K, of some layers attn_v and ffn_down q6_K; fc and head q6_K, selector q8_0",
        _parts("q4_K", "q6_K", "q8_0", "q4_K", "q6_K"),
        _parts("q4_K", "", "", "q4_K", "q6_K"),
        more="q6_K",
    ),
    Recipe("q2-hybrid", "backbone and fc q2_K, all else q8_0", _parts("q2_K", "q2_K", "q8_0", "q8_0")),
    Recipe("q2", "all q2_K", _parts("q2_K", "q2_K", "q2_K", "q2_K")),
)
RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _ALL}


def find_recipe(name: str) -> Recipe:
    """Return the recipe of that name.

    Raises:
        ValueError: there is none; the message names those that there are.
    """
    if name not in RECIPES:
        raise ValueError(f"recipe={name!r} is unknown; there are: {', '.join(RECIPES)}")
    return RECIPES[name]


def part_of(name: str) -> str | None:
    """Return the part that a tensor belongs to; None for one that no recipe names, as norms and convolution bases."""
    layer = _LAYER.fullmatch(name)
    bare = layer[2] if layer else name
    if layer and _BACKBONE.fullmatch(bare):
        return "backbone"
    part = _PARTS.get(bare)
    return part if bool(layer) == bare.endswith("_conv_proj.weight") else None


def type_of(recipe: Recipe, name: str, n_layer: int, *, is_draft: bool = True, tied: bool = False) -> str | None:
    """Return the type that a recipe wants for a tensor, None where it says nothing.

    Args:
        recipe: the recipe.
        name: the tensor's name.
        n_layer: number of layers of the model.
        is_draft: whether it is a draft.
        tied: whether the embeddings are the head, too.
    """
    part = part_of(name)
    parts = recipe.draft if is_draft else recipe.target or {}
    if part == "embeddings" and tied and not is_draft:
        part = "head"
    if part is None or not parts.get(part):
        return None
    layer = _LAYER.fullmatch(name)
    if recipe.more and layer and layer[2] in _MORE and _needs_more(int(layer[1]), n_layer):
        return recipe.more
    return parts[part]


def _needs_more(layer: int, n_layer: int) -> bool:
    """Whether Q4_K_M of llama.cpp gives this layer more: the first and last eighths, and each third between them."""
    eighth = n_layer // 8
    return layer < eighth or layer >= 7 * n_layer // 8 or (layer - eighth) % 3 == 2


def block_of(kind: str) -> int:
    """Return of how many weights a row must be a multiple."""
    if kind in ("f32", "f16", "bf16"):
        return 1
    return 256 if kind.endswith("_K") else 32


def fitting(kind: str, row: int) -> str:
    """Return the type itself if rows of that many weights fit it, else what takes its place."""
    if row % block_of(kind) == 0:
        return kind
    other = _FALLBACKS.get(kind, "f16")
    return other if row % block_of(other) == 0 else "f16"
