"""Put forged states into an engine; run in its own process with a target, a draft or "", and 1 for llama.cpp's graph.

Prints how often each outcome came, as JSON.
"""

from __future__ import annotations

import json
import random
import resource
import struct
import sys
from collections import Counter
from collections.abc import Iterator

import numpy as np

import pyllama_dflash as pd
from pyllama_dflash import _ffi_engine

PROMPT = [5, 90, 300, 12, 33, 7, 260, 41, 350, 18, 77, 201, 144, 9, 64, 310, 28, 55, 120, 399, 2]
HEADER, CHECKED, N_TARGET = 72, 16, 56  # of SequenceState
OF_DRAFT = 56  # DraftState; its last field is the size of what follows
NUMBERS = (0, 2**32 - 1, 2**31 - 1, 2**31, 1 << 20, 2, 64)


def checksum(data: bytes) -> int:
    """That of engine_state.cpp."""
    out, n = 0xCBF29CE484222325, len(data) // 8 * 8
    for (word,) in struct.iter_unpack("<Q", data[:n]):
        out = (out ^ word) * 0x100000001B3 % 2**64
        out ^= out >> 32
    for byte in data[n:]:
        out = (out ^ byte) * 0x100000001B3 % 2**64
    return out


def signed(state: bytes, n_target: int, n_tokens: int) -> bytes:
    """The state with its checksum and the draft's size right."""
    out, at = bytearray(state), HEADER + 4 * n_tokens + n_target
    if len(out) >= at + OF_DRAFT:
        out[at + OF_DRAFT - 8 : at + OF_DRAFT] = struct.pack("<Q", len(out) - at - OF_DRAFT)
    if len(out) >= CHECKED:
        out[CHECKED - 8 : CHECKED] = struct.pack("<Q", checksum(bytes(out[CHECKED:])))
    return bytes(out)


def forged(state: bytes, n_target: int, n_tokens: int) -> Iterator[bytes]:
    """States that are wrong in one place or in some; the target's part cut, too, with its size told right."""
    rng, target = random.Random(1), HEADER + 4 * n_tokens
    draft = target + n_target
    for at in [*range(target + min(n_target, 300)), *range(draft, min(draft + 300, len(state)))]:
        yield state[:at] + bytes([rng.randrange(256)]) + state[at + 1 :]
    for start in (target, draft):
        for at in range(start, min(start + 800, len(state) - 4), 4):
            yield state[:at] + struct.pack("<I", rng.choice(NUMBERS)) + state[at + 4 :]
    for _ in range(500):
        out = bytearray(state)
        for _ in range(rng.choice([1, 3, 20])):
            out[rng.randrange(CHECKED, len(out))] = rng.randrange(256)
        yield bytes(out)
    for _ in range(200):
        n = rng.randrange(1, n_target)
        yield state[:N_TARGET] + struct.pack("<Q", n_target - n) + state[N_TARGET + 8 : draft - n] + state[draft:]
    for n in (*range(150), *(rng.randrange(len(state)) for _ in range(100))):
        yield state[:n]


def main(target: str, draft: str, reference: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out: Counter[str] = Counter()
    left = 0
    options = {"fused_draft": not reference} if draft else {"n_max": 4}
    with pd.Speculator(target, draft or None, n_ctx=128, n_threads=1, **options) as spec:
        spec.run(PROMPT, max_tokens=6, ignore_eos=True)
        engine = spec._session.engine
        state = bytes(_ffi_engine.state_get(engine, _ffi_engine.state_size(engine)))
        n_tokens = spec.state.n_past
        n_target = struct.unpack_from("<Q", state, N_TARGET)[0]
        assert signed(state, n_target, n_tokens) == state, "this file knows the format"
        said = spec.verify([]).bonus
        for bad in forged(state, n_target, n_tokens):
            try:
                _ffi_engine.state_set(engine, np.frombuffer(signed(bad, n_target, n_tokens), np.uint8))
            except (ValueError, pd.DFlashError) as error:
                out[type(error).__name__] += 1
                left += spec.state.n_past + spec.state.n_past_draft + (spec.state.anchor is not None)
                continue
            try:
                if spec.state.anchor is not None:
                    spec.verify([1, 2])
                    spec.draft()
                spec.run([*PROMPT, 9, 9], max_tokens=3)
                out["ok"] += 1
            except pd.DecodeError:
                out["DecodeError after"] += 1
        _ffi_engine.state_set(engine, np.frombuffer(state, np.uint8))
        assert spec.verify([]).bonus == said
        assert left == 0, "a state that was refused left something behind"
    print(json.dumps(out))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
