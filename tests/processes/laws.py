"""Laws of `tests/conformance` on strategies that span processes: each process calls the test."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import distjax as dj

#: Rows of the table of strategies: processes, devices of each, and the strategy's name.
ROWS = {"processes_2x2": (2, 2)}

#: What a cross-replica function is passed through: nothing, or `dj.jit`.
HOW = {"eager": lambda fn: fn, "jit": dj.jit}


def call_law(module: str, name: str, places: dict[str, int]) -> None:
    """Calls a law on this process, with the strategy over all of them.

    Args:
      module: where the test is.
      name: the test.
      places: for each of its parameters, which of the values in `values_of` it gets.
    """
    test = getattr(importlib.import_module(module), name)
    given = {argument: values_of(test, argument)[place] for argument, place in places.items()}
    if "make_another" in inspect.signature(test).parameters:
        given["make_another"] = dj.MultiWorkerMirroredStrategy
    try:
        test(strategy=dj.MultiWorkerMirroredStrategy(), **given)
    finally:
        dj.set_strategy(None)


def values_of(test: Any, argument: str) -> list[Any]:
    """Returns the values that a parameter of a test takes, in the order of its `parametrize`."""
    if argument == "how":
        return [*HOW.values()]
    for mark in test.pytestmark:
        if mark.name == "parametrize":
            names, rows = mark.args[:2]
            names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
            if argument in names:
                rows = [getattr(row, "values", row) for row in rows]
                is_lone = len(names) == 1 and not any(type(row) is tuple for row in rows)
                return rows if is_lone else [row[names.index(argument)] for row in rows]
    raise LookupError(f"{test.__name__} has no parameter {argument!r}")
