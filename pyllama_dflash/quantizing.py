"""Quantise a draft, or a target: the same file with its weights in smaller types."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Callable

import numpy as np

from . import _ffi, _ffi_quantize, _log
from ._replace import check_place, replacing, writing
from .errors import ModelLoadError
from .model import Model, PathLike
from .params import check_bool, check_int, default_threads
from .recipes import FILE_TYPES, RECIPES, Recipe, block_of, find_recipe, fitting, type_of
from .result import SLOTS

__all__ = ["QuantizeResult", "QuantizedTensor", "quantize"]

logger = logging.getLogger(__name__)
_STEP = 1 << 20  # weights converted by each thread in one call: a fraction of a second, after which Ctrl-C is seen
_FLOATS = ("f32", "f16", "bf16")
_KEPT_FLOAT = ("_norm.weight", "_conv_base")


@dataclass(frozen=True, **SLOTS)
class QuantizedTensor:
    """A tensor of the file written. Types have ggml's names: "f16", "q4_0", "q4_K", ...

    Args:
        name: its name.
        shape: as numpy has it, the row last.
        source_type: its type in the source.
        wanted: the type that the recipe gives it.
        type: the type that it got: `wanted`, unless its rows do not fit that.
        n_bytes: its size in bytes.
    """

    name: str
    shape: tuple[int, ...]
    source_type: str
    wanted: str
    type: str
    n_bytes: int

    @property
    def n_weights(self) -> int:
        """Number of weights."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def fell_back(self) -> bool:
        """Whether the rows did not fit the recipe's type."""
        return self.type != self.wanted

    @property
    def was_quantized(self) -> bool:
        """Whether it was quantised before, in another type."""
        return self.source_type not in _FLOATS and self.source_type != self.type


