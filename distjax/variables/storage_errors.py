"""Errors for variables that have no usable array."""

from __future__ import annotations

import jax

from distjax.errors import ContextError, UnsupportedError, message


def is_there(array: jax.Array | jax.ShapeDtypeStruct | None) -> bool:
    """Returns whether `array` is an undeleted array or a ShapeDtypeStruct."""
    return array is not None and not (isinstance(array, jax.Array) and array.is_deleted())


def require_stored(
    name: str, array: jax.Array | jax.ShapeDtypeStruct | None, is_lost: bool
) -> None:
    """Raises unless `array`, the stored array of variable `name`, is usable.

    Raises:
      ContextError: there is none; it was never made, or a program lost it.
      RuntimeError: its buffers were deleted, because the user donated them.
    """
    if array is None:
        raise ContextError(_lost_text(name) if is_lost else _unmade_text(name))
    if not is_there(array):
        raise RuntimeError(_deleted_text(name))


def require_present(name: str, array: jax.Array | jax.ShapeDtypeStruct | None) -> None:
    """Raises UnsupportedError if the variable's devices can only be compiled for."""
    if isinstance(array, jax.ShapeDtypeStruct):
        raise UnsupportedError(
            message(
                f"variable {name!r} needs real devices to have a value",
                got="a strategy on devices of jax.experimental.topologies",
                why="programs can be compiled for such devices, but nothing runs on them",
                fix="dj.jit(step).lower(*args).compile(), or a strategy on jax.devices()",
            )
        )


def _unmade_text(name: str) -> str:
    return message(
        f"variable {name!r} needs an initial value",
        got="a variable whose creating function did not finish",
        why="the values of a traced function exist only when its trace ends",
        fix="create the variable again, outside the function or guarded by `if self.v is None`",
    )


def _lost_text(name: str) -> str:
    return message(
        f"variable {name!r} needs a value",
        got="none: a program that writes it failed, or was interrupted, as it started",
        why="such a program reuses the memory of the former value, and returned no new one",
        fix="checkpointer.restore(tree), or v.assign(...), for each variable that the step writes",
    )


def _deleted_text(name: str) -> str:
    return message(
        f"variable {name!r} needs the array that it stores",
        got="an array that was deleted: Array has been deleted",
        why="v.value shares the memory of the variable, and was donated (jax.jit with "
        "donate_argnums) or deleted by hand",
        fix="donate a copy: jnp.copy(v.value); to go on: v.assign(...), or "
        "checkpointer.restore(tree)",
    )
