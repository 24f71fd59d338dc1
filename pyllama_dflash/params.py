"""Options: the only list of names, defaults and help texts. The signatures, the command line and the docs read it."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .result import SLOTS

INT_MAX = 2**31 - 1
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
THREE_WAY = {"auto": -1, "off": 0, "on": 1}
SPLIT_MODES = ("none", "layer", "row", "tensor")  # numbered as enum pld_split
_KV_HELP = "one of f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl"


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, **SLOTS)
class Params:
    """Options of a Speculator, fixed while it lives. Each field's help is in its metadata.

    Raises:
        ValueError, TypeError: an option is out of its range; the message names the value, the limit and the fix.
    """

    n_ctx: int = _option(0, "context size in tokens, prompt and reply together; 0: as the target was trained")
    n_ctx_draft: int = _option(0, "last positions that the draft sees and keeps; 0: sees as many as it was trained on")
    n_ubatch: int = _option(512, "prompt tokens evaluated in one step")
    n_gpu_layers: int = _option(-1, "layers of the target on the GPU; -1: all")
    n_gpu_layers_draft: int = _option(-1, "layers of the draft on the GPU; -1: all")
    devices: str | Sequence[str] | None = _option(
        None, "the target's devices by the names that devices() lists, GPUs or CPU alone; unless given, all GPUs"
    )
    devices_draft: str | Sequence[str] | None = _option(
        None, "the draft's devices; unless given, the GPU that has the target's output layer, or the first GPU"
    )
    split_mode: str = _option(
        "layer", "how the target is split over GPUs: none, layer, row or tensor, where the backend can"
    )
    main_gpu: int = _option(0, "which of the GPUs holds the target with split_mode none")
    tensor_split: Sequence[float] | None = _option(
        None, "each GPU's share of the target, as 3,1; unless given, by their free memory"
    )
    use_mmap: bool = _option(True, "map the files into memory where the devices can; False: read them")
    use_mlock: bool = _option(False, "keep weights in host memory from being swapped out; a refusal is only warned of")
    n_threads: int | None = _option(None, "CPU threads; unless given, as many as CPUs this process may run on")
    flash_attn: str | bool = _option("auto", "flash attention: auto, on or off")
    type_k: str = _option("f16", f"type of the target's K cache, {_KV_HELP}")
    type_v: str = _option("f16", f"type of the target's V cache, {_KV_HELP}")
    type_k_draft: str = _option("f16", f"type of the draft's K cache, {_KV_HELP}")
    type_v_draft: str = _option("f16", f"type of the draft's V cache, {_KV_HELP}")
    kv_unified: bool = _option(False, "one K/V buffer for all sequences of run_many(); near ties turn more often")
    cache_ram: int = _option(
        1024, "MiB of host memory for texts that another prompt displaced, least recently used out; 0: none"
    )
    cuda_graphs: str | bool = _option(
        "auto", "replay captured CUDA graphs: on or off; auto: from compute capability 7.0 on"
    )
    n_max: int | None = _option(None, "most tokens drafted in a round; unless given, the draft's block size - 1")
    n_min: int = _option(0, "a draft that is shorter than this is dropped")
    margin: float = _option(0.0, "cut a draft before the first token whose top-1 leads top-2 by less; 0: no cut")
    p_min: float = _option(0.0, "cut a draft before the first token less probable than this, 0 to 1; 0: no cut")
    backend_argmax: bool = _option(True, "pick tokens on the device and read no logits back")
    fused_draft: bool = _option(True, "draft in one launch; False runs llama.cpp's own draft graph, the reference")
    draft_vocab: bool = _option(True, "draft only tokens that the draft's file lists, if it does; False: any token")

    def __post_init__(self) -> None:
        _set_int(self, "n_ctx", 0)
        _set_int(self, "n_ctx_draft", 0)
        _set_int(self, "n_ubatch", 1)
        _set_int(self, "n_gpu_layers", -1)
        _set_int(self, "n_gpu_layers_draft", -1)
        _set_int(self, "cache_ram", 0)
        _set_placement(self)
        _set(self, "devices_draft", _names("devices_draft", self.devices_draft))
        _set_int(self, "n_threads", 1, optional=True)
        for name in ("flash_attn", "cuda_graphs"):
            _set(self, name, _three_way(name, getattr(self, name)))
        for name in ("type_k", "type_v", "type_k_draft", "type_v_draft"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name}={getattr(self, name)!r} is not a string; use {_KV_HELP}")
        _check_draft_options(self)
        for name in ("kv_unified", "backend_argmax", "fused_draft", "draft_vocab"):
            check_bool(name, getattr(self, name))


@dataclass(frozen=True, **SLOTS)
class LoadParams:
    """Options of a Model; those of Params that concern one file, and `repack`.

    Raises:
        ValueError, TypeError: as for Params.
    """

    n_gpu_layers: int = -1
    devices: str | Sequence[str] | None = None
    split_mode: str = "layer"
    main_gpu: int = 0
    tensor_split: Sequence[float] | None = None
    use_mmap: bool = True
    use_mlock: bool = False
    repack: bool = True

    def __post_init__(self) -> None:
        _set_int(self, "n_gpu_layers", -1)
        _set_placement(self)
        check_bool("repack", self.repack)


@dataclass(frozen=True, **SLOTS)
class GenerateParams:
    """Options of one run() or stream(). None stands for the Speculator's own value.

    Raises:
        ValueError, TypeError: as for Params.
    """

    max_tokens: int = _option(256, "most tokens to emit; 0: only evaluate the prompt")
    stop: str | Sequence[str] | None = _option(None, "a string, or several, that end the reply")
    ignore_eos: bool = _option(False, "go on after end-of-generation tokens")
    n_max: int | None = _option(None, "most tokens drafted in a round of this call; 0: plain decoding")
    n_min: int | None = _option(None, "a draft that is shorter than this is dropped")
    margin: float | None = _option(None, "cut a draft before the first token whose top-1 leads top-2 by less")
    p_min: float | None = _option(None, "cut a draft before the first token less probable than this, 0 to 1")
    speculate: bool = _option(True, "False: plain decoding on the same path")

    def __post_init__(self) -> None:
        _set_int(self, "max_tokens", 0)
        _set(self, "stop", _stops(self.stop))
        check_bool("ignore_eos", self.ignore_eos)
        check_bool("speculate", self.speculate)
        _check_draft_options(self, optional=True)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings as a tuple."""
        return _stops(self.stop)


