"""What tests of several sequences share: an engine driven call by call, drafts that can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from laws import Models
from tiny import Draft, Target

import pyllama_dflash as pd
from pyllama_dflash import _ffi_engine
from pyllama_dflash._open import engine_fields
from pyllama_dflash._returned import DraftRequest, EngineState, Verified
from pyllama_dflash.params import Params


class Block(NamedTuple):
    """A draft of one sequence: tokens [n], margins [n], candidates and scores [n, k]."""

    tokens: list[int]
    margins: npt.NDArray[Any]
    candidates: npt.NDArray[Any]
    scores: npt.NDArray[Any]

    def cut(self, n: int) -> Block:
        return Block(self.tokens[:n], self.margins[:n], self.candidates[:n], self.scores[:n])


class Engine:
    """An engine of n_seq sequences; fields: those of pld_engine_params that Params does not have."""

    def __init__(
        self,
        models: Models,
        target: Target,
        draft: Draft,
        n_seq: int = 1,
        n_ctx_draft: int = 0,
        **options: Any,
    ) -> None:
        self.models = [pd.Model(models.files.path(like)) for like in (target, draft)]
        params = Params(**{"n_ctx": 512, "n_threads": 1, **options})
        fields = {**engine_fields(params), "n_seq_max": n_seq, "n_ctx_draft": n_ctx_draft}
        self.handle = _ffi_engine.open(self.models[0]._handle, self.models[1]._handle, fields)

    @property
    def info(self) -> dict[str, int]:
        return self.handle.info

    def state(self, seq: int = 0) -> EngineState:
        return _ffi_engine.state(self.handle, seq)

    def begin(self, tokens: Sequence[int], seq: int = 0) -> int:
        """Take a prompt and evaluate all of it; return the number of cached tokens that were kept."""
        n_reused = _ffi_engine.begin(self.handle, np.array(tokens, np.int32), seq)
        while _ffi_engine.prefill(self.handle, seq):
            pass
        return n_reused

    def drafts(self, lengths: Mapping[int, int]) -> dict[int, Block]:
        """Draft for several sequences, so many tokens for each."""
        requests = [DraftRequest(seq, n, 0, 0.0, 0.0) for seq, n in sorted(lengths.items())]
        found = _ffi_engine.draft(self.handle, requests, details=True)
        return {request.seq: Block(one.tokens, *one.details) for request, one in zip(requests, found) if one.details}

    def draft(self, n: int = 7, seq: int = 0) -> Block:
        return self.drafts({seq: n})[seq]

    def verify(self, guesses: Mapping[int, Sequence[int]]) -> dict[int, Verified]:
        return dict(zip(sorted(guesses), _ffi_engine.verify(self.handle, sorted(guesses.items()))))

    def reset(self, seq: int = -1) -> None:
        _ffi_engine.reset(self.handle, seq)

    def rounds(self, n: int, width: int = 7, seq: int = 0) -> None:
        """Rounds of one sequence whose drafts are verified as they come."""
        for _ in range(n):
            self.verify({seq: self.draft(width, seq).tokens})

    def close(self) -> None:
        self.handle.close()
        for model in self.models:
            model.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
