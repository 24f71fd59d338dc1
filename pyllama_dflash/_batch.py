"""A file of replies that grows line by line and can be gone on with, whenever its writer was killed.

Three rules make that safe. The state, a file beside the output, says what the output is made of; it is whole on the
disk before the first line is written, does not change, and goes when the last line is there. Line i of the output
belongs to prompt i of the input, so that counting lines says where to go on. A line ends with its line feed, which is
written last: what follows the last line feed was cut off and is made again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

from ._replace import Part, naming

_MARK = b'{"pyllama-dflash batch": 1, '  # what every state begins with; 1: its version
_SYNC_S = 2.0
AGAIN = "--restart to begin anew"


class Output:
    """The file of replies and its state, which is locked while this is open: nobody else writes the file meanwhile.

    After opening, n_lines says how many lines are there already, and n_failed how many of them have an error. Closed
    before the first write() nothing has changed; closed before finish() the next Output goes on where this ended.

    Lines are handed to the operating system one by one, so that a killed process loses none; they are on the disk
    every two seconds and at the end, so that a machine that loses power loses no more than that.

    Args:
        out: the file; a symbolic link is followed.
        made_of: what the lines depend on, in types that JSON has; "input" None: it cannot be read twice.
        restart: begin anew, whatever is there.

    Raises:
        OSError: another process is writing it, or it is there and was not begun by this command.
        ValueError: it was begun with something else; the message names what.
    """

    def __init__(self, out: Path, made_of: Mapping[str, Any], restart: bool = False) -> None:
        self.out = Path(os.path.realpath(out))
        self.state = state_of(out)
        self.n_lines = self.n_failed = 0
        self._n_bytes, self._synced = 0, monotonic()
        self._made_of: dict[str, Any] = json.loads(json.dumps(made_of))
        self._file: FileIO | None = None
        with ExitStack() as stack:
            self._lock = stack.enter_context(_locked(self.state, self.out))
            known = _read_state(self._lock, self.state)
            stack.callback(self._forget if known is None else lambda: None)
            if restart:
                known = None
            elif known == {}:
                raise ValueError(f"{self.state} is damaged; give another path, or {AGAIN}")
            elif known is not None:
                _check_same(known, self._made_of, self.out)
                self._count()
            elif self.out.exists() and self.out.stat().st_size:
                there = f"{self.out} is there already, finished or not of this command"
                raise FileExistsError(f"{there}; give another path, or {AGAIN}")
            self._resumes = known is not None
            self._left = stack.pop_all()

    def _begin(self) -> FileIO:
        """Make the place ready for the next line, once: what a killed writer left unfinished goes."""
        if self._file is not None:
            return self._file
        with naming(self.out):
            if not self._resumes:
                os.ftruncate(self._lock.fileno(), 0)  # first: no state may vouch for an output that it does not know
            self._file = self._left.enter_context(FileIO(self.out, "a"))
            os.ftruncate(self._file.fileno(), self._n_bytes)
        if not self._resumes:
            with naming(self.state):
                self._lock.seek(0)
                Part(self._lock, self.state).write(_MARK + json.dumps(self._made_of)[1:].encode() + b"\n")
                os.fsync(self._lock.fileno())
        _sync_folder(self.out.parent)
        return self._file

    def write(self, line: bytes, failed: bool = False) -> None:
        """Append a line, without its line feed.

        Raises:
            OSError: the disk is full, or the like; what was written before stays good.
        """
        file = self._begin()
        try:
            Part(file, self.out).write(line + b"\n")
            if monotonic() - self._synced >= _SYNC_S:
                os.fsync(file.fileno())
                self._synced = monotonic()
        except OSError as error:
            kept = f"its first {self.n_lines} lines are good; make room and run the same command again"
            raise OSError(f"{self.out} could not be written, {str(error.strerror).lower()}: {kept}") from error
        self.n_lines += 1
        self.n_failed += failed

    def finish(self) -> None:
        """All lines are there: let them reach the disk, and remove the state."""
        file = self._begin()
        with naming(self.out):
            os.fsync(file.fileno())
        self.state.unlink(missing_ok=True)

    def _count(self) -> None:
        """Count the lines that are there, and the bytes up to the last line feed."""
        if not self.out.exists():
            return
        with self.out.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    return
                found: Any = None
                with suppress(ValueError, RecursionError):
                    found = json.loads(line)
                if not isinstance(found, dict) or found.get("index") != self.n_lines:
                    where = f"line {self.n_lines + 1} of {self.out}"
                    raise ValueError(f"{where} is not the one that was written there; give another path, or {AGAIN}")
                self.n_lines += 1
                self.n_failed += "error" in found
                self._n_bytes += len(line)

    def _forget(self) -> None:
        if self._file is None:
            self.state.unlink(missing_ok=True)

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.close()


def state_of(out: Path) -> Path:
    """Return the path of the state of a file: beside it, where a symbolic link leads."""
    out = Path(os.path.realpath(out))
    return out.with_name(f"{out.name}.state")


def _locked(state: Path, out: Path) -> FileIO:
    """Open the state and lock it; its lock goes with the process, however that ends."""
    import fcntl  # only here: the other commands run where it is not

    while True:
        with naming(state), ExitStack() as stack:
            file = stack.enter_context(FileIO(os.open(state, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+"))
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                break
            with suppress(FileNotFoundError):
                # One that finished in between has removed the file that was opened here.
                if os.path.samestat(os.fstat(file.fileno()), state.stat()):
                    stack.pop_all()
                    return file
    raise OSError(f"another process is writing {out}; wait for it, or give another path")


def _read_state(file: FileIO, state: Path) -> dict[str, Any] | None:
    """Return what a state says: nothing if it is damaged; None if it is new, or its writer was killed too early."""
    raw = file.readall()
    if not (raw.startswith(_MARK) or _MARK.startswith(raw)):
        raise FileExistsError(f"{state} is there and is no state of this version; move it away, or give another path")
    if not raw.endswith(b"\n"):
        return None
    with suppress(ValueError, RecursionError):
        return dict(json.loads(raw))
    return {}


def _check_same(known: Mapping[str, Any], made_of: Mapping[str, Any], out: Path) -> None:
    if made_of["input"] is None or known.get("input") is None:
        raise ValueError(
            f"{out} is unfinished and its prompts came, or come, from stdin; give another path, or {AGAIN}"
        )
    for name, value in made_of.items():
        before = known.get(name)
        if value == before:
            continue
        if name in ("input", "target", "draft"):
            raise ValueError(f"{out} was begun with another {name}; give that, or {AGAIN}")
        if before is None:
            raise ValueError(f"{out} was begun without {name}={value}; leave it out, or {AGAIN}")
        this = "without it" if value is None else f"{name}={value}"
        raise ValueError(f"{out} was begun with {name}={before}, this is {this}; give that, or {AGAIN}")


def _sync_folder(folder: Path) -> None:
    """Let the names of new files reach the disk, where a folder can be asked that."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