@dataclass(frozen=True, **SLOTS)
class QuantizeResult:
    """What quantize() wrote.

    Args:
        path: the file.
        recipe: name of the recipe.
        n_bytes_source: size of the source in bytes.
        n_bytes: size of the file in bytes.
        tensors: all tensors in the order of the file.
    """

    path: str
    recipe: str
    n_bytes_source: int
    n_bytes: int
    tensors: tuple[QuantizedTensor, ...]

    @property
    def fallbacks(self) -> tuple[QuantizedTensor, ...]:
        """The tensors whose rows do not fit the recipe's type."""
        return tuple(tensor for tensor in self.tensors if tensor.fell_back)

    @property
    def requantized(self) -> tuple[QuantizedTensor, ...]:
        """The tensors that were quantised before, in another type: what they lost then stays lost."""
        return tuple(tensor for tensor in self.tensors if tensor.was_quantized)

    @property
    def types(self) -> dict[str, int]:
        """Number of tensors by type."""
        return dict(sorted(Counter(tensor.type for tensor in self.tensors).items()))

    @property
    def bits_per_weight(self) -> float:
        """Bits of a weight on average, without the metadata."""
        return 8 * sum(t.n_bytes for t in self.tensors) / max(1, sum(t.n_weights for t in self.tensors))

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain values."""
        names = {name: [t.name for t in getattr(self, name)] for name in ("fallbacks", "requantized")}
        return {**asdict(self), "types": self.types, "bits_per_weight": self.bits_per_weight, **names}


def quantize(
    source: PathLike,
    out: PathLike,
    recipe: str,
    *,
    n_threads: int | None = None,
    overwrite: bool = False,
    strict: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> QuantizeResult:
    """Write a GGUF with the metadata of another and its weights in the types of a recipe.

    The file is there whole or not at all: it is written beside its place and moved there at the end. Norms and
    convolution bases become F32; what else the recipe does not name stays as it is.

    Args:
        source: a DFlash or DFlash2 draft, or a target; best with F16, BF16 or F32 weights. Quantised ones are taken,
            with a warning in the log.
        out: the file to write.
        recipe: for a draft "q8", "q4-mix", "q4", "q4-k-m", "q2-hybrid" or "q2"; for a target "q8", "q4" or "q4-k-m".
        n_threads: CPU threads; None: as many as CPUs this process may run on. The file does not depend on it.
        overwrite: replace the file if it is there.
        strict: refuse where rows do not fit the recipe's type, rather than give them the next one that they fit.
        progress: called in this thread with the number of weights done and of all, after each step.

    Raises:
        ValueError: there is no such recipe, or it does not go with this file, or source and out are one file.
        ModelLoadError: the source is missing, damaged or of a kind that is not supported.
        OSError: out is there already, or cannot be written.
    """
    rule = find_recipe(recipe)
    n_threads = default_threads() if n_threads is None else check_int("n_threads", n_threads, 1, 1024)
    check_bool("overwrite", overwrite)
    check_bool("strict", strict)
    with Model.header(source) as model:
        place, path = Path(os.fsdecode(out)), Path(model.path)
        check_place(place, overwrite, [path], "the source")
        _check_kind(model, rule)
        rows = model._call(_ffi.model_tensors)
        plan = _plan(model, rule, rows)
        _check_plan(model, rule, plan, strict)
        types = [_ffi_quantize.type_named(tensor.type) for tensor in plan]
        numbers, file_type = [kind.number for kind in types], _file_type(plan)
        header, alignment = model._call(lambda handle: _ffi_quantize.quantize_header(handle, numbers, file_type))
        with path.open("rb") as file, replacing(place, overwrite) as part, writing(part, place) as written:
            written.write(header)
            n_done, n_all = 0, sum(tensor.n_weights for tensor in plan)
            for tensor, row, kind in zip(plan, rows, types):
                for data, n_weights in _convert(_Reader(file, model.path, tensor.name), row, kind, n_threads):
                    written.write(data)
                    n_done += n_weights
                    if progress is not None:
                        progress(n_done, n_all)
                written.write(bytes(-tensor.n_bytes % alignment))
            sizes = os.fstat(file.fileno()).st_size, written.tell()
    return QuantizeResult(str(place), rule.name, *sizes, plan)


def _check_kind(model: Model, rule: Recipe) -> None:
    if model.info.kind == "other":
        kind = model.meta("general.architecture")
        raise ModelLoadError(f"{model.path}: is a draft of a kind that is not run here ('{kind}')")
    if model.meta("split.count") not in (None, "0", "1"):
        raise ModelLoadError(f"{model.path}: is one part of several; merge them first (llama-gguf-split --merge)")
    if not model.info.is_draft and rule.target is None:
        fit = ", ".join(name for name, other in RECIPES.items() if other.target is not None)
        raise ValueError(f"recipe={rule.name!r} is for drafts, {model.name} is an ordinary model; take one of: {fit}")


def _plan(model: Model, rule: Recipe, rows: list[dict[str, Any]]) -> tuple[QuantizedTensor, ...]:
    tied = not model.info.own_head
    plan = []
    for row in rows:
        name, source = row["name"], row["type"]
        if not row["n_params"]:
            raise ModelLoadError(f"{model.path}: tensor {name} has no weights; download or convert the file again")
        shape = tuple(reversed(row["ne"]))
        while len(shape) > 1 and shape[0] == 1:
            shape = shape[1:]
        wanted = type_of(rule, name, model.info.n_layer, is_draft=model.info.is_draft, tied=tied)
        if wanted is None:
            is_small = source in _FLOATS and (len(shape) == 1 or name.endswith(_KEPT_FLOAT))
            wanted = "f32" if is_small else source
        kind = wanted if wanted == source else fitting(wanted, shape[-1])
        n_bytes = _ffi_quantize.type_named(kind).size(int(np.prod(shape, dtype=np.int64)))
        plan.append(QuantizedTensor(name, shape, source, wanted, kind, n_bytes))
    return tuple(plan)


def _check_plan(model: Model, rule: Recipe, plan: tuple[QuantizedTensor, ...], strict: bool) -> None:
    misfits = [tensor for tensor in plan if tensor.fell_back]
    if strict and misfits:
        first = misfits[0]
        need = (
            f"{first.name} has rows of {first.shape[-1]}, {first.wanted} needs a multiple of {block_of(first.wanted)}"
        )
        raise ValueError(
            f"recipe={rule.name!r} does not fit {len(misfits)} of {len(plan)} tensors of {model.name}: {need}; "
            f"take another recipe, or strict=False for {first.type} and the like"
        )
    again = Counter(tensor.source_type for tensor in plan if tensor.was_quantized)
    if again:
        counts = ", ".join(f"{n} {kind}" for kind, n in again.items())
        text = f"{model.name} is quantised already ({counts} are made anew): what it lost stays lost"
        _log.emit(logging.WARNING, f"{text}; better start from F16", logger)


def _file_type(plan: tuple[QuantizedTensor, ...]) -> int:
    """Return general.file_type: that of the type which most weights have."""
    weights: Counter[str] = Counter()
    for tensor in plan:
        weights[tensor.type] += tensor.n_weights
    return next((FILE_TYPES[kind] for kind, _ in weights.most_common() if kind in FILE_TYPES), 0)


class _Reader:
    """Reads a tensor's bytes from an open file."""

    def __init__(self, file: BufferedReader, path: str, tensor: str) -> None:
        self.file, self.name = file, f"{path}: tensor {tensor}"

    def read(self, offset: int, n_bytes: int) -> _ffi_quantize.Bytes:
        data = np.empty(n_bytes, np.uint8)
        try:
            self.file.seek(offset)
            n_read = self.file.readinto(data.data)
        except OSError as error:
            raise ModelLoadError(f"{self.name} cannot be read ({error.strerror})") from error
        if n_read != n_bytes:
            raise ModelLoadError(f"{self.name} ends early: the file changed while it was read")
        return data


def _convert(
    reader: _Reader, row: dict[str, Any], kind: _ffi_quantize.TensorType, n_threads: int
) -> Iterator[tuple[memoryview, int]]:
    """Yield a tensor's bytes in its new type, some rows at a time, and the number of weights in them."""
    source = _ffi_quantize.type_named(row["type"])
    n_per_row = max(1, row["ne"][0])  # a damaged file may have rows of none
    n_rows = row["n_bytes"] // max(1, source.size(n_per_row))
    step = max(1, _STEP * min(n_threads, 16) // n_per_row)
    for first in range(0, n_rows, step):
        n = min(step, n_rows - first)
        data = reader.read(row["offset"] + first * source.size(n_per_row), n * source.size(n_per_row))
        if kind != source:
            try:
                data = _ffi_quantize.quantize_rows(source, kind, n_per_row, data, n_threads)
            except ModelLoadError as error:
                raise ModelLoadError(f"{reader.name} {error}", error.status) from None
        yield data.data, n * n_per_row
