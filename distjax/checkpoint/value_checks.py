"""Checks of values that were read, before any of them is put into the tree."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp

from distjax.checkpoint.leaves import Leaf, VariableLeaf
from distjax.errors import CheckpointError, message
from distjax.typing import PyTree
from distjax.variables.casting import Array
from distjax.variables.variable import Variable


def require_settings(
    leaves: Mapping[str, Leaf], values: PyTree, saved: Mapping[str, str], where: str
) -> None:
    """Raises if a value was saved by an object of another setting, and is not 0.

    Args:
      leaves: the leaves of the tree, by key.
      values: the converted values, by key.
      saved: the settings that were saved, by key; earlier versions saved none.
      where: the checkpoint, for error texts.
    """
    for key, setting in saved.items():
        own = leaves[key].setting
        if own in ("", setting) or not jnp.any(values[key] != 0):
            continue
        raise CheckpointError(
            message(
                f"{key!r} of {where} needs an object with {setting}, as when it was saved",
                got=f"one with {own}",
                why="its value depends on that: a sum that is half done does not become a mean, "
                "nor a mean a sum. Nothing has been changed",
                fix=f"construct it with {setting}; or restore a step whose value is 0 there: one "
                "saved right after an update",
            )
        )


def require_one_value_each(leaves: Mapping[str, Leaf], values: PyTree, where: str) -> None:
    """Raises if one variable is at several keys, whose saved values differ.

    Args:
      leaves: the leaves of the tree, by key.
      values: the converted values of those to restore, by key.
      where: the checkpoint, for error texts.
    """
    first: dict[Variable, str] = {}
    for key in values:
        leaf = leaves[key]
        if not isinstance(leaf, VariableLeaf):
            continue
        other = first.setdefault(leaf.value, key)
        if other == key or _are_equal(values[other], values[key]):
            continue
        raise CheckpointError(
            message(
                f"{other!r} and {key!r} of {where} need one value, for variable "
                f"{leaf.value.name!r}",
                got="two values that differ",
                why="the tree has one variable at both keys: one of the values would be lost. "
                "Nothing has been changed",
                fix="a variable for each key; or leave one of them out: "
                f"restore(tree without {key!r}, partial=True)",
            )
        )


def _are_equal(a: Array, b: Array) -> bool:
    """Returns whether two arrays of one shape and dtype are equal; NaNs are."""
    are_nan = (a != a) & (b != b)
    return bool(((a == b) | are_nan).all())
