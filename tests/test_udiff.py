"""Laws of vendor/udiff.py: what diff writes, parse and apply give back, and nothing lands where it does not fit."""

from __future__ import annotations

import pytest
import udiff
from hypothesis import assume, given
from hypothesis import strategies as st

LINE = st.sampled_from(
    [b"a", b"b", b"}", b"", b"--- a/x", b"+++ b/x", b"@@ -1 +1 @@", b"\\ No newline", b"c\r", b"\xff"]
)
TEXT = st.builds(lambda lines, end: b"\n".join(lines) + end, st.lists(LINE, max_size=12), st.sampled_from([b"", b"\n"]))


def patch_of(old: bytes | None, new: bytes) -> udiff.Patch:
    return udiff.Patch(b"Why.\n", (udiff.file_patch("dir/file.c", old, new),))


@given(TEXT, TEXT)
def test_diff_then_apply_gives_the_new_text(old: bytes, new: bytes) -> None:
    assert udiff.apply(old, udiff.diff(old, new)) == new


@given(st.none() | TEXT, TEXT)
def test_parse_undoes_render(old: bytes | None, new: bytes) -> None:
    assume((old or b"") != new)
    patch = patch_of(old, new)
    text = udiff.render(patch)
    assert udiff.parse(text) == patch
    assert udiff.render(udiff.parse(text)) == text


@given(TEXT, TEXT)
def test_no_context_line_is_written(old: bytes, new: bytes) -> None:
    assume(old != new)
    body = udiff.render(patch_of(old, new)).partition(b"+++ b/dir/file.c\n")[2]
    assert all(line[:1] in (b"@", b"+", b"-", b"\\") for line in udiff.split_lines(body))


@given(TEXT, TEXT, TEXT)
def test_a_patch_never_lands_in_another_file(old: bytes, new: bytes, other: bytes) -> None:
    assume(old != new and other != old)
    change = udiff.parse(udiff.render(patch_of(old, new))).files[0]
    with pytest.raises(udiff.PatchError):
        udiff.apply_file(change, other)


@given(st.lists(st.integers(0, 3), min_size=6, max_size=20), st.data())
def test_rebase_commutes_with_an_edit_elsewhere(body: list[int], data: st.DataObject) -> None:
    lines = [b"%d %d\n" % pair for pair in enumerate(body)]  # the number makes lines unique, so a place means one line
    cut = data.draw(st.integers(2, len(lines) - 3))
    near, far = data.draw(st.integers(0, cut - 2)), data.draw(st.integers(cut + 1, len(lines) - 1))
    added = data.draw(st.lists(LINE.map(lambda line: line + b"\n"), max_size=3))
    edit = lambda src, at, put: src[:at] + put + src[at + 1 :]  # noqa: E731
    old = b"".join(lines)
    first = b"".join(edit(lines, near, added))
    second = udiff.diff(old, b"".join(edit(lines, far, [b"new\n"])))
    both = b"".join(edit(edit(lines, far, [b"new\n"]), near, added))
    assert udiff.apply(first, udiff.rebase(second, old, first)) == both


def test_rebase_refuses_a_line_that_an_earlier_patch_changed() -> None:
    hunks = udiff.diff(b"a\nb\nc\n", b"a\nB\nc\n")
    with pytest.raises(udiff.PatchError, match="hunk 1 at line 2"):
        udiff.rebase(hunks, b"a\nb\nc\n", b"a\nx\nc\n")


def test_apply_names_the_hunk_that_does_not_fit() -> None:
    hunks = udiff.diff(b"a\nb\nc\nd\n", b"A\nb\nc\nD\n")
    with pytest.raises(udiff.PatchError, match="hunk 2 at line 4: the lines it removes are not there"):
        udiff.apply(b"a\nb\nc\nx\n", hunks)


def test_a_shifted_insertion_is_caught_by_the_index_line() -> None:
    change = udiff.file_patch("f", b"a\nb\n", b"a\nnew\nb\n")
    assert not change.hunks[0].removed
    with pytest.raises(udiff.PatchError, match="line numbers cannot be trusted"):
        udiff.apply_file(change, b"zero\na\nb\n")


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "a\\x", "c:x"])
def test_parse_refuses_a_path_outside_the_tree(path: str) -> None:
    text = f"Why.\n\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-a\n+b\n".encode()
    with pytest.raises(udiff.PatchError, match="unsafe path"):
        udiff.parse(text)


def test_parse_refuses_context_lines() -> None:
    with pytest.raises(udiff.PatchError, match="context lines are not allowed"):
        udiff.parse(b"Why.\n\n--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n-a\n+b\n c\n")
