"""The user's names for a function, its parameters and the leaves of its arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any


def function_name(fn: object) -> str:
    """Returns a function's name as the user wrote it, looking through partials."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or type(fn).__name__


def positional_names(fn: Callable[..., Any]) -> list[str]:
    """Returns the names of the parameters that accept positional arguments."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds]


def user_path(path: str, names: Sequence[str]) -> str:
    """Returns "x['a']" for the path "[0][0]['a']" in (args, kwargs).

    Args:
      path: a `jax.tree_util.keystr`.
      names: names of the positional arguments.
    """
    where, _, rest = path.removeprefix("[").partition("][")
    key, _, inner = rest.partition("]")
    if where == "1":
        return key.strip("'") + inner
    index = int(key) if key.isdigit() else len(names)
    return (names[index] if index < len(names) else f"args[{key}]") + inner
