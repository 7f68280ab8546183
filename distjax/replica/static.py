"""Marking parts of arguments as static: part of the program, not inputs of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from distjax.errors import describe_value, message
from distjax.replica.partitioned_tree import Static, as_static, is_array, is_one_leaf, is_static
from distjax.replica.user_names import user_path
from distjax.typing import PyTree

_T = TypeVar("_T")


def static(value: object) -> Static:
    """Marks `value` as static, for an argument of `run` or `dj.jit`.

    Numbers and bools in arguments are inputs of the program: new values do not recompile
    it, and Python code (``if``, ``range``, a shape) cannot see them. A static value is
    passed to the function as it is, and each new value, compared by ``==``, recompiles it.

    Args:
      value: a number, a bool or another hashable object, anywhere in an argument.

    Raises:
      ValueError: `value` is not hashable.

    Example:
      >>> strategy = dj.VirtualStrategy(2)
      >>> def step(x, length, train):
      ...     return jnp.zeros(length) + x if train else x
      >>> strategy.run(step, args=(1.0, dj.static(3), dj.static(True)))
      Array([1., 1., 1.], dtype=float32)
    """
    try:
        hash(value)
    except TypeError:
        raise ValueError(
            message(
                "dj.static needs a hashable value",
                got=describe_value(value),
                why="it is part of what a compiled program is looked up by",
                fix="pass arrays as they are: they are inputs of the program; a list as a tuple: "
                "dj.static(tuple(x))",
            )
        ) from None
    return value if isinstance(value, Static) else Static(value)


def unmark(tree: _T) -> _T:
    """Returns `tree` with static values unwrapped; the same object if there are none."""
    if not any(map(is_static, jax.tree.leaves(tree, is_leaf=is_static))):
        return tree
    return jax.tree.map(lambda x: x.value if is_static(x) else x, tree, is_leaf=is_static)


def keep_marks(tree: PyTree) -> Any:
    """Returns `tree` with static values marked twice, so that one `unmark` leaves them static."""
    return jax.tree.map(lambda x: Static(x) if is_static(x) else x, tree, is_leaf=is_static)


# -- Equinox ------------------------------------------------------------------
# By Equinox's own rule (`eqx.filter_jit`), the leaves of a module that are not arrays (rates,
# flags, activation functions) are static. So numbers in a module are static, not inputs.


def is_module(value: object) -> bool:
    """Returns whether `value` is an `eqx.Module`, without importing Equinox."""
    return isinstance(value, getattr(sys.modules.get("equinox"), "Module", ()))


def mark_modules(
    tree: PyTree, names: tuple[str, ...] = (), is_data: Callable[[Any], bool] = is_array
) -> Any:
    """Returns (args, kwargs) with non-array leaves of Equinox modules made Static.

    Args:
      tree: (args, kwargs).
      names: names of the positional arguments, for the error.
      is_data: returns whether a leaf is an array.

    Raises:
      ValueError: a Python object in a module is not hashable.
    """
    if "equinox" not in sys.modules:
        return tree

    def mark(path: tuple[Any, ...], value: PyTree) -> Any:
        return _mark_module(path, value, names, is_data) if is_module(value) else value

    return jax.tree_util.tree_map_with_path(mark, tree, is_leaf=_is_one_value)


def _is_one_value(value: object) -> bool:
    return is_module(value) or is_one_leaf(value)


def _mark_module(
    path: tuple[Any, ...], module: PyTree, names: tuple[str, ...], is_data: Callable[[Any], bool]
) -> Any:
    def mark(inner: tuple[Any, ...], leaf: PyTree) -> Any:
        if is_data(leaf) or is_one_leaf(leaf):
            return leaf
        return as_static(
            leaf, user_path(jax.tree_util.keystr((*path, *inner)), names), is_implied=True
        )

    return jax.tree_util.tree_map_with_path(mark, module, is_leaf=is_one_leaf)
