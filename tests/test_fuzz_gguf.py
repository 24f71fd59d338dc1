"""No file kills the process: opening one succeeds or raises an exception of the kinds that the docstrings list."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import damage
import fuzzing
import ggufile
import pytest
from gguf import GGMLQuantizationType
from ggufile import I32, U32, Parts
from tiny import N_EMBD, N_VOCAB, Draft, Files, Target

Job = dict[str, Any]
Pair = tuple[Path, Path]
# A prompt may not fit a smaller vocabulary (ValueError), and what NaN weights compute may not be a token (DecodeError).
ALLOWED = (
    "ok",
    "ModelLoadError",
    "IncompatibleModelsError",
    "ValueError",
    "MemoryError",
    "DecodeError",
    "ContextFullError",
)


@pytest.fixture(scope="module")
def wholes(files: Files) -> list[tuple[Pair, str]]:
    """Pairs, and which of the two to damage."""
    target = Target()
    drafts = [Draft(keys=(("draft_vocab", tuple(range(0, N_VOCAB, 2))),)), Draft(version=1, reduced=True, window=16)]
    return [
        (files.pair(target, drafts[0]), "target"),
        (files.pair(target, drafts[0]), "draft"),
        (files.pair(target, drafts[1]), "draft"),
    ]


def jobs_of(wholes: list[tuple[Pair, str]], numbers: Iterable[int], **more: Any) -> list[Job]:
    jobs = []
    for number in numbers:
        pair, damaged = wholes[number % len(wholes)]
        jobs.append(job_of(pair, damaged, f"{damaged} {number}", number=number, **more))
    return jobs


def job_of(pair: Pair, damaged: str, name: str, **how: Any) -> Job:
    return {"name": name, "target": str(pair[0]), "draft": str(pair[1]), "damaged": damaged, **how}


def check(jobs: list[Job]) -> None:
    outcomes = [(job, outcome) for job, outcome in fuzzing.outcomes(jobs)]
    assert len(outcomes) == len(jobs)
    bad = [f"{job}: {outcome}" for job, outcome in outcomes if outcome.split(":")[0].split()[0] not in ALLOWED]
    assert not bad, "\n".join(bad)
    refused = sum(not outcome.startswith("ok") for _, outcome in outcomes)
    assert refused > len(jobs) / 4, "the damage does too little to test anything"


def test_damaged_files(wholes: list[tuple[Pair, str]]) -> None:
    check(jobs_of(wholes, range(150)))


def test_every_key(wholes: list[tuple[Pair, str]]) -> None:
    """Each header key takes three values, a different three for the next key."""
    jobs, turn = [], 0
    for pair, damaged in wholes:
        for key in ggufile.read(pair[damaged == "draft"]).keys:
            for number in ((turn + i) % len(damage.VALUES) for i in range(3)):
                name = key.name.decode()
                jobs.append(job_of(pair, damaged, f"{damaged} {name} {number}", key=name, number=number))
            turn += 3
    assert turn > 2 * len(damage.VALUES)
    check(jobs)


@pytest.mark.slow
def test_more_damaged_files(wholes: list[tuple[Pair, str]]) -> None:
    check(jobs_of(wholes, range(1000, 2000)))


@pytest.mark.slow
def test_files_laid_out_anew(wholes: list[tuple[Pair, str]]) -> None:
    check(jobs_of(wholes, range(300), laid_out=True))


# named cases ----------------------------------------------------------------------------------------------------------


def set_key(name: str, kind: int, value: Any) -> Callable[[Parts], None]:
    def spoil(parts: Parts) -> None:
        key = parts.key(name)
        key.kind, key.value = kind, value

    return spoil


def widen(parts: Parts) -> None:
    """The width off by one, in the header and in all shapes that follow from it: a sound draft, for another target."""
    for name in ("embedding_length", "feed_forward_length"):
        parts.key(f"dflash.{name}").value = N_EMBD + 1
    heads = {b"attn_q.weight": 1, b"attn_output.weight": 0}  # the side that is n_head * d_head
    for tensor in parts.tensors:
        kept = heads.get(tensor.name.split(b".", 2)[-1])
        for at, dim in enumerate(tensor.dims):
            if at != kept:
                tensor.dims[at] = {N_EMBD: N_EMBD + 1, 2 * N_EMBD: 2 * N_EMBD + 2}.get(dim, dim)
    parts.lay_out()


def store_as(kind: str) -> Callable[[Parts], None]:
    def spoil(parts: Parts) -> None:
        next(tensor for tensor in parts.tensors if tensor.name == b"blk.0.ffn_down.weight").kind = GGMLQuantizationType[
            kind
        ]
        parts.lay_out()

    return spoil


WIDER = str(N_EMBD + 1)
UNFIT = "IncompatibleModelsError"
# which file, what is done to it, the error, and what its message names
SPOILT: dict[str, tuple[str, Callable[[Parts], None], str, str]] = {
    "block-size-0": ("draft", set_key("dflash.block_size", U32, 0), "ModelLoadError", "block_size"),
    "block-size-minus-1": ("draft", set_key("dflash.block_size", I32, -1), "ModelLoadError", "block_size"),
    "block-size-2^31": ("draft", set_key("dflash.block_size", U32, 2**31), "ModelLoadError", "block_size"),
    "width-off-by-one": ("draft", set_key("dflash.embedding_length", U32, N_EMBD + 1), UNFIT, WIDER),
    "width-off-by-one-in-all-shapes": ("draft", widen, UNFIT, WIDER),
    "target-rope-0": ("target", set_key("llama.rope.dimension_count", U32, 0), "ModelLoadError", "rope"),
    "draft-rope-0": ("draft", set_key("dflash.rope.dimension_count", U32, 0), "ModelLoadError", "rope"),
}
for _kind in ("I8", "I16", "I32", "I64", "F64", "Q8_1"):
    for _which in ("target", "draft"):
        SPOILT[f"{_which}-matrix-{_kind}"] = (_which, store_as(_kind), "ModelLoadError", "blk.0.ffn_down.weight")


def write_others(folder: Path, whole: Path) -> dict[str, Path]:
    """What is no GGUF file at all, or ends too soon."""
    raw = whole.read_bytes()
    contents = {
        "empty": b"",
        "one-byte": b"G",
        "text": b"This is not a model.\n" * 100,
        "zeros": bytes(4096),
        "magic-only": b"GGUF",
        "cut-in-header": raw[:1000],
        "cut-in-tensors": raw[: len(raw) // 2],
        "cut-by-one": raw[:-1],
    }
    paths = {name: folder / name for name in contents}
    for name, path in paths.items():
        path.write_bytes(contents[name])
    return {**paths, "directory": folder, "missing": folder / "missing.gguf"}


OTHERS = ["empty", "one-byte", "text", "zeros", "magic-only", "cut-in-header", "cut-in-tensors", "cut-by-one"]
OTHERS += ["directory", "missing"]


@pytest.fixture(scope="module")
def said(files: Files, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The outcome of each named case."""
    pair = files.pair(version=1)
    whole = dict(zip(("target", "draft"), pair))
    folder = tmp_path_factory.mktemp("named")
    jobs = []
    for name, (which, spoil, _, _) in SPOILT.items():
        parts = ggufile.read(whole[which])
        spoil(parts)
        path = folder / f"{name}.gguf"
        path.write_bytes(bytes(parts))
        jobs.append(job_of(pair, which, name, path=str(path)))
    for which in whole:
        for name, path in write_others(folder, whole[which]).items():
            jobs.append(job_of(pair, which, f"{which}-{name}", path=str(path)))
    return {job["name"]: outcome for job, outcome in fuzzing.outcomes(jobs)}


@pytest.mark.parametrize("name", SPOILT)
def test_spoilt(said: dict[str, str], name: str) -> None:
    _, _, kind, named = SPOILT[name]
    outcome = said[name]
    assert outcome.split(":")[0] == kind, outcome
    assert named in outcome


@pytest.mark.parametrize("which", ["target", "draft"])
@pytest.mark.parametrize("name", OTHERS)
def test_no_model_at_all(said: dict[str, str], which: str, name: str) -> None:
    outcome = said[f"{which}-{name}"]
    assert outcome.startswith("ModelLoadError: "), outcome
    assert name in outcome or name == "directory"  # the path