def default_threads(cpu_max: Path = CPU_MAX) -> int:
    """Count the CPUs that this process may run on, no more than its container's quota of CPU time.

    Args:
        cpu_max: the file with the quota of a Linux control group (version 2).
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = map(int, cpu_max.read_text(encoding="ascii").split())  # "max 100000" without a quota
        allowed = min(allowed, math.ceil(quota / period))
    return max(1, allowed)


def check_int(name: str, value: Any, low: int, high: int = INT_MAX, limit: str = "") -> int:
    """Return value as an int; TypeError if it is none (a bool is none), ValueError outside low to high.

    Args:
        name: what the value is called in the message.
        value: the value.
        low: least value allowed.
        high: greatest value allowed.
        limit: what `high` stands for, e.g. "block_size-1=7 of draft.gguf".
    """
    if isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is a bool; use an integer")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} is not an integer") from None
    if number < low:
        raise ValueError(f"{name}={number} is below {low}; raise {name}")
    if number > high:
        raise ValueError(f"{name}={number} exceeds {limit or high}{'' if limit.endswith(' or') else ';'} lower {name}")
    return number


def check_bool(name: str, value: Any) -> bool:
    """Return value; TypeError if it is not a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is not a bool; use True or False")
    return value


def _check_float(name: str, value: Any, high: float) -> float:
    if isinstance(value, (bool, str, bytes)):
        raise TypeError(f"{name}={value!r} is not a number")
    try:
        number = float(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} is not a number") from None
    except OverflowError:  # an int that is larger than any float
        number = math.inf
    if not math.isfinite(number) or not 0.0 <= number <= high:
        limit = "a finite number >= 0" if high == math.inf else f"a number from 0 to {high:g}"
        raise ValueError(f"{name}={number} is out of range; use {limit}")
    return number


