"""Checks of values that were read, before any of them is put into the tree."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp

from distjax.checkpoint.leaves import Leaf
from distjax.errors import CheckpointError, message
from distjax.typing import PyTree


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
