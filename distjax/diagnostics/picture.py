"""Picture: an array cut into blocks, each with the devices that hold it."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence

_WIDTH, _ROW_HEIGHT, _MARGIN = 480, 44, 24
#: Light colors for black text; blocks cycle through them.
_COLORS = "#a6cee3 #b2df8a #fdbf6f #cab2d6 #fb9a99 #ffff99 #8dd3c7 #d9d9d9".split()


@dataclasses.dataclass(frozen=True)
class Block:
    """A rectangle of the array.

    Attributes:
      row: its position among the blocks, from the top.
      column: its position from the left.
      rows: (start, stop) along the vertical axis.
      columns: (start, stop) along the horizontal axis.
      label: the devices that hold it.
    """

    row: int
    column: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    label: str


@dataclasses.dataclass(frozen=True)
class Picture:
    """Where the parts of a value live. ``print`` it, or show it in a notebook.

    Attributes:
      caption: what is drawn.
      blocks: a full grid, row by row.
    """

    caption: str
    blocks: tuple[Block, ...]

    def __str__(self) -> str:
        grid = [[b.label for b in row] for row in self._grid()]
        widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
        rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
        lines = [self.caption, rule]
        for labels in grid:
            cells = (label.center(width) for label, width in zip(labels, widths, strict=True))
            lines += ["| " + " | ".join(cells) + " |", rule]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        grid = self._grid()
        width = _WIDTH / len(grid[0])
        height = _MARGIN + _ROW_HEIGHT * len(grid)
        labels = dict.fromkeys(block.label for block in self.blocks)
        colors = {label: _COLORS[i % len(_COLORS)] for i, label in enumerate(labels)}
        body = "".join(_rectangle(block, width, colors[block.label]) for block in self.blocks)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
            'font-family="sans-serif" font-size="12">'
            f'<text x="0" y="14">{html.escape(self.caption)}</text>{body}</svg>'
        )

    def _grid(self) -> Sequence[Sequence[Block]]:
        count = 1 + max(block.row for block in self.blocks)
        return [[b for b in self.blocks if b.row == row] for row in range(count)]


def _rectangle(block: Block, width: float, color: str) -> str:
    x, y = block.column * width, _MARGIN + block.row * _ROW_HEIGHT
    span = f"[{block.rows[0]}:{block.rows[1]}, {block.columns[0]}:{block.columns[1]}]"
    return (
        f'<rect x="{x:g}" y="{y}" width="{width:g}" height="{_ROW_HEIGHT}" fill="{color}" '
        f'stroke="black"><title>{span}</title></rect>'
        f'<text x="{x + width / 2:g}" y="{y + 26}" text-anchor="middle">'
        f"{html.escape(block.label)}</text>"
    )
