"""Tell a model from another without reading all of it: what a saved text and a batch belong to."""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_PIECE, _N_PIECES = 1 << 16, 64
_FIRST = re.compile(r"(.*)-00001-of-(\d{5})\.gguf", re.DOTALL)  # as llama.cpp names the parts of a file


class Source(NamedTuple):
    """Where a model's file was when it was opened, and what tells it from one that has taken its place since."""

    path: Path
    mark: tuple[int, ...] | None

    @classmethod
    def of(cls, path: str) -> Source:
        """Return that of a file, there or not."""
        with suppress(OSError, ValueError):
            found = Path(path).absolute()  # another folder may be the current one later
            return cls(found, _mark(found))
        return cls(Path(path), None)

    def found(self) -> Path:
        """Return the path of the same file; OSError if it is gone, changed or replaced."""
        if _mark(self.path) != self.mark:
            raise OSError(f"{self.path} was changed or replaced since it was opened; open the model again")
        return self.path


def _mark(path: Path) -> tuple[int, ...]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def fingerprint(path: Path, n_header: int = 16 * _PIECE) -> str:
    """Return a file's size and a checksum of it, its header and pieces of its weights; its name does not count.

    Args:
        path: of a GGUF file. Of the first of several that are one model, all are meant.
        n_header: bytes that are read from its beginning. Most of a header by default; what is different in its rest
            moves the pieces.

    Raises:
        OSError: it cannot be read.
    """
    files = _parts(path)
    sizes = [file.stat().st_size for file in files]
    digest = hashlib.sha256(str(sum(sizes)).encode())
    for part, size in zip(files, sizes):
        with part.open("rb") as file:
            digest.update(file.read(n_header))
            for i in range(_N_PIECES):
                file.seek(max(0, size - _PIECE) * i // (_N_PIECES - 1))
                digest.update(file.read(_PIECE))
    return f"{sum(sizes)} bytes, {digest.hexdigest()[:32]}"


def _parts(path: Path) -> list[Path]:
    found = _FIRST.fullmatch(path.name)
    if found is None:
        return [path]
    others = (f"{found[1]}-{i:05}-of-{found[2]}.gguf" for i in range(2, int(found[2]) + 1))
    return [path, *(part for part in map(path.with_name, others) if part.is_file())]
