"""A report that fits a screen: what is alike shares a line, modules stand for what is in them."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

from distjax._src.tables import Table, as_text

_T = TypeVar("_T")

#: A text of no more lines than this is shown whole.
MOST_LINES = 50
#: How many lines each table of a shorter text has.
MOST_ROWS = 8
_REASON_WIDTH = 54
_PART = re.compile(r"\.?[^.\[]+|\.?\[[^\]]*\]")
_FOLDER = re.compile(r"\S*[/\\](?=[^/\\\s]+:\d+ )")
#: The number of a layer: not that of a result, or of one of ``*args``, which comes first.
_NUMBER = re.compile(r"(?<=.[.\[])(?<!^args\[)\d+(?=[.\]]|$)")


def fits_screen(tables: Sequence[Table]) -> bool:
    """Returns whether the text of the tables has few enough lines."""
    return as_text(tables).count("\n") < MOST_LINES


def group_by(values: Iterable[_T], key: Callable[[_T], Hashable]) -> list[list[_T]]:
    """Returns the values in groups of equal keys, in the order of their first ones."""
    groups: dict[Hashable, list[_T]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return list(groups.values())


def first_rows(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Returns the rows that there is room for, and one that counts the others."""
    if len(rows) <= MOST_ROWS:
        return tuple(rows)
    more = (f"and {len(rows) - MOST_ROWS + 1} more", *("" for _ in rows[0][1:]))
    return (*rows[: MOST_ROWS - 1], more)


def name_together(names: Sequence[str], others: Iterable[str], width: int = 30) -> str:
    """Returns a short text for several paths: the modules of which nothing is in `others`.

    Example:
      >>> name_together(["model.a.w", "model.a.b", "model.c.w"], ["model.c.b"])
      'model.a (2), model.c.w'
      >>> name_together(["[0].layers[0].w", "[0].layers[1].w", "[1]"], ["[2]"])
      '[0] (2), [1]'
    """
    taken = {prefix for other in others for prefix in _prefixes(other)}
    found: collections.Counter[str] = collections.Counter()
    for name in names:
        shortest = next((p for p in _prefixes(name) if p not in taken), name)
        found[_NUMBER.sub("*", shortest)] += 1
    texts = [name if count == 1 else f"{name} ({count})" for name, count in found.items()]
    shown = [texts[0]]
    while len(shown) < len(texts) and len(", ".join(shown)) + len(texts[len(shown)]) < width:
        shown.append(texts[len(shown)])
    rest = len(texts) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _prefixes(path: str) -> Iterator[str]:
    """Yields the modules that a path leads through, outermost first, and the path."""
    end = 0
    for part in _PART.finditer(path):
        end = part.end()
        yield path[:end]
    if end < len(path) or not path:
        yield path


def short_reason(text: str) -> str:
    """Returns a reason with short file names, without the lines between the first and the last."""
    steps = text.replace(", a value per replica ->", " ->").split(" -> ")
    return short_lines(" -> ".join(steps if len(steps) < 3 else [steps[0], "...", steps[-1]]))


def short_lines(text: str) -> str:
    """Returns a text with lines of code as "train.py:31 (step)", and cut off where it is too long.

    Example:
      >>> short_lines("psum at /home/me/train.py:31 (main.<locals>.step)")
      'psum at train.py:31 (main.step)'
    """
    text = _FOLDER.sub("", text).replace("<locals>.", "")
    return text if len(text) <= _REASON_WIDTH else text[: _REASON_WIDTH - 3] + "..."
