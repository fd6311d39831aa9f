"""Tables in Markdown, aligned for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, the others to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    shown = [
        "| "
        + " | ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        + " |"
        for line in lines
    ]
    rule = "| " + " | ".join("-" * w if not i else "-" * (w - 1) + ":" for i, w in enumerate(widths)) + " |"
    return "\n".join([shown[0], rule, *shown[1:]]) + "\n"
