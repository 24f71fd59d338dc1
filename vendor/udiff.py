"""Zero-context patches over bytes: parse, render, diff, apply, rebase.

Why not git or patch: neither is sure to be where a wheel is built, both are lenient, and zero-context hunks need the
opposite. Here a hunk lands on the exact line it names or not at all; the `index` line, which holds git's own blob
ids, proves that the file it lands in is the one it was made for.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from dataclasses import dataclass

NO_NEWLINE = b"\\ No newline at end of file\n"
NO_FILE = "0" * 10

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_INDEX = re.compile(rb"index ([0-9a-f]{10})\.\.([0-9a-f]{10})\n")


class PatchError(Exception):
    """A patch that cannot be read, or a hunk that does not fit the file it names."""


@dataclass(frozen=True)
class Hunk:
    start: int  # index of the first removed line, or of the line the added ones go before; counted from 0
    removed: tuple[bytes, ...]
    added: tuple[bytes, ...]

    @property
    def where(self) -> str:
        return f"at line {self.start + 1}"


@dataclass(frozen=True)
class FilePatch:
    path: str
    before: str | None  # short blob id; NO_FILE: the patch creates the file; None: the patch has no index line
    after: str | None
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True)
class Patch:
    message: bytes
    files: tuple[FilePatch, ...]


def split_lines(data: bytes) -> list[bytes]:
    """Split at newlines only; bytes.splitlines would also split at a lone carriage return."""
    lines = data.split(b"\n")
    last = lines.pop()
    return [line + b"\n" for line in lines] + ([last] if last else [])


def blob_id(data: bytes | None) -> str:
    if data is None:
        return NO_FILE
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()[:10]


def diff(old: bytes, new: bytes) -> tuple[Hunk, ...]:
    """Return the hunks that turn old into new."""
    a, b = split_lines(old), split_lines(new)
    matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
    return tuple(
        Hunk(i1, tuple(a[i1:i2]), tuple(b[j1:j2])) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal"
    )


def file_patch(path: str, old: bytes | None, new: bytes) -> FilePatch:
    return FilePatch(path, blob_id(old), blob_id(new), diff(old or b"", new))


def apply(old: bytes, hunks: tuple[Hunk, ...]) -> bytes:
    """Return old with the hunks applied, each exactly where it says; raise PatchError on the first that differs."""
    lines, out, at = split_lines(old), [], 0
    for number, hunk in enumerate(hunks, 1):
        stop = hunk.start + len(hunk.removed)
        if hunk.start < at or stop > len(lines):
            raise PatchError(f"hunk {number} {hunk.where}: outside the file or out of order")
        if tuple(lines[hunk.start : stop]) != hunk.removed:
            raise PatchError(f"hunk {number} {hunk.where}: the lines it removes are not there")
        out += lines[at : hunk.start]
        out += hunk.added
        at = stop
    return b"".join(out + lines[at:])


def apply_file(change: FilePatch, old: bytes | None) -> bytes:
    """Apply one file's part; the index line catches a shifted insertion, which removes no line to compare."""
    if change.before == NO_FILE and old is not None:
        raise PatchError("the patch creates this file, but it exists")
    if change.before != NO_FILE and old is None:
        raise PatchError("no such file")
    new = apply(old or b"", change.hunks)
    if change.before is not None and change.before != blob_id(old):
        raise PatchError(f"made for blob {change.before}, found {blob_id(old)}: line numbers cannot be trusted")
    return new


def rebase(hunks: tuple[Hunk, ...], old: bytes, new: bytes) -> tuple[Hunk, ...]:
    """Move hunks made for old to the same lines in new; raise PatchError where a change of old touches them."""
    changes, moved = diff(old, new), []
    for number, hunk in enumerate(hunks, 1):
        stop, shift = hunk.start + len(hunk.removed), 0
        for change in changes:
            change_stop = change.start + len(change.removed)
            if change_stop < hunk.start or (change_stop == hunk.start and change.removed and hunk.removed):
                shift += len(change.added) - len(change.removed)
            elif change.start < stop or (change.start == stop and not (change.removed and hunk.removed)):
                raise PatchError(f"hunk {number} {hunk.where}: its place was changed by an earlier patch")
        moved.append(Hunk(hunk.start + shift, hunk.removed, hunk.added))
    return tuple(moved)


