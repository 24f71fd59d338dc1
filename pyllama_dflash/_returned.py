"""What calls of the library return, in plain values."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


class EngineState(NamedTuple):
    """The fields of pld_engine_state."""

    n_past: int
    n_pending: int
    anchor: int
    n_past_draft: int
    n_injected: int
    n_prefilled: int


class Drafted(NamedTuple):
    """What one draft call returned: tokens, the details that were asked for, microseconds."""

    tokens: list[int]
    details: tuple[Floats, Ints, Floats] | None  # margins [n], candidates [n, k], scores [n, k]
    t_us: int


class Verified(NamedTuple):
    """What one verify call returned, for n tokens."""

    n_accepted: int
    bonus: int
    chosen: list[int]  # n + 1
    margins: Floats | None  # n + 1
    t_us: int
