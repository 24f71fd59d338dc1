"""vendor/vendor.py on a tiny source archive made here: no network, no llama.cpp."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pinned
import pytest

import vendor

SOURCE = {
    "CMakeLists.txt": b"project(x)\n",
    "src/a.c": b"one\ntwo\nthree\nfour\nfive\n",
    "src/b.c": b"int b;\n",
    "docs/left-out.md": b"not for the build\n",
}


class Sandbox:
    """A vendor folder of its own; `fetches` counts the downloads."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tree, self.patches, self.fetches = folder, folder / "llama.cpp", folder / "patches", 0
        self.archive = folder / "fake-1.0.tar.gz"
        self.patches.mkdir(parents=True)
        self.pack(SOURCE)

    def pack(self, files: dict[str, bytes], kind: bytes = tarfile.REGTYPE) -> None:
        with tarfile.open(self.archive, "w:gz") as tar:
            for name, data in files.items():
                info = tarfile.TarInfo(f"fake-1.0/{name}")
                info.size, info.type, info.linkname = len(data), kind, "/etc/passwd"
                tar.addfile(info, io.BytesIO(data))
        digest = hashlib.sha256(self.archive.read_bytes()).hexdigest()
        lock = f"package = fake\nversion = 1.0\nsha256 = {digest}\ncommit = {'0' * 40}\nroot = fake-1.0\n"
        (self.folder / "llama.cpp.lock").write_text(lock)

    def fetch(self, folder: Path) -> Path:
        self.fetches += 1
        return pinned.verify(self.archive)

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.tree / name
        path.write_text(path.read_text().replace(old, new))

    def ages(self) -> dict[str, int]:
        return {name: (self.tree / name).stat().st_mtime_ns for name in SOURCE if (self.tree / name).exists()}

    def sync(self, **options: object) -> int:
        return vendor.sync(self.tree, **options)  # type: ignore[arg-type]

    def export(self, name: str | None = None, message: str | None = None) -> list[str]:
        return vendor.export(name, message, self.tree)

    def text(self, name: str) -> str:
        return (self.tree / name).read_text()


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    made = Sandbox(tmp_path / "vendor")
    monkeypatch.setattr(pinned, "LOCK", made.folder / "llama.cpp.lock")
    monkeypatch.setattr(vendor, "PATCHES", made.patches)
    monkeypatch.setattr(vendor, "fetch_sdist", made.fetch)
    return made


@pytest.fixture
def patched(box: Sandbox) -> Sandbox:
    """Two patches of one file and one of another, all applied."""
    box.sync()
    for name, file, old, new in (("first", "src/a.c", "two\n", "two\n2\n"), ("second", "src/a.c", "five", "5"),
                                 ("third", "src/b.c", "int", "long")):  # fmt: skip
        box.edit(file, old, new)
        box.export(name, f"Why {name}.")
    return box


def test_sync_unpacks_only_what_is_kept(box: Sandbox) -> None:
    assert box.sync() == 3
    assert {p.relative_to(box.tree).as_posix() for p in box.tree.rglob("*") if p.is_file()} == {
        "CMakeLists.txt", "src/a.c", "src/b.c", vendor.STAMP, vendor.PRISTINE,
    }  # fmt: skip


def test_second_sync_does_nothing(patched: Sandbox) -> None:
    ages, fetches = patched.ages(), patched.fetches
    assert patched.sync() == 0
    assert (patched.ages(), patched.fetches) == (ages, fetches)


def test_fresh_sync_equals_the_exported_tree(patched: Sandbox) -> None:
    other = patched.folder / "other"
    vendor.sync(other)
    for name in ("src/a.c", "src/b.c", "CMakeLists.txt"):
        assert (other / name).read_bytes() == (patched.tree / name).read_bytes()
    assert patched.text("src/a.c") == "one\ntwo\n2\nthree\nfour\n5\n"
    vendor.check(other)


