"""Tables for distjax's reports, as aligned text and as HTML for notebooks."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Table:
    """A caption followed by rows of text. ``print`` it, or show it in a notebook.

    Attributes:
      caption: the line above the rows.
      header: the column names; () omits them.
      rows: the cells, row by row.
    """

    caption: str
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()

    def __str__(self) -> str:
        return as_text([self])

    __repr__ = __str__  # what a prompt shows

    def _repr_html_(self) -> str:
        return as_html([self])


def as_text(tables: Sequence[Table]) -> str:
    """Returns the tables one below another, with columns aligned.

    Example:
      >>> print(as_text([Table("Sizes:", ("name", "bytes"), (("w", "8 B"), ("bias", "4 B")))]))
      Sizes:
        name  bytes
        w     8 B
        bias  4 B
    """
    return "\n".join(line for table in tables for line in _lines(table))


def _lines(table: Table) -> list[str]:
    rows = [table.header, *table.rows] if table.header else list(table.rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return [table.caption, *("  " + line.rstrip() for line in padded)]


def as_html(tables: Sequence[Table]) -> str:
    """Returns the tables as HTML, with all text escaped and the lines of arrays kept apart.

    Example:
      >>> as_html([Table("a < b", (), (("x", "1"),))])
      "<table><caption>a &lt; b</caption><tbody style='white-space:pre-wrap'>..."
    """
    return "".join(_html(table) for table in tables)


def _html(table: Table) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in table.rows
    )
    head = f"<thead><tr>{head}</tr></thead>" if head else ""
    caption = f"<caption>{html.escape(table.caption)}</caption>"
    return f"<table>{caption}{head}<tbody style='white-space:pre-wrap'>{body}</tbody></table>"


def format_bytes(count: float) -> str:
    """Returns a number of bytes in human-readable form.

    Example:
      >>> format_bytes(12), format_bytes(1536), format_bytes(3 * 2**30)
      ('12 B', '1.5 KiB', '3.0 GiB')
    """
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"
