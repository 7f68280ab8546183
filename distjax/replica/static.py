"""What of the arguments is part of a program, and no input of it, by the user's word."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import jax

from distjax.errors import describe_value, message
from distjax.placement.per_replica import PerReplica, is_per_replica
from distjax.replica.arguments import Static, as_static, is_array, user_path
from distjax.typing import PyTree

_T = TypeVar("_T")


def static(value: object) -> Static:
    """Returns `value` marked as a Python value, for an argument of `run` or `dj.jit`.

    Numbers and bools among the arguments are inputs of a program: a new value compiles
    nothing, and Python code (``if``, ``range``, a shape) cannot see it. The function is
    given a marked one as it is, and is compiled for each value, found by ``==``.

    Args:
      value: a number, a bool or another hashable object; anywhere in an argument.

    Raises:
      ValueError: a value that cannot be hashed.

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
                fix="pass arrays as they are: they are inputs of the program",
            )
        ) from None
    return value if isinstance(value, Static) else Static(value)


def unmark(tree: _T) -> _T:
    """Returns `tree` with the values that are marked in it; the tree itself if none is."""
    if not any(map(_is_static, jax.tree.leaves(tree, is_leaf=_is_static))):
        return tree
    return jax.tree.map(lambda x: x.value if _is_static(x) else x, tree, is_leaf=_is_static)


def _is_static(value: object) -> bool:
    return isinstance(value, Static)


# -- Equinox ------------------------------------------------------------------
# A module is a tree whose leaves are arrays and, by Equinox's own rule (`eqx.filter_jit`), values
# of Python: rates, flags, activation functions. So no number in it is an input.


def is_module(value: object) -> bool:
    """Returns whether `value` is an `eqx.Module`; Equinox is not imported for it."""
    return isinstance(value, getattr(sys.modules.get("equinox"), "Module", ()))


def mark_modules(tree: PyTree, names: tuple[str, ...] = ()) -> Any:
    """Returns (args, kwargs) in which whatever is no array in an `eqx.Module` is Static.

    Args:
      tree: (args, kwargs).
      names: names of the positional arguments, for the error.

    Raises:
      ValueError: a Python object in a module that cannot be hashed.
    """
    if "equinox" not in sys.modules:
        return tree

    def mark(path: tuple[Any, ...], value: PyTree) -> Any:
        return _mark_module(path, value, names) if is_module(value) else value

    return jax.tree_util.tree_map_with_path(mark, tree, is_leaf=_is_one_value)


def _is_one_value(value: object) -> bool:
    return is_module(value) or is_per_replica(value) or _is_static(value)


def _mark_module(path: tuple[Any, ...], module: PyTree, names: tuple[str, ...]) -> Any:
    def mark(inner: tuple[Any, ...], leaf: PyTree) -> Any:
        if is_array(leaf) or isinstance(leaf, (PerReplica, Static)):
            return leaf
        return as_static(leaf, user_path(jax.tree_util.keystr((*path, *inner)), names))

    is_leaf = lambda x: is_per_replica(x) or _is_static(x)
    return jax.tree_util.tree_map_with_path(mark, module, is_leaf=is_leaf)