def test_changed_patch_rewrites_only_the_files_it_touches(patched: Sandbox) -> None:
    path = patched.patches / "0003-third.patch"
    path.write_bytes(path.read_bytes().replace(b"+long", b"+short"))
    ages, fetches = patched.ages(), patched.fetches
    assert patched.sync() == 1
    changed = {name for name, age in patched.ages().items() if age != ages[name]}
    assert changed == {"src/b.c"}
    assert patched.fetches == fetches, "the tree's own pristine copy should have been used"
    assert patched.text("src/b.c") == "short b;\n"


def test_removed_patch_is_undone(patched: Sandbox) -> None:
    (patched.patches / "0003-third.patch").unlink()
    assert patched.sync() == 1
    assert patched.text("src/b.c") == "int b;\n"


def test_edited_file_is_not_overwritten_unless_forced(patched: Sandbox) -> None:
    patched.edit("CMakeLists.txt", "x", "mine")
    (patched.patches / "0003-third.patch").unlink()
    with pytest.raises(vendor.VendorError, match=r"(?s)CMakeLists\.txt.*export.*sync --force"):
        patched.sync()
    assert patched.text("CMakeLists.txt") == "project(mine)\n"
    assert patched.text("src/b.c") == "long b;\n", "a refused sync must change nothing"
    patched.sync(force=True)
    assert patched.text("CMakeLists.txt") == "project(x)\n"


@pytest.mark.parametrize("back", [False, True])
def test_interrupted_sync_is_finished_by_the_next(
    patched: Sandbox, monkeypatch: pytest.MonkeyPatch, back: bool
) -> None:
    whole, texts = (patched.text("src/a.c"), patched.text("src/b.c")), vendor.read_patches()
    for name in texts:
        (patched.patches / name).unlink()
    real = Path.replace

    def die(source: Path, target: Path) -> Path:
        if target.name == "b.c":
            raise KeyboardInterrupt
        return real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            patched.sync()
    assert patched.text("src/a.c") != whole[0], "the interruption should fall between the two files"
    if back:  # the stamp from before the torn sync would match these patches
        for name, text in texts.items():
            (patched.patches / name).write_bytes(text)
    patched.sync()
    plain = (SOURCE["src/a.c"].decode(), SOURCE["src/b.c"].decode())
    assert (patched.text("src/a.c"), patched.text("src/b.c")) == (whole if back else plain)


