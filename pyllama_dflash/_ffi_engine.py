"""Call the part of the library that generates; _ffi has the rest, and the rules that hold here too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ._ffi import ModelHandle, _ffi, _fields, _lib, _rows, check
from ._handle import Handle
from ._returned import Bytes, Floats, Ints
from ._returned import Drafted as Drafted  # as: other modules take these from here
from ._returned import DraftRequest as DraftRequest
from ._returned import EngineState as EngineState
from ._returned import Verified as Verified


class EngineHandle(Handle):
    """A pld_engine, with the buffers that its calls write into."""

    __slots__ = (
        "candidates",
        "chosen",
        "drafts",
        "info",
        "lengths",
        "margins",
        "scores",
        "t_us",
        "tokens",
        "verdicts",
        "verifies",
    )

    def __init__(self, target: ModelHandle, draft: ModelHandle | None, params: dict[str, int]) -> None:
        out = _ffi.new("pld_engine **")
        super().__init__(out, _lib.pld_engine_free)
        other, values = _ffi.NULL if draft is None else draft.pointer, _ffi.new("pld_engine_params *", params)
        check(_lib.pld_engine_open(target.pointer, other, values, out))
        info = _ffi.new("pld_engine_info *")
        check(_lib.pld_engine_get_info(self.pointer, info))
        self.info = _fields(info[0])
        n_seq, width = self.info["n_seq_max"], self.info["n_max"] + 1
        n_candidates = max(1, self.info["n_candidates"])
        self.drafts = _ffi.new("pld_draft_request[]", n_seq)
        self.verifies = _ffi.new("pld_verify_request[]", n_seq)
        self.lengths = _ffi.new("int32_t[]", n_seq)
        self.tokens = _ffi.new("int32_t[]", n_seq * width)
        self.margins = _ffi.new("float[]", n_seq * width)
        self.candidates = _ffi.new("int32_t[]", n_seq * width * n_candidates)
        self.scores = _ffi.new("float[]", n_seq * width * n_candidates)
        self.chosen = _ffi.new("int32_t[]", n_seq * width)
        self.verdicts = _ffi.new("pld_verdict[]", n_seq)
        self.t_us = _ffi.new("int64_t *")


def open(target: ModelHandle, draft: ModelHandle | None, params: dict[str, int]) -> EngineHandle:
    """Open an engine; params has the fields of pld_engine_params."""
    return EngineHandle(target, draft, params)


def state(engine: EngineHandle, seq: int = 0) -> EngineState:
    """Return where a sequence stands."""
    out = _ffi.new("pld_engine_state *")
    check(_lib.pld_engine_get_state(engine.pointer, seq, out))
    return EngineState(out.n_past, out.n_pending, out.anchor, out.n_past_draft, out.n_injected, out.n_prefilled)


def memory(engine: EngineHandle) -> dict[str, int]:
    """Return the fields of pld_engine_memory."""
    out = _ffi.new("pld_engine_memory *")
    check(_lib.pld_engine_get_memory(engine.pointer, out))
    return _fields(out[0])


def devices(engine: EngineHandle) -> list[dict[str, Any]]:
    """Return the fields of each pld_device_memory."""
    return _rows("pld_device_memory", partial(_lib.pld_engine_devices, engine.pointer))


def plan(
    target: tuple[bytes, dict[str, Any]] | None,
    draft: tuple[bytes, dict[str, Any]] | None,
    params: dict[str, int] | None,
) -> tuple[int, list[dict[str, Any]]]:
    """Return n_ctx, and what opening files with these fields of pld_model_params and pld_engine_params would take."""
    null = _ffi.NULL
    n_ctx = _ffi.new("int32_t *")
    files: list[Any] = []
    for file in (target, draft):
        files += [null, null] if file is None else [file[0], _ffi.new("pld_model_params *", file[1])]
    values = null if params is None else _ffi.new("pld_engine_params *", params)
    rows = _rows("pld_device_memory", partial(_lib.pld_plan, *files, values, n_ctx))
    return n_ctx[0], rows


def graphs(engine: EngineHandle) -> list[dict[str, int]]:
    """Return the fields of each pld_graph."""
    return _rows("pld_graph", partial(_lib.pld_engine_graphs, engine.pointer))


def reset(engine: EngineHandle, seq: int = -1) -> None:
    """Forget the cached tokens of a sequence, -1: of all."""
    check(_lib.pld_engine_reset(engine.pointer, seq))


def begin(engine: EngineHandle, tokens: Ints, seq: int = 0) -> int:
    """Take a prompt [n]; return the number of cached tokens that it keeps."""
    n_reused, ids = _ffi.new("int32_t *"), _ffi.from_buffer("int32_t[]", tokens)
    check(_lib.pld_engine_begin(engine.pointer, seq, ids, len(tokens), n_reused))
    return int(n_reused[0])


def prefill(engine: EngineHandle, seq: int = 0) -> int:
    """Evaluate one chunk of the prompt; return the number of tokens that still wait."""
    return check(_lib.pld_engine_prefill(engine.pointer, seq))


def draft(engine: EngineHandle, requests: Sequence[DraftRequest], details: bool = False) -> list[Drafted]:
    """Draft a block after the anchor of each sequence; requests by ascending sequence, each once."""
    null, n = _ffi.NULL, len(requests)
    for index, request in enumerate(requests):
        engine.drafts[index] = request
    wanted = (engine.margins, engine.candidates, engine.scores) if details else (null, null, null)
    check(_lib.pld_engine_draft(engine.pointer, engine.drafts, n, engine.lengths, engine.tokens, *wanted, engine.t_us))
    return [_drafted(engine, index, details) for index in range(n)]


def _drafted(engine: EngineHandle, index: int, details: bool) -> Drafted:
    n, start = engine.lengths[index], index * engine.info["n_max"]
    tokens: list[int] = _ffi.unpack(engine.tokens + start, n)
    if not details:
        return Drafted(tokens, None, engine.t_us[0])
    k = engine.info["n_candidates"]
    margins = _copy(engine.margins, np.float32, n, start)
    candidates = _copy(engine.candidates, np.int32, n * k, start * k).reshape(n, k)
    scores = _copy(engine.scores, np.float32, n * k, start * k).reshape(n, k)
    return Drafted(tokens, (margins, candidates, scores), engine.t_us[0])


def verify(engine: EngineHandle, requests: Sequence[tuple[int, Sequence[int]]]) -> list[Verified]:
    """Run the anchor and n tokens of each sequence through the target, keep what it agrees with, roll back the rest.

    Args:
        engine: the engine.
        requests: sequence and tokens, by ascending sequence, each once. A sequence whose prompt waits has no tokens:
            rows of the prompt go along, and of what is returned only n_pending has a meaning.
    """
    n_max, has_margins = engine.info["n_max"], not engine.info["backend_argmax"]
    for index, (seq, tokens) in enumerate(requests):
        engine.verifies[index] = (seq, len(tokens))
        engine.tokens[index * n_max : index * n_max + len(tokens)] = list(tokens)
    margins = engine.margins if has_margins else _ffi.NULL
    arrays = (engine.tokens, engine.chosen, margins, engine.verdicts, engine.t_us)
    check(_lib.pld_engine_verify(engine.pointer, engine.verifies, len(requests), *arrays))
    out = []
    for index, (_, tokens) in enumerate(requests):
        verdict = engine.verdicts[index]
        n, start = len(tokens) + 1 if verdict.bonus >= 0 else 0, index * (n_max + 1)
        chosen: list[int] = _ffi.unpack(engine.chosen + start, n)
        gaps = _copy(engine.margins, np.float32, n, start) if has_margins else None
        out.append(Verified(verdict.n_accepted, verdict.bonus, chosen, gaps, engine.t_us[0], verdict.n_pending))
    return out


def logits(engine: EngineHandle, n_rows: int) -> Floats:
    """Return the first rows [n_rows, n_vocab] of the last verify."""
    out = np.empty((n_rows, engine.info["n_vocab"]), dtype=np.float32)
    for row in range(n_rows):
        check(_lib.pld_engine_logits(engine.pointer, row, _ffi.from_buffer("float[]", out[row], require_writable=True)))
    return out


def tokens(engine: EngineHandle, seq: int = 0) -> Ints:
    """Return the tokens in the cache of a sequence [n_past]."""
    out = np.empty(check(_lib.pld_engine_tokens(engine.pointer, seq, _ffi.NULL, 0)), np.int32)
    ids = _ffi.from_buffer("int32_t[]", out, require_writable=True)
    check(_lib.pld_engine_tokens(engine.pointer, seq, ids, len(out)))
    return out


def state_size(engine: EngineHandle, seq: int = 0) -> int:
    """Return how many bytes the state of a sequence takes; OrderError if nothing is cached."""
    return check(_lib.pld_engine_state_size(engine.pointer, seq))


def state_get(engine: EngineHandle, n: int, seq: int = 0) -> Bytes:
    """Return the state of a sequence, whose size is n."""
    out = np.empty(n, np.uint8)
    check(_lib.pld_engine_state_get(engine.pointer, seq, _ffi.from_buffer("uint8_t[]", out, require_writable=True), n))
    return out


def state_set(engine: EngineHandle, data: Bytes, seq: int = 0) -> None:
    """Put a state in place of what is kept of a sequence; after an error nothing is."""
    check(_lib.pld_engine_state_set(engine.pointer, seq, _ffi.from_buffer("uint8_t[]", data), len(data)))


def _copy(source: Any, dtype: Any, n: int, start: int = 0) -> npt.NDArray[Any]:
    return np.array(np.frombuffer(_ffi.buffer(source), dtype=dtype)[start : start + n])
