"""What a Speculator has evaluated, in a file: written whole or not at all, read back only where it fits."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from . import _ffi, _ffi_engine, _replace, build
from ._fingerprint import fingerprint
from ._returned import Bytes
from ._session import Session
from ._turn import Hold
from .errors import ContextFullError, ModelLoadError
from .model import Model, PathLike

# The file: MAGIC, version and length of the facts, the facts as JSON, the engine's bytes, a checksum over all of it.
MAGIC = b"pyllama_dflash text\n"
VERSION = 1
_NUMBERS = struct.Struct("<II")
_N_CHECKSUM = 32
_PIECE = 1 << 20
_FIXES = {
    "llama.cpp": "its states are laid out otherwise; evaluate the text again",
    "target": "open the target that it was saved with",
    "draft": "open the draft that it was saved with",
    "type_k": "open with that",
    "type_v": "open with that",
    "type_k_draft": "open with that",
    "type_v_draft": "open with that",
    "fused_draft": "open with that",
}


class Saving:
    """save() and load() of a Speculator."""

    _session: Session

    def save(self, path: PathLike) -> None:
        """Write what is evaluated of the current text to a file, so that load() can go on with it in another process.

        Args:
            path: of the file; one that save() wrote is replaced, once all is written.

        Raises:
            OrderError: nothing is evaluated; call run() or prefill() first.
            FileExistsError: something else is there.
            OSError: it cannot be written, or the models' files are not there any more as they were opened.
        """
        out = Path(os.fsdecode(path))
        self._session.turn.check_open()
        check_replaceable(out)
        n_tokens, data = self._session.alone(lambda hold: _take(self._session, hold))
        write(out, facts_of(self._session) | {"n_tokens": n_tokens}, data)

    def load(self, path: PathLike) -> tuple[int, ...]:
        """Go on with a text that save() wrote, in place of what is cached.

        A run() or prefill() whose prompt extends it evaluates only what is new. n_ctx and options of single calls may
        differ from those at save(), n_ctx of a target with RoPE factors for a short and for a long context only where
        it takes the same ones.

        Args:
            path: of the file.

        Returns:
            The text's token ids: a prompt that begins with them is cached up to the last.

        Raises:
            ModelLoadError: the file is damaged, or is none that save() wrote.
            ValueError: it was saved with other models, or other options of the caches.
            ContextFullError: the text is longer than n_ctx.
            OSError: the file cannot be read, or the models' files are not there any more as they were opened.
        """
        file = Path(os.fsdecode(path))
        self._session.turn.check_open()
        facts, data = read(file)
        check_facts(file, facts, facts_of(self._session))
        if facts.get("n_tokens", 0) > self._session.n_ctx:
            raise ContextFullError(
                f"{file} has {facts['n_tokens']} tokens, n_ctx={self._session.n_ctx}; open with a larger n_ctx"
            )
        return self._session.alone(lambda hold: _put(self._session, hold, data))


def _take(session: Session, hold: Hold) -> tuple[int, Bytes]:
    n = session.step(hold, lambda: _ffi_engine.state_size(session.engine))
    session.width = 0
    data = session.step(hold, lambda: _ffi_engine.state_get(session.engine, n))
    return session.state(hold).n_past, data


def _put(session: Session, hold: Hold, data: Bytes) -> tuple[int, ...]:
    session.width = 0
    session.step(hold, lambda: _ffi_engine.state_set(session.engine, data))
    return text_of(session, hold)


def text_of(session: Session, hold: Hold) -> tuple[int, ...]:
    """Return the token ids of the current text, its anchor among them."""
    tokens: list[int] = session.step(hold, lambda: _ffi_engine.tokens(session.engine)).tolist()
    anchor = session.state(hold).anchor
    return (*tokens, anchor) if anchor >= 0 else tuple(tokens)


def facts_of(session: Session) -> dict[str, Any]:
    """Return what must be equal where a state is read back."""
    params, info = session.params, session.engine.info
    facts: dict[str, Any] = {
        "llama.cpp": build.build_info()["upstream_commit"],
        "target": _identity(session.target),
        "draft": None if session.draft is None else _identity(session.draft),
        "type_k": params.type_k,
        "type_v": params.type_v,
    }
    if session.draft is not None:
        facts |= {"type_k_draft": params.type_k_draft, "type_v_draft": params.type_v_draft}
        facts["fused_draft"] = bool(info["fused_draft"])
    return facts


def _identity(model: Model) -> str:
    offsets = (int(tensor["offset"]) for tensor in model._call(_ffi.model_tensors))
    path = model._source.found()
    return fingerprint(path, n_header=min(offsets, default=path.stat().st_size))


def check_facts(file: Path, found: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise ValueError for the first fact of a file that is not ours."""
    for name, fix in _FIXES.items():
        theirs, own = found.get(name), ours.get(name)
        if theirs == own:
            continue
        if name not in ("target", "draft"):
            raise ValueError(f"{file} was saved with {name}={theirs!r}, this is {name}={own!r}: {fix}")
        if theirs is None:
            raise ValueError(f"{file} was saved without a draft; open without one")
        raise ValueError(f"{file} was saved with {'a' if own is None else 'another'} {name}; {fix}")


