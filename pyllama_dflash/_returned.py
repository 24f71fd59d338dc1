"""What calls of the library return, in plain values."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


class EngineState(NamedTuple):
    """The fields of pld_engine_state."""

    n_past: int
    n_pending: int
    anchor: int
    n_past_draft: int
    n_injected: int
    n_prefilled: int


class DraftRequest(NamedTuple):
    """The fields of pld_draft_request."""

    seq: int
    n_max: int
    n_min: int
    margin: float
    p_min: float


class Drafted(NamedTuple):
    """What a draft call returned for one sequence: tokens, the details that were asked for, the call's microseconds."""

    tokens: list[int]
    details: tuple[Floats, Ints, Floats] | None  # margins [n], candidates [n, k], scores [n, k]
    t_us: int


class Verified(NamedTuple):
    """What a verify call returned for the n tokens of one sequence, and the call's microseconds."""

    n_accepted: int
    bonus: int
    chosen: list[int]  # n + 1
    margins: Floats | None  # n + 1
    t_us: int
    n_pending: int = 0  # tokens of its prompt that still wait
