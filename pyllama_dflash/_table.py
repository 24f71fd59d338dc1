"""Tables of text."""

from __future__ import annotations

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]], right: bool = True) -> list[str]:
    """Align columns, the first to the left; a file's text cannot break a line or move the cursor."""
    cells = [[_printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = []
    for first, *rest in cells:
        others = [cell.rjust(width) if right else cell for cell, width in zip(rest, widths[1:])]
        lines.append("  ".join([first.ljust(widths[0]), *others]).rstrip())
    return lines


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "\ufffd" for c in text)
