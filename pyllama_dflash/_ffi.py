"""Call the shared library. The only module that imports cffi: one function per C function, and no cdata leaves it.

The cdef is native/pld.h itself, which also documents each call. Every function here allocates, calls, checks, and
returns plain Python or numpy values; a failure becomes an exception in check(). Arrays that come back are copies.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable

import cffi
import numpy as np

from . import errors
from ._abi import check_library
from ._files import PACKAGE, find_library
from ._handle import Handle
from ._returned import Floats as Floats  # as: other modules take these from here
from ._returned import Ints as Ints


def _load() -> tuple[Any, Any]:
    ffi: Any = cffi.FFI()  # Any: the cdef's types exist at run time only
    ffi.cdef((PACKAGE / "native" / "pld.h").read_text(encoding="utf-8"))
    path = find_library()
    # NODELETE: handles may still be freed while the interpreter tears down its modules.
    flags = getattr(ffi, "RTLD_NOW", 0) | getattr(ffi, "RTLD_NODELETE", 0)
    try:
        lib = ffi.dlopen(str(path), flags)
    except OSError as error:
        raise ImportError(f"{path} cannot be loaded: {error}") from error
    check_library(ffi, lib, str(path))
    return ffi, lib


_ffi, _lib = _load()

_ERRORS: dict[int, type[Exception]] = {
    _lib.PLD_E_ARGUMENT: ValueError,
    _lib.PLD_E_LOAD: errors.ModelLoadError,
    _lib.PLD_E_PAIR: errors.IncompatibleModelsError,
    _lib.PLD_E_CONTEXT_FULL: errors.ContextFullError,
    _lib.PLD_E_DECODE: errors.DecodeError,
    _lib.PLD_E_ORDER: errors.OrderError,
    _lib.PLD_E_MEMORY: MemoryError,
}
KINDS = {
    _lib.PLD_KIND_TARGET: "target",
    _lib.PLD_KIND_DFLASH: "dflash",
    _lib.PLD_KIND_DFLASH2: "dflash2",
    _lib.PLD_KIND_OTHER: "other",
}
MAX_DEVICES: int = _lib.PLD_MAX_DEVICES
ASPECTS = {
    "kind": _lib.PLD_ASPECT_KIND,
    "width": _lib.PLD_ASPECT_WIDTH,
    "layers": _lib.PLD_ASPECT_LAYERS,
    "tokenizer": _lib.PLD_ASPECT_TOKENIZER,
    "mask": _lib.PLD_ASPECT_MASK,
}


def check(result: int) -> int:
    """Return a count or PLD_OK as it is; raise the exception that belongs to a negative status."""
    if result >= 0:
        return result
    text = _ffi.string(_lib.pld_last_error())
    message = text.decode("utf-8", "replace") or f"the library failed with status {result}"
    kind = _ERRORS.get(result, errors.DFlashError)
    if issubclass(kind, errors.DFlashError):
        raise kind(message, result)
    raise kind(message)


def _text(call: Callable[[Any, int], int], cap: int = 256) -> bytes:
    while True:  # what is noted by other threads grows in between
        buffer = _ffi.new("char[]", cap)
        n = check(call(buffer, cap))
        if n <= cap:
            return bytes(_ffi.buffer(buffer, n))
        cap = n


def _rows(kind: str, call: Callable[[Any, int], int], cap: int = 64) -> list[dict[str, Any]]:
    out = _ffi.new(f"{kind}[]", cap)  # all devices or graphs; files have more tensors
    n = check(call(out, cap))
    return [_fields(out[i]) for i in range(n)] if n <= cap else _rows(kind, call, n)


def _fields(struct: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, field in _ffi.typeof(struct).fields or ():
        value = getattr(struct, name)
        if field.type.kind == "array":
            value = _ffi.string(value).decode("utf-8", "replace") if field.type.item.cname == "char" else tuple(value)
        values[name] = value
    return values


# library --------------------------------------------------------------------------------------------------------------


def init() -> None:
    """Start the backends; safe to repeat."""
    check(_lib.pld_init())


def build_info(name: str) -> str | None:
    """Return a build fact by name, None for an unknown one."""
    value = _lib.pld_build_info(name.encode())
    if value == _ffi.NULL:
        return None
    text = _ffi.string(value)
    return str(text.decode("utf-8", "replace"))


def supports_gpu() -> bool:
    """Say whether there is a GPU, and a backend for it in the build."""
    return bool(check(_lib.pld_supports_gpu()))


def devices() -> list[dict[str, Any]]:
    """Describe all devices that the backends found."""
    return [device(index) for index in range(check(_lib.pld_n_devices()))]


def device(index: int) -> dict[str, Any]:
    """Describe a device: the fields of pld_device_info."""
    out = _ffi.new("pld_device_info *")
    check(_lib.pld_device(index, out))
    return _fields(out[0])


def cuda_launches() -> int:
    return int(_lib.pld_cuda_launches())


def cuda_trace(on: bool) -> None:
    _lib.pld_cuda_trace(int(on))


def cuda_traced() -> str:
    return _text(_lib.pld_cuda_traced).decode("ascii", "replace")


def log_set_level(level: int) -> None:
    """Keep log lines of this ggml level and above."""
    check(_lib.pld_log_set_level(level))


def log_next(cap: int = 1024) -> tuple[int, bool, str] | None:
    """Take the oldest log line as (ggml level, whether it is ours and not llama.cpp's, text); None if there is none."""
    level, ours, buffer = _ffi.new("int32_t *"), _ffi.new("int32_t *"), _ffi.new("char[]", cap)
    n = _lib.pld_log_next(level, ours, buffer, cap)
    if n > cap:  # the line stays in the ring until a buffer takes all of it
        return log_next(n)
    return None if n < 0 else (level[0], bool(ours[0]), bytes(_ffi.buffer(buffer, n)).decode("utf-8", "replace"))


def log_dropped() -> int:
    """Count the log lines that were lost because the ring was full."""
    return int(_lib.pld_log_dropped())


def kv_type(name: str) -> int:
    """Return the number of a K/V cache type, -1 for an unknown name."""
    return int(_lib.pld_kv_type(name.encode("utf-8", "replace")))


# models ---------------------------------------------------------------------------------------------------------------


class ModelHandle(Handle):
    """A pld_model."""

    __slots__ = ()


def model_open(path: bytes, params: dict[str, Any]) -> ModelHandle:
    """Open a model file; params has the fields of pld_model_params."""
    out = _ffi.new("pld_model **")
    model = ModelHandle(out, _lib.pld_model_free)
    check(_lib.pld_model_open(path, _ffi.new("pld_model_params *", params), out))
    return model


def model_info(model: ModelHandle) -> dict[str, Any]:
    """Return the fields of pld_model_info."""
    out = _ffi.new("pld_model_info *")
    check(_lib.pld_model_get_info(model.pointer, out))
    return _fields(out[0])


def model_meta_keys(model: ModelHandle) -> list[str]:
    """List the metadata keys."""
    pointer = model.pointer
    count = check(_lib.pld_model_n_meta(pointer))
    return [
        _text(partial(_lib.pld_model_meta_key, pointer, i)).decode("utf-8", "surrogateescape") for i in range(count)
    ]


def model_meta(model: ModelHandle, key: str) -> str:
    """Return a metadata value as text; ValueError when the key is absent."""
    pointer, name = model.pointer, key.encode("utf-8", "surrogateescape")
    return _text(partial(_lib.pld_model_meta, pointer, name)).decode("utf-8", "replace")


def model_token(model: ModelHandle, token: int) -> str:
    """Return a token's text as the file stores it."""
    return _text(partial(_lib.pld_model_token, model.pointer, token)).decode("utf-8", "replace")


def model_tensors(model: ModelHandle) -> list[dict[str, Any]]:
    """Return the fields of each pld_tensor_info."""
    return _rows("pld_tensor_info", partial(_lib.pld_model_tensors, model.pointer))


def model_check_pair(target: ModelHandle, draft: ModelHandle) -> None:
    """Raise IncompatibleModelsError unless the draft belongs to the target."""
    check(_lib.pld_model_check_pair(target.pointer, draft.pointer))


def model_mismatch(target: ModelHandle, draft: ModelHandle, aspect: str) -> str:
    """Return a sentence on one of ASPECTS in which the two do not agree, empty if they do."""
    call = partial(_lib.pld_model_mismatch, target.pointer, draft.pointer, ASPECTS[aspect])
    return _text(call).decode("utf-8", "replace")


def model_tokenize(model: ModelHandle, text: bytes, add_special: bool, parse_special: bool) -> list[int]:
    """Turn UTF-8 text into token ids."""
    pointer, cap = model.pointer, len(text) + 8
    while True:
        tokens = _ffi.new("int32_t[]", cap)
        n = check(_lib.pld_model_tokenize(pointer, text, len(text), add_special, parse_special, tokens, cap))
        if n <= cap:
            ids: list[int] = _ffi.unpack(tokens, n)
            return ids
        cap = n


def model_piece(model: ModelHandle, token: int, special: bool) -> bytes:
    """Return the bytes of a token."""
    return _text(partial(_lib.pld_model_piece, model.pointer, token, special), 64)


def model_is_eog(model: ModelHandle, token: int) -> bool:
    """Say whether a token ends generation."""
    return bool(check(_lib.pld_model_is_eog(model.pointer, token)))


def model_layer_input(model: ModelHandle, tokens: Ints, layer: int, n_embd: int) -> Floats:
    """Return the input [n, n_embd] of a layer when the tokens are run."""
    out = np.empty((len(tokens), n_embd), dtype=np.float32)
    ids, rows = _ffi.from_buffer("int32_t[]", tokens), _ffi.from_buffer("float[]", out, require_writable=True)
    check(_lib.pld_model_layer_input(model.pointer, ids, len(tokens), layer, rows))
    return out