def test_interrupted_first_sync_leaves_no_tree(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(vendor, "pack", lambda files: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            box.sync()
    assert not box.tree.exists()
    assert box.sync() == 3
    assert not list(box.folder.glob(".llama.cpp.new-*")), "the half tree is cleared away"


def test_conflict_names_patch_file_hunk_and_next_command(patched: Sandbox) -> None:
    path = patched.patches / "0002-second.patch"
    path.write_bytes(path.read_bytes().replace(b"-five", b"-six"))
    expected = r"(?s)0002-second.*src/a\.c.*hunk 1.*sync --upto 0001.*export 0002-second"
    with pytest.raises(vendor.VendorError, match=expected):
        patched.sync()


def test_exporting_an_earlier_patch_moves_the_later_ones(patched: Sandbox) -> None:
    patched.sync(upto=1)
    assert patched.text("src/a.c") == "one\ntwo\n2\nthree\nfour\nfive\n"
    patched.edit("src/a.c", "2\n", "2\n2b\n2c\n")
    assert patched.export() == ["0001-first.patch", "0002-second.patch"]
    patched.sync()
    assert patched.text("src/a.c") == "one\ntwo\n2\n2b\n2c\nthree\nfour\n5\n"
    vendor.check(patched.tree)


def test_export_keeps_the_message_and_is_stable(patched: Sandbox) -> None:
    path = patched.patches / "0003-third.patch"
    before = path.read_bytes()
    patched.edit("src/b.c", "long", "short")
    patched.export()
    assert path.read_bytes().startswith(b"Why third.\n\n")
    patched.edit("src/b.c", "short", "long")
    patched.export()
    assert path.read_bytes() == before


def test_export_refuses_when_patch_file_and_tree_were_both_edited(patched: Sandbox) -> None:
    path = patched.patches / "0003-third.patch"
    path.write_bytes(path.read_bytes().replace(b"+long", b"+short"))
    patched.edit("src/b.c", "long", "float")
    with pytest.raises(vendor.VendorError, match=r"both 0003-third\.patch and the tree"):
        patched.export()


def test_export_into_a_new_patch_needs_name_message_and_all_others(patched: Sandbox) -> None:
    patched.edit("src/b.c", "b", "c")
    with pytest.raises(vendor.VendorError, match="needs a message"):
        patched.export("fourth")
    patched.export("fourth", "Why fourth.")
    patched.sync(upto=2)
    patched.edit("src/b.c", "b", "d")
    with pytest.raises(vendor.VendorError, match=r"0003-third\.patch is not applied"):
        patched.export("fifth", "Why fifth.")


def test_patch_may_create_a_file(patched: Sandbox) -> None:
    (patched.tree / "src/new.h").write_text("#pragma once\n")
    patched.export("fourth", "Why fourth.")
    patched.sync(upto=3)
    assert not (patched.tree / "src/new.h").exists()
    patched.sync()
    assert patched.text("src/new.h") == "#pragma once\n"
    vendor.check(patched.tree)


def break_tree(box: Sandbox) -> None:
    box.edit("src/b.c", "b", "drift")


def break_patch(box: Sandbox) -> None:
    path = box.patches / "0003-third.patch"
    path.write_bytes(path.read_bytes().replace(b"Why third.\n\n", b"Why third.\n\n\n"))
    box.sync()


def break_message(box: Sandbox) -> None:
    path = box.patches / "0003-third.patch"
    path.write_bytes(path.read_bytes().replace(b"Why third.\n\n", b""))
    box.sync()


def break_number(box: Sandbox) -> None:
    (box.patches / "0003-third.patch").rename(box.patches / "0007-third.patch")
    box.sync()


def break_limit(box: Sandbox) -> None:
    for number in range(4, vendor.MAX_PATCHES + 2):
        box.edit("CMakeLists.txt", "\n", "\n\n")
        box.export(f"more-{number}", "Why.")


def test_check_accepts_a_synced_tree(patched: Sandbox) -> None:
    vendor.check(patched.tree)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (break_tree, "differs from its patches: src/b.c"),
        (break_patch, "not as export writes it"),
        (break_message, "no message"),
        (break_number, "expected a name 0003-"),
        (break_limit, "9 patches"),
        (lambda box: (box.patches / "0003-third.patch").unlink(), "sync"),
    ],
)
def test_check_finds(patched: Sandbox, damage: object, problem: str) -> None:
    damage(patched)  # type: ignore[operator]
    with pytest.raises(vendor.VendorError, match=problem):
        vendor.check(patched.tree)


def test_wrong_hash_is_refused(box: Sandbox) -> None:
    box.archive.write_bytes(box.archive.read_bytes() + b"x")
    with pytest.raises(vendor.VendorError, match="sha256 is"):
        box.sync()
    assert not box.tree.exists()


def test_links_and_parent_folders_in_the_archive_are_not_followed(box: Sandbox) -> None:
    box.pack({"src/link.c": b""}, kind=tarfile.SYMTYPE)
    with pytest.raises(vendor.VendorError, match="nothing to keep"):
        box.sync()
    box.pack({"src/../../../escaped.c": b"x"})
    with pytest.raises(vendor.VendorError, match="unsafe name"):
        box.sync()


def test_foreign_folder_is_not_replaced(box: Sandbox) -> None:
    box.tree.mkdir()
    (box.tree / "mine.txt").write_text("mine")
    with pytest.raises(vendor.VendorError, match="was not made by"):
        box.sync()
    assert (box.tree / "mine.txt").exists()


def test_unpatched_sync_keeps_what_it_is_told_to(patched: Sandbox) -> None:
    other = patched.folder / "upstream"
    vendor.sync(other, keep=("docs/", "src/"), patched=False)
    assert (other / "docs/left-out.md").exists()
    assert (other / "src/b.c").read_bytes() == SOURCE["src/b.c"]
    assert not (other / "CMakeLists.txt").exists()