def _check_draft_options(params: Any, optional: bool = False) -> None:
    _set_int(params, "n_max", 0, optional=True)
    _set_int(params, "n_min", 0, optional=optional)
    for name, high in (("margin", math.inf), ("p_min", 1.0)):
        value = getattr(params, name)
        if value is not None or not optional:
            _set(params, name, _check_float(name, value, high))
    if params.n_max and params.n_min and params.n_min > params.n_max:
        raise ValueError(f"n_min={params.n_min} exceeds n_max={params.n_max}; lower n_min or raise n_max")


def _set_int(params: Any, name: str, low: int, optional: bool = False) -> None:
    value = getattr(params, name)
    if value is not None or not optional:
        _set(params, name, check_int(name, value, low))


def _set(params: Any, name: str, value: Any) -> None:
    object.__setattr__(params, name, value)  # frozen: only here, while the object is made


def _set_placement(params: Any) -> None:
    _set(params, "devices", _names("devices", params.devices))
    if not isinstance(params.split_mode, str):
        raise TypeError(f"split_mode={params.split_mode!r} is not a string; use {', '.join(SPLIT_MODES)}")
    if params.split_mode not in SPLIT_MODES:
        raise ValueError(f"split_mode={params.split_mode!r} is unknown; use {', '.join(SPLIT_MODES)}")
    _set_int(params, "main_gpu", 0)
    _set(params, "tensor_split", _shares(params.tensor_split))
    check_bool("use_mmap", params.use_mmap)
    check_bool("use_mlock", params.use_mlock)


def _names(option: str, value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, bytes) or not isinstance(value, (str, Iterable)):
        raise TypeError(f"{option}={value!r} is neither a string nor a sequence of strings; use names as 'CUDA0'")
    names = (value,) if isinstance(value, str) else tuple(value)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{option}={value!r}: {name!r} is not a string; use names as 'CUDA0'")
    if not names:
        raise ValueError(f"{option}={value!r} names no device; use 'CPU' for no GPU, or leave it out for all")
    return names


def _shares(value: Any) -> tuple[float, ...] | None:
    if value is None:
        return None
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"tensor_split={value!r} is not a sequence of numbers; use one for each GPU, as (3, 1)")
    shares = tuple(_check_float(f"tensor_split[{i}]", share, math.inf) for i, share in enumerate(value))
    total = sum(shares)
    if not 0.0 < total < math.inf:
        raise ValueError(f"tensor_split={shares!r} adds up to {total}; use one number for each GPU, as (3, 1)")
    return tuple(share / total for share in shares)


def _three_way(option: str, value: str | bool) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if not isinstance(value, str):
        raise TypeError(f"{option}={value!r} is neither a string nor a bool; use auto, on or off")
    if value not in THREE_WAY:
        raise ValueError(f"{option}={value!r} is unknown; use auto, on or off")
    return value


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, bytes) or not isinstance(value, (str, Iterable)):
        raise TypeError(f"stop={value!r} is neither a string nor a sequence of strings")
    stops = (value,) if isinstance(value, str) else tuple(value)
    for stop in stops:
        if not isinstance(stop, str):
            raise TypeError(f"stop={stop!r} is not a string")
        if not stop:
            raise ValueError("stop='' would end every reply at once; leave it out")
        if not stop.isascii() and any("\ud800" <= char <= "\udfff" for char in stop):
            raise ValueError(f"stop={stop!r} has a lone surrogate, which no reply contains; leave it out")
    return stops
