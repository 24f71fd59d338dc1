"""Say what a GGUF file is, whether two belong together, and what they would take, without loading weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from . import _ffi, _fit
from ._describe import describe
from ._open import engine_fields, load_of_draft, load_of_target
from ._turn import call_both
from .errors import DFlashError
from .memory import MemoryPlan
from .model import Model, ModelInfo, PathLike
from .params import Params
from .result import SLOTS
from .tensors import TensorGroup, grouped

_P = Params()
# Those that change what is kept in memory, or where.
_NOT_PLANNED = ("n_threads", "cache_ram", "n_min", "margin", "p_min")
OPTIONS = tuple(name for name in _P.__dataclass_fields__ if name not in _NOT_PLANNED)
_OF_CACHE = ("type_k_draft", "type_v_draft")
_OF_DRAFT = (*_OF_CACHE, "n_ctx_draft", "n_gpu_layers_draft", "devices_draft", "fused_draft", "draft_vocab")
_OF_DRAFT_ALONE = (*_OF_CACHE, "n_gpu_layers_draft", "devices_draft", "use_mmap", "use_mlock", "n_ctx")


@dataclass(frozen=True, **SLOTS)
class Inspection:
    """What a file is, whether it pairs with the one named beside it, and what opening would take.

    str() is the table that `pyllama-dflash info` prints.

    Args:
        path: the file.
        kind: "target" (an ordinary model), "dflash", "dflash2", "dspark", or "other" for a draft of another kind; only
            the first three are run here.
        architecture: the file's general.architecture.
        name: its general.name, or None.
        info: block, layers, tapped layers, selector, vocabulary, mask token and sizes.
        mask_text: the mask token's text as the file stores it, or None.
        tensors: its tensors by group and type.
        shares: what the draft takes from its target or has in common with it, of "embeddings", "head" and
            "tokenizer", the last only if a target was given; empty where no draft was.
        problem: why the file is not run here, whatever it is paired with, in a sentence with the fix; None if it is.
        target: path of the target that was given, or None.
        draft: path of the draft that was given, or None.
        pairs: whether the two belong together; None if nothing was given to compare with.
        mismatches: why they do not: a sentence with the fix each.
        memory: what opening would take; None where that is not known: of a pair that does not belong together, and of
            a file that is not run here.
    """

    path: str
    kind: str
    architecture: str
    name: str | None
    info: ModelInfo
    mask_text: str | None
    tensors: tuple[TensorGroup, ...]
    shares: tuple[str, ...]
    problem: str | None
    target: str | None
    draft: str | None
    pairs: bool | None
    mismatches: tuple[str, ...]
    memory: MemoryPlan | None

    def __str__(self) -> str:
        return describe(self)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it in types that JSON has; what is said of a pair only if there is one."""
        facts = {"file": self.path, "architecture": self.architecture, "name": self.name, **asdict(self.info)}
        facts.update(kind=self.kind, mask_text=self.mask_text, shares=self.shares, problem=self.problem)
        facts["tensors"] = [asdict(group) for group in self.tensors]
        if self.pairs is not None:
            role, other = ("draft", self.draft) if self.target is None else ("target", self.target)
            facts.update({role: other, "pairs": self.pairs, "mismatches": self.mismatches})
        return {**facts, "memory": None if self.memory is None else self.memory.to_dict()}


def inspect(  # noqa: D417 - Params describes the options
    path: PathLike,
    target: PathLike | None = None,
    *,
    draft: PathLike | None = None,
    n_ctx: int = _P.n_ctx,
    n_ctx_draft: int = _P.n_ctx_draft,
    n_ubatch: int = _P.n_ubatch,
    n_gpu_layers: int = _P.n_gpu_layers,
    n_gpu_layers_draft: int = _P.n_gpu_layers_draft,
    devices: str | Sequence[str] | None = _P.devices,
    devices_draft: str | Sequence[str] | None = _P.devices_draft,
    split_mode: str = _P.split_mode,
    main_gpu: int = _P.main_gpu,
    tensor_split: Sequence[float] | None = _P.tensor_split,
    use_mmap: bool = _P.use_mmap,
    use_mlock: bool = _P.use_mlock,
    flash_attn: str | bool = _P.flash_attn,
    type_k: str = _P.type_k,
    type_v: str = _P.type_v,
    type_k_draft: str = _P.type_k_draft,
    type_v_draft: str = _P.type_v_draft,
    kv_unified: bool = _P.kv_unified,
    cuda_graphs: str | bool = _P.cuda_graphs,
    n_max: int | None = _P.n_max,
    backend_argmax: bool = _P.backend_argmax,
    fused_draft: bool = _P.fused_draft,
    draft_vocab: bool = _P.draft_vocab,
) -> Inspection:
    """Describe a GGUF file from its header and, if another is given, say whether the two belong together.

    Args:
        path: the file: a draft or a target.
        target: the target that it should be a draft for.
        draft: instead, the draft that should be for it.
        n_ctx, n_ubatch, ...: what the memory is estimated for, keyword only; see Params. Of a draft alone that is its
            weights and, if n_ctx is given, its K/V cache.

    Raises:
        ModelLoadError: a file is missing or damaged. One that is whole and not run here, or no partner of the other,
            is described: see `problem` and `mismatches`.
        ValueError, TypeError: an option is out of range, or would have no effect.
    """
    given = locals()
    params = Params(**{name: given[name] for name in OPTIONS})
    if target is not None and draft is not None:
        raise ValueError("give the target of a draft, or the draft of a target, not both")
    with ExitStack() as stack:
        model = stack.enter_context(Model.header(path))
        if draft is not None:
            pair = model, stack.enter_context(Model.header(draft))
        elif target is not None:
            pair = stack.enter_context(Model.header(target)), model
        else:
            return _inspection(model, None, None, params)
        return _inspection(model, *pair, params)


