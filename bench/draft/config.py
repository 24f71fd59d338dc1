"""The settings of a run, from one TOML file."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import tomllib

T = TypeVar("T")


@dataclass(frozen=True)
class DraftShape:
    """Sizes of the draft; what is not here is the target's: width, heads, base of the rotary positions.

    `vocabulary` tokens are drafted, those that the target wrote most often; 0: all.
    """

    layers: int
    ff: int
    block: int
    taps: list[int]
    rank: int
    top_k: int
    conv_kernel: int
    conv_group: int
    mask_token: int
    context_length: int
    vocabulary: int


@dataclass(frozen=True)
class Text:
    """What is written to learn from."""

    rows: int
    length: int
    seconds: float
    sampled_starts: float
    sampled_rows: float
    sampled_tokens: float
    top: int
    user_tokens: int
    kinds: dict[str, float]


@dataclass(frozen=True)
class Train:
    """How it is learned from."""

    seconds: float
    rows: int
    anchors: int
    blocks: list[int]
    peak_lr: float
    weight_decay: float
    flat: float
    warmup: int
    ce: float
    decay: float
    floor: float
    repeated: float
    quantise_from: float
    quantised: str
    checkpoint_every: float


@dataclass(frozen=True)
class Settings:
    """One run. `variants` are the target's: "" as it is, "q4_0" with its matrices quantised again."""

    name: str
    license: str
    seed: int
    target: Path
    variants: list[str]
    draft: DraftShape
    text: Text
    train: Train


def read(path: Path, changes: list[str]) -> Settings:
    """Read a file, and lay single changes over it, such as draft.block=16.

    Raises:
        ValueError: a key is missing or unknown, or a change names none; the message says which.
    """
    tree = tomllib.loads(path.read_text(encoding="utf-8"))
    for change in changes:
        _change(tree, change)
    _check("settings", tree, {field.name for field in fields(Settings)} - {"variants"})
    target = tree["target"]
    _check("[target]", target, {"path", "variants"})
    made = Settings(
        name=tree["name"],
        license=tree["license"],
        seed=tree["seed"],
        target=Path(target["path"]),
        variants=target["variants"],
        draft=_part(DraftShape, "draft", tree),
        text=_part(Text, "text", tree),
        train=_part(Train, "train", tree),
    )
    longest = made.draft.block
    if not all(2 <= length <= longest for length in made.train.blocks):
        raise ValueError(f"train.blocks={made.train.blocks} is out of range, 2 to draft.block={longest}")
    return made


def _change(tree: dict[str, Any], change: str) -> None:
    name, _, value = change.partition("=")
    *parents, last = name.split(".")
    place: Any = tree
    for parent in parents:
        place = place.get(parent) if isinstance(place, dict) else None
    if not isinstance(place, dict) or last not in place:
        raise ValueError(f"there is no setting {name}")
    try:
        place[last] = tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        raise ValueError(f"{name}={value} is no TOML value; text is in double quotes") from None


def _part(kind: type[T], name: str, tree: dict[str, Any]) -> T:
    _check(f"[{name}]", tree[name], {field.name for field in fields(kind)})  # type: ignore[arg-type]
    return kind(**tree[name])


def _check(where: str, have: dict[str, Any], want: set[str]) -> None:
    wrong = sorted(set(have) ^ want)
    if wrong:
        raise ValueError(f"{where}: {', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} missing or unknown")
