"""Tables as text: Markdown for pages and terminals, and columns that stand below each other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def markdown(head: str | Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; `head` may be the titles in one text, with ` | ` between them."""
    titles = head.split(" | ") if isinstance(head, str) else head
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|" for cells in lines)


def columns(rows: Sequence[Sequence[str]], left: Collection[int] = (0, 1)) -> str:
    """Lines of cells; the columns whose numbers are in `left` are aligned left, others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = lambda n, cell: cell.ljust(widths[n]) if n in left else cell.rjust(widths[n])  # noqa: E731
    return "\n".join("  ".join(aligned(n, cell) for n, cell in enumerate(row)).rstrip() for row in rows)
