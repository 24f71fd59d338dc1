"""Several sequences side by side in one engine: the text of each is that of one alone."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from arch_models import Arch
from arch_table import ARCHS
from laws import Models, assert_near_tie, first_difference
from tiny import N_VOCAB, Target

import pyllama_dflash as pd
from pyllama_dflash import _ffi_engine
from pyllama_dflash._open import engine_fields
from pyllama_dflash._session import ROLLBACK
from pyllama_dflash.params import Params

N_SEQ, N_MAX = 4, 5
Like = Any  # a Target or an Arch

WINDOWED = dataclasses.replace(ARCHS["lfm2"], keys=ARCHS["lfm2"].keys | {"attention.sliding_window": 16}, note="window")
KINDS: list[Like] = [
    Target(weights="Q8_0"),  # rows that do not depend on the width
    Target(),
    *(ARCHS[name] for name in ("gemma3", "deepseek2", "minimax-m3", "qwen2vl")),
    *(ARCHS[name] for name in ("qwen35", "nemotron_h", "deepseek4", "qwen4exp")),
    WINDOWED,
    *(ARCHS[name] for name in ("mamba", "mamba2", "rwkv7", "arwkv7", "jamba", "falcon-h1", "plamo2", "qwen3next")),
]

BLOCKS = ("minimax-m3", "qwen4exp")  # attention chooses among blocks of cells

each = pytest.mark.parametrize("like", KINDS, ids=repr)
both = pytest.mark.parametrize("unified", [False, True], ids=["split", "unified"])


class Engine:
    """An engine without a draft, and what it takes."""

    def __init__(self, models: Models, like: Like, **fields: int) -> None:
        self.models, self.like = models, like
        self.target = pd.Model(models.files.path(like))
        options = {"n_ctx": 256, "n_max": N_MAX, "n_threads": 1, "n_seq_max": N_SEQ, "backend_argmax": 0} | fields
        self.handle = _ffi_engine.open(self.target._handle, None, engine_fields(Params()) | options)
        self.n_ctx = self.handle.info["n_ctx"]

    def close(self) -> None:
        self.handle.close()
        self.target.close()

    def prefill(self, seq: int, prompt: list[int]) -> int:
        n_cached = _ffi_engine.begin(self.handle, np.array(prompt, np.int32), seq)
        while _ffi_engine.prefill(self.handle, seq):
            pass
        return n_cached

    def n_past(self, seq: int) -> int:
        return _ffi_engine.state(self.handle, seq).n_past

    def verify(self, requests: list[tuple[int, list[int]]]) -> list[list[int]]:
        """What each sequence says."""
        found = _ffi_engine.verify(self.handle, requests)
        return [[*tokens[: one.n_accepted], one.bonus] for one, (_, tokens) in zip(found, requests)]


@pytest.fixture
def engine(models: Models, like: Like, unified: bool) -> Iterator[Engine]:
    if unified and repr(like) in BLOCKS:
        pytest.skip("cells in one buffer make no blocks")
    with closing(Engine(models, like, kv_unified=unified)) as engine:
        yield engine


class Solo:
    """What one says alone, token by token."""

    def __init__(self, models: Models, like: Like) -> None:
        self.models, self.like = models, like
        self._said: dict[tuple[int, ...], list[int]] = {}

    def __call__(self, prompt: list[int], n: int) -> list[int]:
        key = tuple(prompt)
        if len(self._said.get(key, ())) < n:
            spec = self.models.get(self.like, n_ctx=256, n_max=N_MAX, backend_argmax=False)
            spec.prefill(prompt)
            self._said[key] = [spec.verify([]).bonus for _ in range(n)]
        return self._said[key]

    def assert_same(self, prompt: list[int], ours: list[int]) -> None:
        reference = self(prompt, len(ours))
        at = first_difference(ours, reference)
        if at is None:
            return
        if isinstance(self.like, Target):
            self.models.assert_same(self.like, prompt, ours, reference)
            return
        rivals = ours[at], reference[at]
        assert_near_tie(
            self.models.files.path(self.like), prompt, reference[:at], rivals, N_MAX + 1, n_ctx=256, n_threads=1
        )


def guess(rng: random.Random, reference: list[int], n: int) -> list[int]:
    """A draft of n tokens that goes wrong somewhere, or nowhere."""
    out = reference[:n]
    if rng.random() < 0.7 and n:
        at = rng.randrange(n)
        out = [*out[:at], *((token + 1) % N_VOCAB for token in out[at:])]
    return out


@each
@both
def test_texts_are_those_of_each_alone(models: Models, engine: Engine, like: Like) -> None:
    """Other prompts, lengths and widths in every round, some with holes, and sequences that end and begin again."""
    rng, solo = random.Random(4), Solo(models, like)
    prompts: dict[int, list[int]] = {}
    said: dict[int, list[int]] = {}
    for _ in range(60):
        free = [seq for seq in range(N_SEQ) if seq not in prompts]
        if free and rng.random() < 0.6:
            seq = rng.choice(free)
            prompts[seq] = [rng.randrange(250) for _ in range(rng.choice((1, 2, 9, 40)))]
            said[seq] = []
            engine.prefill(seq, prompts[seq])
        live = [seq for seq in sorted(prompts) if rng.random() < 0.8]
        if not live:
            continue
        requests = []
        for seq in live:
            reference = solo(prompts[seq], 60)[len(said[seq]) :]
            requests.append((seq, guess(rng, reference, rng.randrange(N_MAX + 1))))
        for seq, more in zip(live, engine.verify(requests)):
            said[seq] += more
            assert engine.n_past(seq) == len(prompts[seq]) - 1 + len(said[seq])
            if len(said[seq]) > 40 or solo(prompts[seq], 60)[: len(said[seq])] != said[seq]:
                solo.assert_same(prompts[seq], said[seq])
                del prompts[seq]
    for seq, prompt in prompts.items():
        solo.assert_same(prompt, said[seq])


@each
@both
def test_a_launch_of_several_is_one_batch(engine: Engine, like: Like, unified: bool) -> None:
    """The draft reads the features of the last batch, so there must not be two."""
    for seq in range(N_SEQ):
        engine.prefill(seq, [seq + 1])
    said = engine.verify([(0, [1] * 5), (1, []), (2, [2, 3]), (3, [4])])
    said += engine.verify([(0, [9] * 3), (2, [5] * 4), (3, [4])])
    assert [len(tokens) for tokens in said] == [1] * 7, "something was accepted; draft other tokens"
    sizes = {graph["n_rows"] for graph in _ffi_engine.graphs(engine.handle)}
    sizes -= {1}  # the trial of opening
    if isinstance(like, Target) or not like.recurrent:
        assert sizes == ({6 + 1 + 3 + 2, 4 + 5 + 2} if unified else {4 * 6, 4, 2 * 5})
    elif repr(like) in ("arwkv7", "plamo2"):  # llama.cpp's graphs of these are for one sequence
        assert sizes == {6, 3, 2, 4, 5}
    elif repr(like) == "deepseek4":  # neighbours only
        assert sizes == {4 * 6, 4, 2 * 5}
    elif repr(like) in ("mamba", "mamba2", "rwkv7"):  # they, too; what was accepted is run again
        assert sizes == {4 * 6, 4, 2 * 5, 2}
    elif ROLLBACK[engine.handle.info["rollback"]] == "checkpoint":  # unified in any case
        assert sizes == {4 * 6, 3 * 5, 3}
    else:
        assert sizes == {4 * 6} | ({3 * 5} if unified else {4, 2 * 5})


@each
@both
def test_each_sequence_has_the_whole_context(models: Models, engine: Engine, like: Like) -> None:
    """Rows that fill a launch up reach beyond the context of one that is nearly full."""
    solo, n_ctx = Solo(models, like), engine.n_ctx
    prompts = {seq: [(seq + 3 * i) % 250 for i in range(n_ctx - n)] for seq, n in enumerate((2, 9, 200, 3))}
    said: dict[int, list[int]] = {seq: [] for seq in prompts}
    for seq, prompt in prompts.items():
        assert engine.prefill(seq, prompt) == 0
    while live := [seq for seq in prompts if engine.n_past(seq) < n_ctx and len(said[seq]) < 12]:
        requests = []
        for seq in live:
            room = min(N_MAX, n_ctx - engine.n_past(seq) - 1)
            reference = solo(prompts[seq], min(12, n_ctx - len(prompts[seq]) + 1))[len(said[seq]) :]
            requests.append((seq, reference[: min(room, seq + 2)]))
        for seq, more in zip(live, engine.verify(requests)):
            said[seq] += more
    for seq, prompt in prompts.items():
        assert len(said[seq]) >= min(12, n_ctx - len(prompt) + 1)
        solo.assert_same(prompt, said[seq])
    with pytest.raises(pd.ContextFullError):
        engine.verify([(0, []), (2, [])])
    assert engine.n_past(2) == len(prompts[2]) - 1 + len(said[2])  # nothing was changed


@each
@both
def test_a_sequence_is_forgotten_alone(models: Models, engine: Engine, like: Like) -> None:
    solo = Solo(models, like)
    prompts = [[7 + seq, 90, 14, 200 - seq] * 4 for seq in range(N_SEQ)]
    said: list[list[int]] = [[] for _ in prompts]
    for seq, prompt in enumerate(prompts):
        engine.prefill(seq, prompt)
    for i in range(6):
        requests = [(seq, guess(random.Random(i), solo(p, 40)[len(said[seq]) :], 4)) for seq, p in enumerate(prompts)]
        for seq, more in enumerate(engine.verify(requests)):
            said[seq] += more
        forgotten = i % N_SEQ
        _ffi_engine.reset(engine.handle, forgotten)
        assert engine.n_past(forgotten) == 0
        with pytest.raises(pd.OrderError):
            engine.verify([(forgotten, [])])
        assert engine.prefill(forgotten, prompts[forgotten]) == 0
        said[forgotten] = []
    for seq, prompt in enumerate(prompts):
        solo.assert_same(prompt, said[seq])


@pytest.mark.parametrize("name", BLOCKS)
def test_one_buffer_for_blocks_of_cells_is_refused(models: Models, name: str) -> None:
    with pytest.raises(ValueError, match=r"attends to blocks .*turn it off"):
        Engine(models, ARCHS[name], kv_unified=1)
    Engine(models, ARCHS[name], kv_unified=1, n_seq_max=1).close()


@pytest.mark.parametrize("like", [Target(weights="Q8_0"), ARCHS["qwen35"], ARCHS["jamba"]], ids=repr)
@pytest.mark.parametrize(
    "fields",
    [{"flash_attn": 0}, {"flash_attn": 1}, {"type_k": 8, "type_v": 8, "flash_attn": 1}, {"backend_argmax": 1}],
    ids=["no flash attention", "flash attention", "q8_0", "argmax"],
)
@both
def test_options_of_the_cache(models: Models, like: Like, fields: dict[str, int], unified: bool) -> None:
    """Compared with one sequence of the same options."""
    if "type_k" in fields and isinstance(like, Arch):
        keys: dict[str, Any] = {"attention.key_length": 32, "attention.value_length": 32}
        keys |= {"attention.head_count": 2} if like.name == "jamba" else {}
        like = dataclasses.replace(like, keys=like.keys | keys | {"rope.dimension_count": 32}, note=f"{like!r}-32")
    rng = random.Random(1)
    prompts = [[rng.randrange(250) for _ in range(n)] for n in (3, 30, 9, 17)]
    with closing(Engine(models, like, n_seq_max=1, **fields)) as one:
        reference = []
        for prompt in prompts:
            one.prefill(0, prompt)
            reference.append([token for _ in range(40) for token in one.verify([(0, [])])[0]])
    with closing(Engine(models, like, kv_unified=unified, **fields)) as engine:
        said: list[list[int]] = [[] for _ in prompts]
        for seq, prompt in enumerate(prompts):
            engine.prefill(seq, prompt)
        for i in range(8):
            requests = [(seq, guess(rng, reference[seq][len(said[seq]) :], (i + seq) % 5)) for seq in range(N_SEQ)]
            for seq, more in enumerate(engine.verify(requests)):
                said[seq] += more
    for ours, theirs in zip(said, reference):
        assert ours == theirs[: len(ours)]
