"""Read a checkpoint: JSON files, and tensors in safetensors, one at a time.

The safetensors package is not used: its numpy side does not know bfloat16, and it has no way to a tensor's raw bytes.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ModelLoadError

Array = npt.NDArray[Any]

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
MASK = "mask_embedding.pt"
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "BOOL": "|b1"}
_MOST_HEADER = 100 << 20  # what the format allows
_AGAIN = "truncated or damaged; download it again"


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies. dtype: safetensors' name; shape: as numpy has it, the row last; offset: in the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


class Checkpoint:
    """The tensors of a folder by their names, in alphabetical order.

    Args:
        folder: has model.safetensors, or parts and an index.

    Raises:
        ModelLoadError: a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        parts, expected = _parts(folder)
        tensors: dict[str, Stored] = {}
        for part in parts:
            for name, stored in _header(part).items():
                if name in tensors:
                    raise ModelLoadError(
                        f"{part}: tensor {name} is in {tensors[name].path.name}, too; remove one of the two"
                    )
                tensors[name] = stored
        for name, part_name in sorted(expected.items()):
            if name not in tensors or tensors[name].path.name != part_name:
                raise ModelLoadError(f"{folder / part_name}: tensor {name} of {INDEX} is missing; download both again")
        self.tensors = dict(sorted(tensors.items()))
        self.files = [folder / CONFIG, folder / INDEX, folder / MASK, *parts]  # the second and third may not be there

    def read(self, name: str) -> Array:
        """Return a tensor: F16 as float16, other floats as float32, whole numbers as they are.

        Raises:
            ModelLoadError: the file has shrunk since it was opened, or a weight is no finite number.
        """
        stored, count = self.tensors[name], math.prod(self.tensors[name].shape)
        raw = np.fromfile(stored.path, _DTYPES[stored.dtype], count, offset=stored.offset)
        if raw.size != count:
            raise ModelLoadError(f"{stored.path}: tensor {name} is cut off: {_AGAIN}")
        if stored.dtype == "BF16":  # the upper half of a float32
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        elif stored.dtype == "F64":
            with np.errstate(over="ignore"):  # what float32 cannot hold is found below
                raw = raw.astype(np.float32)
        check_finite(stored.path, name, raw)
        return raw.reshape(stored.shape)


def check_finite(path: Path, name: str, weights: Array) -> None:
    """Raise ModelLoadError if a weight is NaN or infinite: it would spoil every draft without a word."""
    if weights.dtype.kind == "f" and not np.isfinite(weights).all():
        raise ModelLoadError(f"{path}: tensor {name} has a weight that is not finite; download or train it again")


def _check_regular(path: Path) -> None:
    """Raise ModelLoadError for a pipe, a device or a folder; what is not there is for the reader to report."""
    if path.exists() and not path.is_file():
        raise ModelLoadError(f"{path}: is no regular file; give the folder of a checkpoint")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ModelLoadError: there is no such file, or it is not that.
    """
    _check_regular(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ModelLoadError(
            f"{path}: no such file; give the folder of a checkpoint in Hugging Face's layout"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not readable as JSON ({error}); download it again") from None
    if not isinstance(found, dict):
        raise ModelLoadError(f"{path}: not a JSON object; download it again")
    return found


def _parts(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the files with tensors and, where there is an index, the file that each tensor should be in."""
    index = folder / INDEX
    if not index.exists():
        parts = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
        if not parts:
            raise ModelLoadError(f"{folder}: has no model.safetensors; convert from the checkpoint in that format")
        return parts, {}
    expected = read_json(index).get("weight_map")
    if not isinstance(expected, dict) or not all(isinstance(part, str) for part in expected.values()):
        raise ModelLoadError(f"{index}: weight_map is missing or names no files; download it again")
    parts = [folder / part for part in sorted(set(expected.values()))]
    for part in parts:
        if part.parent != folder:
            raise ModelLoadError(f"{index}: {part} is outside the checkpoint's folder; download the index again")
        if not part.is_file():
            raise ModelLoadError(f"{part}: no such file, and {INDEX} names it; download it")
    return parts, expected


def _header(path: Path) -> dict[str, Stored]:
    _check_regular(path)
    with path.open("rb") as file:
        size = path.stat().st_size
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, _MOST_HEADER):
            raise ModelLoadError(f"{path}: not a safetensors file, or {_AGAIN}")
        try:
            entries = json.loads(file.read(length).decode("utf-8"))
            entries.pop("__metadata__", None)
            return {name: _stored(path, name, entry, 8 + length, size) for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            raise ModelLoadError(f"{path}: the header of safetensors is not readable: {_AGAIN}") from None


def _stored(path: Path, name: str, entry: dict[str, Any], data: int, size: int) -> Stored:
    dtype, shape, (begin, end) = entry["dtype"], tuple(map(int, entry["shape"])), map(int, entry["data_offsets"])
    if dtype not in _DTYPES:
        raise ModelLoadError(f"{path}: tensor {name} has type {dtype}: convert from a checkpoint in bf16, f16 or f32")
    if min(shape, default=1) < 0 or begin < 0 or end - begin != math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize:
        raise ModelLoadError(f"{path}: tensor {name} of shape {list(shape)} has {end - begin} bytes: {_AGAIN}")
    if data + end > size:
        raise ModelLoadError(f"{path}: tensor {name} ends at byte {data + end} and the file has {size}: {_AGAIN}")
    return Stored(path, dtype, shape, data + begin)
