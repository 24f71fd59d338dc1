"""mask_embedding.pt: the row of a mask token that the target was not trained with.

It is a zip file with a pickle and the bytes of the tensor. The pickle may name nothing but what rebuilds a tensor, so
that reading it runs no code of the file's; torch is not needed.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelLoadError
from ._checkpoint import MASK, Array, check_finite

_STORAGES = {"FloatStorage": "<f4", "HalfStorage": "<f2", "BFloat16Storage": "<u2", "DoubleStorage": "<f8"}


class _Unpickler(pickle.Unpickler):
    def __init__(self, archive: zipfile.ZipFile, pickled: str) -> None:
        super().__init__(io.BytesIO(archive.read(pickled)))
        self._archive = archive
        self._folder = pickled.rpartition("/")[0]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> Array:
        _, dtype, key, *_ = pid
        raw = np.frombuffer(self._archive.read(f"{self._folder}/data/{key}"), dtype)
        if dtype == "<u2":  # bfloat16: the upper half of a float32
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32)


def _tensor(storage: Array, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Array:
    if offset < 0 or min(stride, default=0) < 0 or math.prod(shape) > storage.size:
        raise ValueError(f"a tensor of shape {list(shape)} does not lie in {storage.size} values")
    places = offset + sum(at * step for at, step in zip(np.indices(shape), stride))
    found: Array = storage[places]
    return found


def read_mask(folder: Path, mask_token: int, n_embd: int) -> Array | None:
    """Return the mask token's embedding, [n_embd] in float32; None if the checkpoint has none of its own.

    Raises:
        ModelLoadError: the file is damaged, or for another token or width.
    """
    path = folder / MASK
    if not path.is_file():
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            pickled = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            found = _Unpickler(archive, pickled).load()
        token, row = found["mask_token_id"], found["embedding"]
        token, shape = int(token), tuple(row.shape)
    except Exception as error:  # a pickle that is not what it should be can raise anything
        raise ModelLoadError(
            f"{path}: not readable as a tensor that torch saved ({error}); download it again"
        ) from None
    if token != mask_token:
        raise ModelLoadError(
            f"{path}: is for token {token}, and mask_token_id={mask_token}; download the checkpoint again"
        )
    if shape != (n_embd,):
        raise ModelLoadError(
            f"{path}: the embedding has shape {list(shape)}, not [{n_embd}]; download the checkpoint again"
        )
    check_finite(path, "embedding", row)
    return np.asarray(row)
