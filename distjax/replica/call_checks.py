"""What a user's function, its arguments and its result must be for it to be called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from distjax.errors import describe_value, message
from distjax.replica.user_names import function_name
from distjax.typing import PyTree


def require_callable(fn: object, method: str) -> None:
    """Raises a TypeError unless `fn` is callable."""
    if callable(fn):
        return
    raise TypeError(
        message(
            f"{method} needs a function",
            got=describe_value(fn),
            why="it is what is called or compiled",
            fix=f"{method}(fn, ...): the function itself, not the result of calling it",
        )
    )


def require_call(
    fn: object, args: object, kwargs: object, method: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns args as a tuple and kwargs as a dict.

    Raises:
      TypeError: `fn` is not callable.
      ValueError: args or kwargs have the wrong type.
    """
    require_callable(fn, method)
    if not isinstance(args, (tuple, list)):
        raise ValueError(
            message(
                f"{method}: positional args must be a list or tuple",
                got=describe_value(args),
                why="each item is one positional argument of the function",
                fix=f"{method}(fn, args=(x,)): note the comma",
            )
        )
    if kwargs is not None and not isinstance(kwargs, dict):
        raise ValueError(
            message(
                f"{method}: kwargs must be a dict",
                got=describe_value(kwargs),
                why="each item is one keyword argument of the function",
                fix=f"{method}(fn, kwargs={{'x': x}})",
            )
        )
    return tuple(args), dict(kwargs or {})


def add_merge_note(
    error: Exception, merge_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Adds a note to the error of a merge function that takes its arguments, but no strategy."""
    if not isinstance(error, TypeError) or _takes(merge_fn, (None, *args), kwargs):
        return
    if _takes(merge_fn, args, kwargs):
        error.add_note(
            "merge_call passes the strategy first, then args.\n"
            "  Fix: merge_call(lambda strategy, x: ..., args=(x,))"
        )


def _takes(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    return True


def require_finished(result: PyTree, fn: Callable[..., Any]) -> Any:
    """Returns what ``fn`` returned.

    Raises:
      TypeError: a generator or coroutine: its body has not run.
    """
    if not (inspect.isgenerator(result) or inspect.iscoroutine(result)):
        return result
    result.close()
    raise TypeError(
        message(
            f"{function_name(fn)} needs to return values",
            got="a coroutine (`async def`)" if inspect.iscoroutine(result) else "a generator",
            why="its body has not run: it would run after the step, outside of it",
            fix="a function without `yield` and `async`, that returns a tuple or list",
        )
    )