def check_replaceable(out: Path) -> None:
    """Refuse to write over a file that save() did not write."""
    if out.is_file() and out.stat().st_size > 0:
        with out.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise FileExistsError(f"{out} is there already and is none that save() wrote; give another path")


def write(out: Path, facts: Mapping[str, Any], data: Bytes) -> None:
    """Write a file, in place of what is there."""
    text = json.dumps(facts).encode()
    digest = hashlib.blake2b(digest_size=_N_CHECKSUM)
    with _replace.replacing(out, overwrite=True) as path, _replace.writing(path, out) as file:
        for part in (MAGIC, _NUMBERS.pack(VERSION, len(text)), text, data.data):
            digest.update(part)
            file.write(part)
        file.write(digest.digest())


def check_kind(file: Path) -> None:
    """Raise ModelLoadError for what save() did not write, by its first bytes."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise ModelLoadError(f"{file} is no file; give the path that save() wrote")
    with file.open("rb") as source:
        if source.read(len(MAGIC)) != MAGIC:
            raise ModelLoadError(f"{file} is none that save() wrote; give the path of one")


def read(file: Path) -> tuple[dict[str, Any], Bytes]:
    """Return the facts and the engine's bytes of a file that is whole.

    Raises:
        ModelLoadError: it is not, or is another kind of file.
        OSError: it cannot be read.
    """
    check_kind(file)
    with file.open("rb") as source:
        rest = os.fstat(source.fileno()).st_size - _N_CHECKSUM - len(MAGIC)
        source.seek(len(MAGIC))
        version, n_facts = _NUMBERS.unpack(source.read(_NUMBERS.size)) if rest >= _NUMBERS.size else (VERSION, 0)
        if version != VERSION:
            known = f"this package reads version {VERSION}"
            raise ModelLoadError(f"{file} has version {version}, {known}; save the text anew")
        # Before memory is taken for it: a file that is none may be of any size.
        if not _is_whole(source, rest):
            raise ModelLoadError(f"{file} is damaged or cut short: its checksum is wrong; save the text anew")
        source.seek(len(MAGIC) + _NUMBERS.size)
        n_bytes = rest - _NUMBERS.size - n_facts
        try:
            facts = json.loads(source.read(n_facts)) if n_bytes >= 0 else None
            if not isinstance(facts, dict) or not isinstance(facts["n_tokens"], int):
                raise ValueError
        except (ValueError, KeyError, RecursionError):
            raise ModelLoadError(f"{file} is damaged: it does not say what it holds; save the text anew") from None
        try:
            data = np.empty(n_bytes, np.uint8)
        except MemoryError:
            short = f"there is no memory for the {n_bytes >> 20} MiB that {file} holds"
            raise MemoryError(f"{short}; make room, or evaluate the text again") from None
        # One that is cut meanwhile is refused by the checksum of the engine's own.
        source.readinto(data.data)
    return facts, data


def _is_whole(source: BufferedReader, rest: int) -> bool:
    """Say whether the checksum after the rest of a file, MAGIC apart, is that of what is before it."""
    digest = hashlib.blake2b(MAGIC, digest_size=_N_CHECKSUM)
    source.seek(len(MAGIC))
    while rest > 0:
        part = source.read(min(rest, _PIECE))
        if not part:
            return False
        digest.update(part)
        rest -= len(part)
    return digest.digest() == source.read(_N_CHECKSUM)
