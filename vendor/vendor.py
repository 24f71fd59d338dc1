"""Fetch, unpack and patch the pinned llama.cpp; write edits of the tree back into patches.

    python vendor/vendor.py sync     make vendor/llama.cpp match the lock and the patches (CMake runs this)
    python vendor/vendor.py export   write what you edited in vendor/llama.cpp into a patch
    python vendor/vendor.py check    fail if lock, patches and tree disagree

The tree remembers what it was made from in STAMP and carries its unpatched self in PRISTINE, so a changed patch
needs no network and rewrites only the files whose content changes: a rebuild compiles just those.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import udiff
from pinned import COMMAND, HERE, KEEP, Files, VendorError, fetch_sdist, pack, read_archive, read_lock, sha256, verify

PATCHES = HERE / "patches"
TREE = HERE / "llama.cpp"
STAMP, PRISTINE = ".vendor-stamp.json", ".pristine.tar.gz"
MAX_PATCHES = 8


def read_patches(upto: int | None = None) -> Files:
    """Return name -> text of the patches in order, up to the number given."""
    found = {path.name: path.read_bytes() for path in sorted(PATCHES.glob("[0-9][0-9][0-9][0-9]-*.patch"))}
    return {name: text for name, text in found.items() if upto is None or int(name[:4]) <= upto}


def _write(path: Path, data: bytes) -> None:
    """Replace a file whole: a reader or an interruption sees the old or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


def _source_key(keep: Sequence[str]) -> str:
    return sha256(json.dumps([read_lock(), list(keep)], sort_keys=True).encode())


def _as_text(patches: Files) -> dict[str, str]:
    return {name: text.decode("utf-8", "surrogateescape") for name, text in patches.items()}


