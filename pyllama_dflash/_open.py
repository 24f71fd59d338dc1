"""Open what a Speculator runs on: two models and an engine."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, suppress
from dataclasses import fields
from typing import NamedTuple

from . import _ffi, _ffi_engine, _fit, _log, build
from ._fit import gib
from ._load import device_indices
from ._turn import call_both
from .errors import ClosedError
from .memory import DeviceMemory
from .model import NO_GPU, Model, PathLike
from .model import logger as of_options  # its warnings are shown on the command line, too
from .params import THREE_WAY, LoadParams, Params, check_int, default_threads

_OF_DRAFT = (
    "n_ctx_draft",
    "n_gpu_layers_draft",
    "devices_draft",
    "type_k_draft",
    "type_v_draft",
    "n_min",
    "margin",
    "p_min",
    "fused_draft",
    "draft_vocab",
)
_OF_TARGET_FILE = ("n_gpu_layers", "devices", "split_mode", "main_gpu", "tensor_split")
_OF_DRAFT_FILE = ("n_gpu_layers_draft", "devices_draft")
_OF_FILES = ("use_mmap", "use_mlock")


class Opened(NamedTuple):
    """Models, those of them that were opened here, and the engine."""

    target: Model
    draft: Model | None
    owned: tuple[Model, ...]
    engine: _ffi_engine.EngineHandle

    def close(self) -> None:
        """Free the engine and the models that were opened here. Safe to repeat."""
        self.engine.close()
        for model in self.owned:
            model.close()

    def open_beside(self, params: Params, n_seq: int, n_ctx: int) -> _ffi_engine.EngineHandle:
        """Open another engine on the same models, for n_seq sequences of n_ctx tokens."""
        own = self.engine.info["n_ctx"]
        engine_params = engine_fields(params) | {"n_seq_max": n_seq, "n_ctx": n_ctx, "n_ctx_rope": own}
        try:
            _check_context(self.target, self.draft, params, engine_params, n_seq * n_ctx)
            return _open_engine(self.target, self.draft, engine_params)
        except MemoryError as error:
            raise MemoryError(f"{error}; for {n_seq} sequences of {n_ctx} tokens: lower n_parallel or n_ctx") from None
        finally:
            _log.drain()


def open_pair(target: Model | PathLike, draft: Model | PathLike | None, params: Params) -> Opened:
    """Open the models that are paths, check the options against them, open the engine.

    Raises:
        ModelLoadError, IncompatibleModelsError, ValueError, MemoryError: what was opened so far is closed again.
    """
    _check_used(target, draft, params)
    engine_params = engine_fields(params)
    owned: list[Model] = []
    try:
        _ffi.init()
        if params.cuda_graphs == "on" and not _ffi.supports_gpu():
            _log.emit(logging.WARNING, f"cuda_graphs='on' has no effect: {NO_GPU}", of_options)
        _check_headers(target, draft)
        files = _file(target, load_of_target(params)), _file(draft, load_of_draft(params, None))
        if files[0]:
            _fit.check_files(files[0], files[1], engine_params)
        target_model = _model(target, load_of_target(params), owned)
        draft_model = None if draft is None else _model(draft, load_of_draft(params, target_model), owned)
        if draft_model is not None:
            target_model.check_pair(draft_model)
            _check_block(draft_model, params)
        n_ctx = params.n_ctx or target_model.info.n_ctx_train
        _check_context(target_model, draft_model, params, engine_params, n_ctx)
        engine = _open_engine(target_model, draft_model, engine_params)
        _say_memory(engine)
    except BaseException:
        for model in owned:
            model.close()
        raise
    finally:
        _log.drain()
    return Opened(target_model, draft_model, tuple(owned), engine)


def _check_headers(target: Model | PathLike, draft: Model | PathLike | None) -> None:
    """Refuse a pair that does not belong together before weights are read, which may take minutes."""
    sources = [source for source in (target, draft) if source is not None]
    if len(sources) < 2 or any(isinstance(source, Model) and (source.closed or source.is_header) for source in sources):
        return
    with ExitStack() as stack:
        headers = [
            source if isinstance(source, Model) else stack.enter_context(Model.header(source)) for source in sources
        ]
        headers[0].check_pair(headers[1])


def load_of_target(params: Params) -> LoadParams:
    """Return the options that concern the target's file."""
    names = (*_OF_TARGET_FILE, *_OF_FILES)
    return LoadParams(**{name: getattr(params, name) for name in names})


