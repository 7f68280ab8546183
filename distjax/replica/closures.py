"""What a function's closure holds at one moment.

A merge function is called where it is met, for shapes, and again when the program
is emitted. In between the replica function goes on, and the names that the merge
function closes over may go on too: the `v` of ``for v in variables``. The second
call has to see what the first one saw.
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
    """The values of the names that a function, and functions in them, close over.

    Args:
      fn: the function, a bound method, or a `functools.partial` of one.
    """

    def __init__(self, fn: Callable[..., Any]):
        self._values = [(cell, _content(cell)) for cell in _cells(fn, {}).values()]

    @contextlib.contextmanager
    def restore(self) -> Generator[None]:
        """Gives the names these values; afterwards those they had, unless set inside."""
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
    """Returns the cells of ``fn``, and of functions in them, by identity."""
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
    except ValueError:  # a name that has no value yet
        return _EMPTY


def _write_cell(cell: types.CellType, value: object) -> None:
    if value is _EMPTY:
        del cell.cell_contents
    else:
        cell.cell_contents = value
