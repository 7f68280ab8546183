"""Snapshots of a function's closure.

A merge function is called when it is traced for shapes, and again when the program is
emitted. In between, the replica function continues, and may rebind names that the merge
function closes over, such as the `v` in ``for v in variables``. The second call must see
the values that the first one saw.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Generator
from typing import Any

_EMPTY = object()


class ClosureValues:
    """The values closed over by a function and by the functions in its closure.

    Args:
      fn: a function, bound method, or `functools.partial` of one.
    """

    def __init__(self, fn: Callable[..., Any]):
        self._values = [(cell, _content(cell)) for cell in _cells(fn, {}).values()]

    @contextlib.contextmanager
    def restore(self) -> Generator[None]:
        """Restores these values for a block; undoes that afterwards, except for names rebound."""
        others = [
            (cell, value, _content(cell))
            for cell, value in self._values
            if _content(cell) is not value and value is not _EMPTY
        ]
        for cell, value, _ in others:
            cell.cell_contents = value
        try:
            yield
        finally:
            for cell, value, other in others:
                if _content(cell) is value:
                    _write_cell(cell, other)


def _cells(fn: object, found: dict[int, types.CellType]) -> dict[int, types.CellType]:
    """Returns the closure cells of ``fn`` and of functions in them, by identity."""
    while isinstance(fn, (functools.partial, types.MethodType)):
        fn = fn.func if isinstance(fn, functools.partial) else fn.__func__
    cells = (fn.__closure__ or ()) if inspect.isfunction(fn) else ()
    for cell in cells:
        if id(cell) not in found:
            found[id(cell)] = cell
            _cells(_content(cell), found)
    return found


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an unbound name
        return _EMPTY


def _write_cell(cell: types.CellType, value: object) -> None:
    if value is _EMPTY:
        del cell.cell_contents
    else:
        cell.cell_contents = value
