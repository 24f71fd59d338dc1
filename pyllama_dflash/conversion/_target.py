"""What a draft takes over from its target's GGUF: the tokenizer, and with a mask row of its own the tables."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np

from ..errors import IncompatibleModelsError, ModelLoadError
from ..model import Model, ModelInfo
from ._checkpoint import Array
from ._config import DraftConfig

MASK_KEY = "tokenizer.ggml.mask_token_id"
_CHUNK = 1 << 24  # values that are dequantised at a time


@dataclass(frozen=True)
class Table:
    """A matrix of the target as its file has it. shape: as numpy has it."""

    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    data: Array

    def quantised(self, kind: gguf.GGMLQuantizationType, row: int, values: Array) -> Array:
        """Return the matrix in another type with one row replaced; `values`: [n_embd]."""
        step = max(1, _CHUNK // self.shape[1])
        parts = []
        for start in range(0, self.shape[0], step):
            part = np.array(gguf.dequantize(self.data[start : start + step], self.kind), np.float32)
            if start <= row < start + step:
                part[row - start] = values
            parts.append(gguf.quantize(part, kind))
        return np.concatenate(parts)


class TargetFile:
    """A target by its header.

    Args:
        path: its GGUF file.

    Raises:
        ModelLoadError: it is no model.
        IncompatibleModelsError: it is a draft.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with Model.header(path) as model:
            self.path, self.name, self.info = model.path, model.name, model.info
            self.arch = model.meta("general.architecture") or ""
        if self.info.is_draft:
            raise IncompatibleModelsError(
                f"{self.name} is a draft; give the model that the draft was trained for as target"
            )
        self._reader = gguf.GGUFReader(self.path)
        mask = self._reader.fields.get(MASK_KEY)
        self.mask_token: int | None = None if mask is None else mask.contents()
        if not isinstance(self.mask_token, (int, type(None))):
            raise ModelLoadError(f"{self.path}: {MASK_KEY} is no token's number; download or convert the target again")
        # The rotation of a target that sees pictures, too, goes by sections; a draft's by the place in the text alone.
        self.has_sections = f"{self.arch}.rope.dimension_sections" in self._reader.fields

    def tokenizer(self) -> list[tuple[str, Any, list[Any]]]:
        """Return keys, values and types of the tokenizer, without the mask token's id."""
        return [
            (key, found.contents(), found.types)
            for key, found in self._reader.fields.items()
            if key.startswith("tokenizer.") and key != MASK_KEY
        ]

    def table(self, name: str) -> Table | None:
        """Return a matrix, None if the file does not have it."""
        for tensor in self._reader.tensors:
            if tensor.name == name:
                return Table(tensor.tensor_type, tuple(int(n) for n in reversed(tensor.shape)), tensor.data)
        return None

    def check(self, config: DraftConfig, folder: str) -> int:
        """Check that a draft was trained for this target.

        Returns:
            The mask token's id.

        Raises:
            IncompatibleModelsError: it was not; the message says why.
            ModelLoadError: neither file says which token the mask is.
        """
        info: ModelInfo = self.info
        if config.n_embd != info.n_embd:
            raise IncompatibleModelsError(
                f"{folder} is {config.n_embd} wide (hidden_size) and {self.name} is {info.n_embd}; "
                "use the target that the draft was trained for"
            )
        if max(config.target_layers) > info.n_layer:
            raise IncompatibleModelsError(
                f"{folder} reads the output of layer {max(config.target_layers) - 1} and {self.name} has layers 0 to "
                f"{info.n_layer - 1}; use the target that the draft was trained for"
            )
        if config.n_vocab != info.n_vocab:
            raise IncompatibleModelsError(
                f"{folder} has {config.n_vocab} tokens (vocab_size) and {self.name} has {info.n_vocab}; "
                "use the target that the draft was trained for"
            )
        mask = self.mask_token if config.mask_token is None else config.mask_token
        if mask is None:
            raise ModelLoadError(
                f"{folder}: mask_token_id is missing in config.json and in {self.name}; add it to config.json"
            )
        if mask >= info.n_vocab:
            raise ModelLoadError(
                f"{folder}: mask_token_id={mask} is no token, there are {info.n_vocab}; correct config.json"
            )
        return mask