def load_of_draft(params: Params, target: Model | None) -> LoadParams:
    """Return the options that concern the draft's file, which goes where the target is once that is open."""
    devices = params.devices_draft
    gpus = [device.name for device in build.devices() if device.is_gpu] if target else []
    if devices is None and target and gpus:
        # All in one place, so that one launch drafts, and beside the head that it may share.
        devices = (target.info.device if target.info.device in gpus else gpus[0],)
    return LoadParams(params.n_gpu_layers_draft, devices, use_mmap=params.use_mmap, use_mlock=params.use_mlock)


def _model(source: Model | PathLike, params: LoadParams, owned: list[Model]) -> Model:
    if not isinstance(source, Model):
        options = {field.name: getattr(params, field.name) for field in fields(params)}
        owned.append(Model(source, **options))
        return owned[-1]
    if source.closed:
        raise ClosedError(f"the model {source.name} is closed; open it again")
    if source.is_header:
        raise ValueError(f"the model {source.name} was opened by its header only; use Model(path)")
    return source


def _file(source: Model | PathLike | None, params: LoadParams) -> _fit.File | None:
    if isinstance(source, Model):
        return source._file
    with suppress(TypeError, UnicodeError):  # what is no path is refused where it is opened
        return None if source is None else _fit.File(os.fsencode(source), params)
    return None


def _check_context(
    target: Model, draft: Model | None, params: Params, engine_params: dict[str, int], n_ctx: int
) -> None:
    infos = [model.info for model in (target, draft) if model is not None]
    most = _fit.most_of_context(infos, params, n_ctx)
    _fit.check_context(target._file, draft._file if draft else None, engine_params, most)


def _open_engine(target: Model, draft: Model | None, params: dict[str, int]) -> _ffi_engine.EngineHandle:
    _log.sync_level()
    if draft is None:
        return target._call(lambda handle: _ffi_engine.open(handle, None, params))
    return call_both(target._gate, draft._gate, lambda: _ffi_engine.open(target._handle, draft._handle, params))


def engine_fields(params: Params) -> dict[str, int]:
    """Return the fields of pld_engine_params."""
    types = {
        name: _kv_type(name, getattr(params, name)) for name in ("type_k", "type_v", "type_k_draft", "type_v_draft")
    }
    return {
        "n_ctx": params.n_ctx,
        "n_ubatch": params.n_ubatch,
        "n_threads": params.n_threads or default_threads(),
        "n_max": -1 if params.n_max is None else params.n_max,
        "flash_attn": THREE_WAY[str(params.flash_attn)],
        "cuda_graphs": THREE_WAY[str(params.cuda_graphs)],
        "kv_unified": int(params.kv_unified),
        "backend_argmax": int(params.backend_argmax),
        "fused_draft": int(params.fused_draft),
        "draft_vocab": int(params.draft_vocab),
        "n_seq_max": 1,
        "n_ctx_draft": params.n_ctx_draft,
        "few_shapes": -1,
        "n_ctx_rope": 0,
        **types,
    }


def _say_memory(engine: _ffi_engine.EngineHandle) -> None:
    for row in map(DeviceMemory.of, _ffi_engine.devices(engine)):
        weights, cache = row.target_weights + row.draft_weights, row.target_kv + row.draft_kv
        compute = row.target_compute + row.draft_compute
        sizes = f"weights {gib(weights)}, K/V caches {gib(cache)}, compute buffers {gib(compute)}"
        _log.emit(logging.INFO, f"memory on {row.device}: {sizes}")


def _check_block(draft: Model, params: Params) -> None:
    most = draft.info.block_size - 1
    for name in ("n_max", "n_min"):
        check_int(name, getattr(params, name) or 0, 0, most, f"block_size-1={most} of {draft.name}")


def _kv_type(option: str, name: str) -> int:
    number = -1 if "\0" in name else _ffi.kv_type(name)
    if number < 0:
        raise ValueError(f"{option}={name!r} is not a type of K/V cache; use f16, or q8_0 for half its size")
    return number


def _check_used(target: Model | PathLike, draft: Model | PathLike | None, params: Params) -> None:
    for name in ("devices", "devices_draft"):
        device_indices(name, getattr(params, name))
    defaults = Params()
    if draft is None:
        for name in _OF_DRAFT:
            if getattr(params, name) != getattr(defaults, name):
                raise ValueError(f"{name}={getattr(params, name)!r} has no effect without a draft; leave it out")
    for sources, names in (((target,), _OF_TARGET_FILE), ((draft,), _OF_DRAFT_FILE), ((target, draft), _OF_FILES)):
        if not all(source is None or isinstance(source, Model) for source in sources):
            continue
        for name in names:
            if any(sources) and getattr(params, name) != getattr(defaults, name):
                raise ValueError(f"{name} has no effect on a model that is open already; give it to Model(...)")