def _inspection(model: Model, target: Model | None, draft: Model | None, params: Params) -> Inspection:
    mismatches: tuple[str, ...] = ()
    paired = target is not None and draft is not None
    if target is not None and draft is not None:
        mismatches = target.mismatches(draft)
    elif model.info.is_draft:
        draft = model
    else:
        target = model
    _check_used(target, draft, params)
    problem = memory = None
    if not mismatches:
        try:
            memory = _plan(target, draft, params)
        except DFlashError as error:  # what shows only when the tensors are put together
            problem = str(error)
    if paired and problem is not None:
        mismatches, problem = (problem,), None
    mask = model.info.mask_token
    return Inspection(
        path=model.path,
        kind=_kind(model),
        architecture=model.meta("general.architecture") or "",
        name=model.meta("general.name"),
        info=model.info,
        mask_text=None if mask is None else model._call(lambda handle: _ffi.model_token(handle, mask)),
        tensors=grouped(model._call(_ffi.model_tensors)),
        shares=_shares(target, draft),
        problem=problem,
        target=target.path if paired and target and draft is model else None,
        draft=draft.path if paired and draft and target is model else None,
        pairs=not mismatches if paired else None,
        mismatches=mismatches,
        memory=memory,
    )


def _kind(model: Model) -> str:
    # Of the drafts that are not run here, DSpark has DFlash's architecture and the others their own.
    is_dspark = model.info.kind == "other" and model.meta("general.architecture") == "dflash"
    return "dspark" if is_dspark else model.info.kind


def _shares(target: Model | None, draft: Model | None) -> tuple[str, ...]:
    if draft is None or not draft.info.is_draft:
        return ()
    has = {"embeddings": not draft.info.own_embd, "head": not draft.info.own_head}
    if target is not None:
        handles = target._handle, draft._handle
        has["tokenizer"] = not call_both(
            target._gate, draft._gate, lambda: _ffi.model_mismatch(*handles, aspect="tokenizer")
        )
    return tuple(name for name, shared in has.items() if shared)


def _check_used(target: Model | None, draft: Model | None, params: Params) -> None:
    for name in OPTIONS:
        if getattr(params, name) == getattr(_P, name):
            continue
        if target is None and name not in _OF_DRAFT_ALONE:
            raise ValueError(f"{name}={getattr(params, name)!r} has no effect on a draft alone; add its target")
        if target is None and name in _OF_CACHE and not params.n_ctx:
            raise ValueError(f"{name}={getattr(params, name)!r} has no effect without n_ctx; give n_ctx, too")
        if draft is None and name in _OF_DRAFT:
            raise ValueError(f"{name}={getattr(params, name)!r} has no effect without a draft; add the draft")


def _plan(target: Model | None, draft: Model | None, params: Params) -> MemoryPlan:
    file = _fit.File(os.fsencode(target.path), load_of_target(params)) if target else None
    other = _fit.File(os.fsencode(draft.path), load_of_draft(params, None)) if draft else None
    fields = engine_fields(params)
    plan = _fit.make_plan(file, other, fields)
    return MemoryPlan(
        n_ctx=plan.n_ctx or None,
        devices=tuple(plan.devices),
        free=tuple(row.available for row in plan.free),
        in_all=tuple(row.total for row in plan.free),
        shortage=_fit.lack(plan, file, other, fields),
    )
