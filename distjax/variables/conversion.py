"""Converts what a user writes to a variable to its dtype, and checks its shape.

A value of a higher kind (bool < int < float < complex) is rejected, and so is a host value out of
the dtype's range. The values of a JAX array are not looked at, so a cast to a narrower dtype of the
same kind may overflow.
"""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distjax import jax_compat
from distjax.errors import describe_value, message
from distjax.typing import DTypeLike, PyTree
from distjax.variables.casting import cast
from distjax.variables.stored_variable import StoredVariable

_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def is_number(value: object) -> bool:
    """Returns whether `value` is a Python number."""
    return isinstance(value, numbers.Number) and not isinstance(value, np.generic)


def dtype_rank(dtype: DTypeLike) -> int | None:
    """Returns the rank of a dtype in bool < int < float < complex, None for others.

    Converting to a dtype of lower rank loses information.
    """
    return next((i for i, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind)), None)


def convert(variable: StoredVariable, value: PyTree, method: str) -> Any:
    """Returns `value` as an array with the shape and dtype of `variable`.

    Args:
      variable: the variable being written.
      value: an array, a number, or lists of these.
      method: the name of the method that the user called.

    Raises:
      TypeError: not an array of numbers, or a dtype of a higher kind than the variable's.
      ValueError: the shape differs.
      OverflowError: a number or numpy array with values out of the dtype's range.
    """
    array = _as_array(variable, value, method)
    is_key = jax_compat.is_key_dtype(variable.dtype)
    if array.dtype != variable.dtype and (is_key or not _can_hold(variable.dtype, array.dtype)):
        raise TypeError(_dtype_text(variable, method, f"dtype {array.dtype}"))
    if array.shape != variable.shape:
        raise ValueError(
            message(
                f"{method} of variable {variable.name!r} needs shape {variable.shape}",
                got=f"shape {array.shape}",
                why="a variable keeps its shape",
                fix="as many keys: jax.random.split(key, v.shape)"
                if is_key
                else "reshape or broadcast the value: jnp.broadcast_to(x, v.shape)",
            )
        )
    if isinstance(array, jax.Array):
        return array if array.dtype == variable.dtype else jnp.asarray(array, variable.dtype)
    try:
        return jnp.asarray(cast(array, variable.dtype), variable.dtype)
    except OverflowError as error:
        raise OverflowError(
            message(
                f"{method} of variable {variable.name!r} needs values that {variable.dtype} holds",
                got=str(error),
                why="they would wrap around or become infinite, and a conversion that loses "
                "information is not made in silence",
                fix="a variable of a wider dtype (64 bits need jax_enable_x64)",
            )
        ) from error


def _as_array(variable: StoredVariable, value: PyTree, method: str) -> Any:
    if isinstance(value, jax.Array):
        return value
    is_known = hasattr(value, "dtype") or isinstance(value, (numbers.Number, list, tuple))
    if not is_known or jax_compat.is_key_dtype(variable.dtype):
        raise TypeError(_dtype_text(variable, method, describe_value(value)))
    try:
        is_traced = any(isinstance(x, jax_compat.Tracer) for x in jax.tree.leaves(value))
        return jnp.asarray(value) if is_traced else np.asarray(value)
    except (TypeError, ValueError) as error:  # ragged lists, or lists of other objects
        raise TypeError(_dtype_text(variable, method, describe_value(value))) from error


def _can_hold(wanted: DTypeLike, given: DTypeLike) -> bool:
    rank, limit = dtype_rank(given), dtype_rank(wanted)
    return rank is not None and limit is not None and rank <= limit


def _dtype_text(variable: StoredVariable, method: str, got: str) -> str:
    fix = f"v.{method}(x.astype(v.dtype))"
    if jax_compat.is_key_dtype(variable.dtype):
        impl = jax_compat.key_impl(variable.dtype)
        fix = f"a key of that kind: jax.random.key(0, impl={impl!r}), or of old data "
        fix += f"jax.random.wrap_key_data(data, impl={impl!r})"
    return message(
        f"{method} of variable {variable.name!r} needs a value of dtype {variable.dtype}",
        got=got,
        why="a conversion that loses information is not made in silence",
        fix=fix,
    )
