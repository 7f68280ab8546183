"""Tables of plain text, for terminals and for Markdown files alike."""

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def format_table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """The rows as an aligned Markdown table.

    Args:
      rows: One mapping per row; a column that a row lacks is left empty.
      columns: The keys to show, in order. They are the headings.

    Returns:
      One line per row, below a heading and a rule.

    Example:
      >>> print(format_table([{"model": "MLP", "ratio": 1.0}], ["model", "ratio"]))
      | model | ratio |
      |-------|------:|
      | MLP   | 1.000 |
    """
    cells = [[format_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(columns, *cells, strict=True)]
    numeric = [_is_numeric(rows, column) for column in columns]
    lines = [_line(line, widths, numeric) for line in [list(columns), *cells]]
    return "\n".join([lines[0], _rule(widths, numeric), *lines[1:]])


def format_cell(value: Any) -> str:
    """One value as text: small floats with three decimals, counts with commas.

    Example:
      >>> format_cell(1.2345), format_cell(12.345), format_cell(1234567)
      ('1.234', '12.3', '1,234,567')
      >>> format_cell(True), format_cell(None)
      ('yes', '')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _is_numeric(rows: Sequence[Row], column: str) -> bool:
    values = [row[column] for row in rows if row.get(column) is not None]
    return bool(values) and all(isinstance(value, int | float) for value in values)


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    aligned = [
        cell.rjust(width) if right else cell.ljust(width)
        for cell, width, right in zip(cells, widths, numeric, strict=True)
    ]
    return f"| {' | '.join(aligned)} |"


def _rule(widths: Sequence[int], numeric: Sequence[bool]) -> str:
    rules = [
        "-" * (width + 1) + (":" if right else "-")
        for width, right in zip(widths, numeric, strict=True)
    ]
    return f"|{'|'.join(rules)}|"
