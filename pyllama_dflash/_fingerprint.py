"""Tell a model from another without reading all of it: what a saved text and a batch belong to."""

from __future__ import annotations

import hashlib
from pathlib import Path

_PIECE, _N_PIECES = 1 << 16, 64


def fingerprint(path: Path, n_header: int = 16 * _PIECE) -> str:
    """Return a file's size and a checksum of it, its header and pieces of its weights; its name does not count.

    Args:
        path: of a GGUF file.
        n_header: bytes that are read from its beginning. Most of a header by default; what is different in its rest
            moves the pieces.

    Raises:
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(n_header))
        for i in range(_N_PIECES):
            file.seek(max(0, size - _PIECE) * i // (_N_PIECES - 1))
            digest.update(file.read(_PIECE))
    return f"{size} bytes, {digest.hexdigest()[:32]}"