def _span(start: int, count: int) -> bytes:
    # The format counts from 1, names the line before an empty range, and leaves a count of 1 out.
    first = start + 1 if count else start
    return b"%d" % first if count == 1 else b"%d,%d" % (first, count)


def _marked(mark: bytes, lines: tuple[bytes, ...]) -> bytes:
    return b"".join(mark + (line if line.endswith(b"\n") else line + b"\n" + NO_NEWLINE) for line in lines)


def render(patch: Patch) -> bytes:
    """Return the patch as text: equal patches give equal bytes, with no dates and no tool names."""
    out = [patch.message.rstrip(b"\n") + b"\n\n"]
    for change in sorted(patch.files, key=lambda f: f.path):
        name = change.path.encode()
        if change.before is not None and change.after is not None:
            out.append(b"index %s..%s\n" % (change.before.encode(), change.after.encode()))
        out.append(b"--- a/%s\n" % name if change.before != NO_FILE else b"--- /dev/null\n")
        out.append(b"+++ b/%s\n" % name)
        shift = 0
        for hunk in change.hunks:
            n_old, n_new = len(hunk.removed), len(hunk.added)
            out.append(b"@@ -%s +%s @@\n" % (_span(hunk.start, n_old), _span(hunk.start + shift, n_new)))
            out += [_marked(b"-", hunk.removed), _marked(b"+", hunk.added)]
            shift += n_new - n_old
    return b"".join(out)


class _Reader:
    def __init__(self, text: bytes) -> None:
        self.lines, self.at = split_lines(text), 0

    def peek(self) -> bytes:
        return self.lines[self.at] if self.at < len(self.lines) else b""

    def take(self) -> bytes:
        line = self.peek()
        self.at += 1
        return line

    def bad(self, what: str) -> PatchError:
        return PatchError(f"line {self.at + 1}: {what}")

    def side(self, mark: bytes, count: int) -> tuple[bytes, ...]:
        out = []
        for _ in range(count):
            if self.peek()[:1] != mark:
                raise self.bad(f"expected a line that starts with {mark.decode()!r} (context lines are not allowed)")
            out.append(self.take()[1:])
        if out and self.peek() == NO_NEWLINE:
            self.take()
            out[-1] = out[-1][:-1]
        return tuple(out)


def _parse_path(line: bytes) -> str:
    path = line[6:].rstrip(b"\n").decode()
    if path.startswith("/") or ".." in path.split("/") or "\\" in path or ":" in path:
        raise PatchError(f"unsafe path {path!r}")
    return path


def _parse_file(read: _Reader) -> FilePatch:
    before = after = None
    index = _INDEX.fullmatch(read.peek())
    if index:
        before, after = index[1].decode(), index[2].decode()
        read.take()
    old, new = read.take(), read.take()
    creates = old == b"--- /dev/null\n"
    if not (creates or old.startswith(b"--- a/")) or not new.startswith(b"+++ b/"):
        raise read.bad("expected '--- a/PATH' and '+++ b/PATH'")
    path = _parse_path(new)
    if not creates and _parse_path(old) != path:
        raise read.bad("a patch cannot rename a file")
    if creates:
        before = NO_FILE
    hunks = []
    while read.peek().startswith(b"@@ "):
        head = _HUNK.match(read.peek())
        if not head:
            raise read.bad("malformed hunk header")
        read.take()
        first, n_old, n_new = int(head[1]), int(head[2] or 1), int(head[4] or 1)
        hunks.append(Hunk(first - 1 if n_old else first, read.side(b"-", n_old), read.side(b"+", n_new)))
    if not hunks:
        raise read.bad("expected a hunk header")
    return FilePatch(path, before, after, tuple(hunks))


def parse(text: bytes) -> Patch:
    """Read a patch: free text up to the first file, then files and hunks and nothing else."""
    read, message, files = _Reader(text), [], []
    while (
        read.peek() and not _INDEX.fullmatch(read.peek()) and not read.peek().startswith((b"--- a/", b"--- /dev/null"))
    ):
        message.append(read.take())
    while read.peek():
        files.append(_parse_file(read))
    if not files:
        raise PatchError("changes no file")
    return Patch(b"".join(message).strip(b"\n") + b"\n", tuple(files))