def read_stamp(dest: Path) -> dict[str, Any] | None:
    try:
        stamp = json.loads((dest / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return stamp if isinstance(stamp, dict) else None


def _write_stamp(dest: Path, source: str, patches: Files, files: dict[str, str]) -> None:
    stamp = {"source": source, "commit": read_lock()["commit"], "patches": _as_text(patches), "files": files}
    _write(dest / STAMP, json.dumps(stamp, indent=0, sort_keys=True).encode())


def _pristine(dest: Path, source: str, keep: Sequence[str], archive: Path | None) -> Files:
    """Return the unpatched files: from the tree's own copy if it is of this source, else from the archive."""
    stamp, packed = read_stamp(dest), dest / PRISTINE
    if stamp and stamp["source"] == source and packed.exists():
        return read_archive(packed, "", keep)
    root = read_lock()["root"]
    if archive:
        return read_archive(verify(archive), root, keep)
    with tempfile.TemporaryDirectory() as folder:
        return read_archive(fetch_sdist(Path(folder)), root, keep)


# --- patches ------------------------------------------------------------------------------------------------------


def _stem(name: str) -> str:
    return name[: -len(".patch")]


def _parse(name: str, text: bytes) -> udiff.Patch:
    try:
        return udiff.parse(text)
    except udiff.PatchError as error:
        raise VendorError(f"vendor/patches/{name}: {error}\nnext: mend the file, then {COMMAND} sync") from None


def apply_patches(files: Files, patches: Files) -> Files:
    """Return files with the patches applied in order."""
    files = dict(files)
    for name, text in patches.items():
        for change in _parse(name, text).files:
            try:
                files[change.path] = udiff.apply_file(change, files.get(change.path))
            except udiff.PatchError as error:
                raise VendorError(
                    f"vendor/patches/{name} does not apply to {change.path}: {error}\n"
                    f"next: {COMMAND} sync --upto {int(name[:4]) - 1:04d}, make its change in vendor/llama.cpp, "
                    f"then {COMMAND} export {_stem(name)}"
                ) from None
    return files


def _rebased(name: str, text: bytes, old: Files, new: Files) -> bytes:
    """Return a patch made for the files in old, moved onto those in new."""
    patch, changes = _parse(name, text), []
    for change in patch.files:
        before = new.get(change.path)
        try:
            hunks = udiff.rebase(change.hunks, old.get(change.path, b""), before or b"")
            after = udiff.apply(before or b"", hunks)
        except udiff.PatchError as error:
            raise VendorError(
                f"vendor/patches/{name} no longer fits {change.path}: {error}\n"
                f"next: {COMMAND} sync --upto {int(name[:4]) - 1:04d}, make its change in vendor/llama.cpp, "
                f"then {COMMAND} export {_stem(name)}"
            ) from None
        changes.append(udiff.file_patch(change.path, before, after))
    return udiff.render(udiff.Patch(patch.message, tuple(changes)))


# --- sync ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _alone(dest: Path) -> Iterator[None]:
    """Let one process at a time write dest; the system drops the lock of a process that dies."""
    dest.parent.mkdir(parents=True, exist_ok=True)
    with dest.with_name(f".{dest.name}.busy").open("w", encoding="ascii") as handle:
        if os.name == "posix":  # elsewhere the rename at the end still keeps half a tree from being taken for one
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _current(dest: Path, source: str, patches: Files) -> bool:
    stamp = read_stamp(dest)
    if stamp is None or stamp["source"] != source:
        return False
    return bool(stamp["patches"] == _as_text(patches))


def sync(
    dest: Path = TREE,
    *,
    keep: Sequence[str] = KEEP,
    patched: bool = True,
    upto: int | None = None,
    archive: Path | None = None,
    force: bool = False,
) -> int:
    """Make dest the pinned source with the patches applied; return how many files were written.

    keep selects what to unpack (rules as in KEEP); patched=False leaves upstream as it is. Edited files are never
    overwritten unless force is set.
    """
    source, patches = _source_key(keep), read_patches(upto) if patched else {}
    if _current(dest, source, patches) and not force:
        return 0
    with _alone(dest):
        if _current(dest, source, patches) and not force:
            return 0
        pristine = _pristine(dest, source, keep, archive)
        wanted = apply_patches(pristine, patches)
        stamp = read_stamp(dest)
        if stamp is None:
            return _create(dest, pristine, wanted, source, patches, force)
        return _update(dest, stamp, pristine, wanted, source, patches, force)


def _create(dest: Path, pristine: Files, wanted: Files, source: str, patches: Files, force: bool) -> int:
    if dest.exists() and any(dest.iterdir()) and not force:
        raise VendorError(f"{dest} was not made by vendor.py\nnext: move it away, or {COMMAND} sync --force")
    for leftover in dest.parent.glob(f".{dest.name}.new-*"):
        shutil.rmtree(leftover)
    temporary = Path(tempfile.mkdtemp(prefix=f".{dest.name}.new-", dir=dest.parent))
    temporary.chmod(0o755)
    for name, data in wanted.items():
        path = temporary / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (temporary / PRISTINE).write_bytes(pack(pristine))
    _write_stamp(temporary, source, patches, {name: sha256(data) for name, data in wanted.items()})
    if dest.exists():
        shutil.rmtree(dest)
    temporary.rename(dest)
    return len(wanted)


def _update(
    dest: Path, stamp: dict[str, Any], pristine: Files, wanted: Files, source: str, patches: Files, force: bool
) -> int:
    have = read_tree(dest, set(stamp["files"]) | set(wanted))
    ours = [stamp["files"], stamp.get("torn", {})]
    edited = [
        name
        for name, data in have.items()
        if data != wanted.get(name) and sha256(data) not in [files.get(name) for files in ours]
    ]
    if edited and not force:
        raise VendorError(
            f"{dest} has edits that sync would overwrite: {', '.join(sorted(edited))}\n"
            f"next: keep them: {COMMAND} export, or {COMMAND} export NAME -m MESSAGE for a new patch;\n"
            f"      discard them: {COMMAND} sync --force;\n"
            f"      build them as they are: -DPYLLAMA_DFLASH_LLAMA_DIR={dest}"
        )
    changed = [name for name, data in wanted.items() if have.get(name) != data]
    # From here to the last line the tree is neither old nor new: the stamp matches no patches, and knows both contents.
    same_source = stamp["source"] == source
    torn = {**stamp, "source": source if same_source else "", "patches": {"interrupted": ""}}
    torn["torn"] = {name: sha256(wanted[name]) for name in changed}
    _write(dest / STAMP, json.dumps(torn).encode())
    if not same_source or not (dest / PRISTINE).exists():
        _write(dest / PRISTINE, pack(pristine))
    for name in changed:
        _write(dest / name, wanted[name])
    for name in set(have) - set(wanted):
        (dest / name).unlink()
    _write_stamp(dest, source, patches, {name: sha256(data) for name, data in wanted.items()})
    return len(changed)


def read_tree(dest: Path, names: set[str]) -> Files:
    return {name: (dest / name).read_bytes() for name in sorted(names) if (dest / name).is_file()}


# --- export and check ---------------------------------------------------------------------------------------------


def _target(name: str | None, synced: Files, disk: Files) -> str:
    """Name the patch that export writes: the last applied, the next in line, or a new one after all others."""
    last = max(synced, default="0000")
    if name is None and synced:
        return last
    after = sorted(other for other in disk if other > last)
    for known in ([last] if synced else []) + after[:1]:
        if name in (_stem(known), _stem(known)[5:]):
            return known
    if name is None or not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        raise VendorError(f"a new patch needs a NAME of a-z, 0-9 and -\nnext: {COMMAND} export NAME -m MESSAGE")
    if after:
        raise VendorError(
            f"a new patch goes last, but {after[0]} is not applied\n"
            f"next: {COMMAND} export (into {last}), then {COMMAND} sync"
        )
    return f"{int(last[:4]) + 1:04d}-{name}.patch"


def _untracked(dest: Path, known: set[str]) -> set[str]:
    names = {path.relative_to(dest).as_posix() for path in dest.rglob("*") if path.is_file()}
    return {name for name in names - known if not any(part.startswith(".") for part in name.split("/"))}


def export(name: str | None = None, message: str | None = None, dest: Path = TREE) -> list[str]:
    """Write the edits of dest into a patch, move later patches onto the result, and return the names written.

    The base is what dest was synced from, not what the patch files hold by now, so that edits can always be saved.
    """
    stamp = read_stamp(dest)
    if stamp is None or "interrupted" in stamp["patches"]:
        raise VendorError(f"{dest} is not a synced tree\nnext: {COMMAND} sync")
    synced = {key: text.encode("utf-8", "surrogateescape") for key, text in stamp["patches"].items()}
    disk = read_patches()
    target = _target(name, synced, disk)
    if target in synced and disk.get(target, synced[target]) != synced[target]:
        raise VendorError(
            f"both {target} and the tree were edited since the last sync\n"
            f"next: undo the edit of the patch file and {COMMAND} export, or {COMMAND} sync --force to drop the tree's"
        )
    if target not in disk and target not in synced and not message:
        raise VendorError(
            f"a new patch needs a message: why, and has upstream it?\nnext: {COMMAND} export {name} -m TEXT"
        )
    pristine = _pristine(dest, stamp["source"], KEEP, None)
    base = apply_patches(pristine, {key: text for key, text in synced.items() if key < target})
    tree = read_tree(dest, set(base) | _untracked(dest, set(base)))
    gone = sorted(set(base) - set(tree))
    if gone:
        raise VendorError(f"a patch cannot delete files: {', '.join(gone)}\nnext: {COMMAND} sync --force")
    changes = tuple(
        udiff.file_patch(path, base.get(path), data) for path, data in tree.items() if base.get(path) != data
    )
    if not changes:
        raise VendorError(
            f"the tree has nothing to write into {target}\nnext: edit {dest}, or delete the patch and sync"
        )
    header = message.encode() if message else _parse(target, disk.get(target) or synced[target]).message
    made = udiff.render(udiff.Patch(header, changes))
    written = _store(target, made, pristine, base, disk)
    stamp_files = {path: sha256(data) for path, data in tree.items()}
    _write_stamp(dest, stamp["source"], {**synced, target: made}, stamp_files)
    return written


def _store(target: str, made: bytes, pristine: Files, base: Files, disk: Files) -> list[str]:
    """Write target and, moved onto it, every later patch; stop at the first that no longer fits."""
    old = apply_patches(pristine, {key: text for key, text in disk.items() if key < target})
    texts = {target: _rebased(target, made, base, old)}
    new = apply_patches(old, texts)
    _write(PATCHES / target, texts[target])
    written = [target]
    if target in disk:
        old = apply_patches(old, {target: disk[target]})
    for name, text in disk.items():
        if name <= target:
            continue
        moved = _rebased(name, text, old, new)
        old, new = apply_patches(old, {name: text}), apply_patches(new, {name: moved})
        if moved != text:
            _write(PATCHES / name, moved)
            written.append(name)
    return written


def check(dest: Path = TREE) -> None:
    """Raise VendorError if lock, patches and tree disagree, or a patch is not as export would write it."""
    patches, problems = read_patches(), []
    if not _current(dest, _source_key(KEEP), patches):
        raise VendorError(f"{dest} is not made from this lock and these patches\nnext: {COMMAND} sync")
    if len(patches) > MAX_PATCHES:
        problems.append(f"{len(patches)} patches, at most {MAX_PATCHES} are allowed: move code into native/")
    problems += [f"{path.name}: not a patch" for path in sorted(PATCHES.iterdir()) if path.name not in patches]
    files = _pristine(dest, _source_key(KEEP), KEEP, None)
    for number, (name, text) in enumerate(patches.items(), 1):
        if not re.fullmatch(rf"{number:04d}-[a-z0-9-]+\.patch", name):
            problems.append(f"{name}: expected a name {number:04d}-WHAT-IT-DOES.patch")
        patch, after = _parse(name, text), apply_patches(files, {name: text})
        if not patch.message.strip():
            problems.append(f"{name}: starts with no message that says why")
        changes = tuple(udiff.file_patch(c.path, files.get(c.path), after[c.path]) for c in patch.files)
        if udiff.render(udiff.Patch(patch.message, changes)) != text:
            problems.append(f"{name}: not as export writes it")
        files = after
    tree = read_tree(dest, set(files) | _untracked(dest, set(files)))
    drift = sorted(name for name in set(tree) | set(files) if tree.get(name) != files.get(name))
    if drift:
        problems.append(f"{dest} differs from its patches: {', '.join(drift)}")
    if problems:
        raise VendorError("\n".join(problems) + f"\nnext: {COMMAND} export, or {COMMAND} sync --force")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("sync", help="make the tree match the lock and the patches")
    one.add_argument("--upto", metavar="NNNN", type=int, help="stop after this patch, so that it can be edited")
    one.add_argument("--archive", type=Path, help="use this copy of the source archive instead of downloading it")
    one.add_argument("--force", action="store_true", help="overwrite edited files")
    two = commands.add_parser("export", help="write the tree's edits into the last applied, the next, or a new patch")
    two.add_argument("name", nargs="?", metavar="NAME", help="a new patch's name, or the next patch's")
    two.add_argument("-m", "--message", help="the text at the patch's top: why, and whether upstream has it")
    commands.add_parser("check", help="exit 1 if lock, patches and tree disagree")
    options = parser.parse_args(arguments)
    try:
        if options.command == "sync":
            written = sync(upto=options.upto, archive=options.archive, force=options.force)
            print(f"vendor/llama.cpp: {written} files written" if written else "vendor/llama.cpp: up to date")
        elif options.command == "export":
            print("\n".join(f"wrote vendor/patches/{name}" for name in export(options.name, options.message)))
        else:
            check()
    except VendorError as error:
        print(f"vendor.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
