"""What a draft is like, whatever the format of its checkpoint: one description, and typed look-ups in a config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ModelLoadError

MOST_F32 = 3.4e38


@dataclass(frozen=True)
class DraftConfig:
    """A draft of either version.

    Args:
        version: 1 DFlash, 2 DFlash2.
        n_ctx: 0 if the checkpoint does not say.
        n_vocab: tokens of the target; n_vocab_draft: rows of the draft's own head if it has a reduced vocabulary.
        target_layers: ids of the target's layers whose input is read.
        mask_token: None if the checkpoint does not say.
        windowed: the layers with a sliding window of `window` positions.
        causal: whether a block's tokens see only those before them; None if it is left to the reader of the file.
        interleaved: RoPE turns neighbours in q and k, where GGUF has the halves of a head.
        own_tables: whether embeddings and head in the checkpoint are the draft's own.
        scales: keys of the GGUF and their values, for what few drafts have.
        rope: the same, of RoPE. rope_factors: what each frequency is divided by, () for none.
        ignored: tensors of the checkpoint that are not needed.
    """

    version: int
    n_embd: int
    n_layer: int
    n_ff: int
    n_head: int
    n_kv: int
    d_head: int
    n_ctx: int
    n_vocab: int
    n_vocab_draft: int
    rms_eps: float
    block_size: int
    target_layers: tuple[int, ...]
    mask_token: int | None
    activation: str = "silu"
    conv_taps: int = 0
    conv_group: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    window: int = 0
    windowed: tuple[bool, ...] = ()
    causal: bool | None = None
    interleaved: bool = False
    own_tables: bool = True
    scales: Mapping[str, float] = field(default_factory=dict)
    rope: Mapping[str, Any] = field(default_factory=dict)
    rope_factors: tuple[float, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def reduced(self) -> bool:
        """Whether the draft knows a part of the vocabulary only."""
        return self.n_vocab_draft != self.n_vocab


class Lookup:
    """The values of a config.json, those of the first mapping that has a key.

    Args:
        path: named in errors.
        values: the mappings.
    """

    def __init__(self, path: Path, *values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    def get(self, key: str) -> Any:
        """Return a value as it is; None if there is none, or null."""
        return next((values[key] for values in self.values if values.get(key) is not None), None)

    def fail(self, what: str) -> ModelLoadError:
        """Return the error that says what is wrong here."""
        return ModelLoadError(f"{self.path}: {what}")

    def need(self, key: str) -> Any:
        """Return a value that must be there."""
        value = self.get(key)
        if value is None:
            raise self.fail(f"key {key} is missing; use the config.json that came with the checkpoint")
        return value

    def whole(self, key: str, default: int | None = None, low: int = 1, high: int = 2**31 - 1) -> int:
        """Return a whole number in a range, or the default if that is given."""
        value = self.need(key) if default is None else self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value // 1:
            raise self.fail(f"{key}={value!r} is not a whole number; correct it")
        if not low <= value <= high:
            raise self.fail(f"{key}={value!r} is out of range, {low} to {high}; correct it")
        return int(value)

    def number(self, key: str) -> float | None:
        """Return a number, None if there is none."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(float(min(value, 1))):
            raise self.fail(f"{key}={value!r} is not a number; correct it")
        if not -MOST_F32 <= value <= MOST_F32:
            raise self.fail(f"{key} is out of range of a float32; correct it")
        return float(value)

    def flag(self, key: str) -> bool | None:
        """Return true or false, None if there is neither."""
        value = self.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise self.fail(f"{key}={value!r} is neither true nor false; correct it")

    def wholes(self, key: str) -> tuple[int, ...]:
        """Return a list of whole numbers that must be there and not empty."""
        value = self.need(key)
        if isinstance(value, list) and value and all(type(each) is int and each >= 0 for each in value):
            return tuple(value)
        raise self.fail(f"{key}={value!r} is not a list of layer ids; correct it")

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return an object, empty if there is none."""
        value = self.get(key)
        if value is None or isinstance(value, dict):
            return value or {}
        raise self.fail(f"{key}={value!r} is not a JSON object; correct it")
