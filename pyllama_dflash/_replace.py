"""Write a file so that it is there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path


def check_place(out: Path, overwrite: bool, sources: Iterable[Path] = (), what: str = "") -> None:
    """Refuse a place where no file may be written.

    Args:
        out: where the file is to be.
        overwrite: whether a file that is there may be replaced.
        sources: files that it is made of.
        what: what they are.

    Raises:
        ValueError: it is one of them.
        OSError: it is there, or is no place for a file.
    """
    if out.is_dir():
        raise IsADirectoryError(f"{out} is a directory; give the path of the file to write")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {out.parent} for {out.name}; make it first")
    if not out.exists():
        return
    if any(source.exists() and out.samefile(source) for source in sources):
        raise ValueError(f"{out} is {what} itself; give another path")
    if not out.is_file():
        raise FileExistsError(f"{out} is there and is no file; give another path")
    if not overwrite:
        raise FileExistsError(f"{out} is there already; give another path, or overwrite=True to replace it")


class Part:
    """A file on its way: what fails while it is written names the file that it is to become."""

    def __init__(self, file: FileIO, out: Path) -> None:
        self._file, self._out = file, out

    def write(self, data: bytes | memoryview) -> None:
        """Write all of data."""
        with naming(self._out):
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]

    def tell(self) -> int:
        """Return the bytes written."""
        return self._file.tell()


@contextlib.contextmanager
def naming(out: Path) -> Iterator[None]:
    """Let an OSError name the file that is to be written."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(out)) from error


@contextlib.contextmanager
def replacing(out: Path, overwrite: bool) -> Iterator[Path]:
    """Give a path at which to write a file that takes its place at the end; after an exception nothing of it is left.

    A file that is replaced hands its permissions on: who may not read it, may not read the new one.

    Args:
        out: where the file is to be; its folder must be there. A symbolic link is followed.
        overwrite: whether a file that is there may be replaced.

    Yields:
        A path of the same name in a folder of its own beside the place, so that messages name the file by it.

    Raises:
        OSError: it cannot be written, or is there.
    """
    out = Path(os.path.realpath(out))
    check_place(out, overwrite)
    # The name is known before the folder is made: Ctrl-C may come at any point after.
    folder = out.parent / f".pyllama-dflash-{secrets.token_hex(8)}.part"
    path = folder / out.name
    try:
        with naming(out):
            folder.mkdir(mode=0o700)
        yield path
        with naming(out):
            with path.open("r+b") as file:
                os.fsync(file.fileno())
        check_place(out, overwrite)  # again: another program may have written it meanwhile
        with contextlib.suppress(OSError):  # there is none before, or the disk has no permissions
            path.chmod(stat.S_IMODE(out.stat().st_mode))
        with naming(out):
            path.replace(out)
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except KeyboardInterrupt:  # it must not stay for that
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def writing(path: Path, out: Path) -> Iterator[Part]:
    """Open the path that replacing() gave, to go on where it ends."""
    with naming(out):
        file = FileIO(path, "a")  # without a buffer, so that closing has nothing left that could fail
    with file:
        yield Part(file, out)
