"""Turn the options of a Model into the numbers that the library takes."""

from __future__ import annotations

from typing import Any

from . import _ffi
from .params import SPLIT_MODES, LoadParams


def load_fields(params: LoadParams, header_only: bool = False) -> dict[str, Any]:
    """Return the fields of pld_model_params.

    Raises:
        ValueError: a device is named that is not there.
    """
    devices = device_indices("devices", params.devices or ())
    shares = params.tensor_split or ()
    _check_room("devices", devices)
    _check_room("tensor_split", shares)
    return {
        "n_gpu_layers": params.n_gpu_layers,
        "repack": int(params.repack),
        "header_only": int(header_only),
        "use_mmap": int(params.use_mmap),
        "use_mlock": int(params.use_mlock),
        "split_mode": SPLIT_MODES.index(params.split_mode),
        "main_gpu": params.main_gpu,
        "n_devices": len(devices),
        "devices": devices,
        "n_split": len(shares),
        "tensor_split": shares,
    }


def device_indices(option: str, names: Any) -> list[int]:
    """Return the places of devices in the list of all, by their names."""
    if not names:
        return []
    known = [device["name"] for device in _ffi.devices()]
    for name in names:
        if name not in known:
            raise ValueError(f"{option}={name!r} is no device; there are: {', '.join(known)}")
    return [known.index(name) for name in names]


def _check_room(option: str, values: Any) -> None:
    if len(values) > _ffi.MAX_DEVICES:
        raise ValueError(f"{option} has {len(values)} entries; give at most {_ffi.MAX_DEVICES}")
