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

from distjax._src import jax_compat
from distjax._src.placement import require_no_mask, without_alias
from distjax._src.typing import DTypeLike, PyTree
from distjax._src.variables.layouts import Declared
from distjax.errors import describe_value, message

#: A numpy or JAX array.
Array = np.ndarray | jax.Array


def module_of(array: Array) -> Any:
    """Returns the module whose functions take `array` and leave it where it is."""
    return jnp if isinstance(array, jax.Array) else np


def cast(value: Array, dtype: DTypeLike) -> Any:
    """Returns `value` cast to `dtype`; floats are rounded.

    Args:
      value: a numpy or JAX array, of dtype object for Python ints of more than 64 bits.
      dtype: of the same kind as `value`, or a higher one in bool < int < float < complex.

    Raises:
      OverflowError: a value is out of the range of `dtype`; the text has the least and largest.
    """
    wanted = jnp.dtype(dtype)
    if value.dtype == wanted:
        return value
    if not _covers(wanted, value.dtype):
        _require_in_range(value, wanted)
    return value.astype(wanted)


def _covers(wanted: np.dtype, given: np.dtype) -> bool:
    """Returns whether every finite value of `given` is in the range of `wanted`."""
    if given == np.bool_:
        return True
    if given == np.object_:
        return False
    least, largest = _range(wanted)
    given_least, given_largest = _range(given)
    return least <= given_least and given_largest <= largest


def _range(dtype: np.dtype) -> tuple[float, float]:
    info = jnp.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype)
    number = int if jnp.issubdtype(dtype, jnp.integer) else float
    return number(info.min), number(info.max)


def _require_in_range(value: Array, wanted: np.dtype) -> None:
    if not value.size:
        return
    module = module_of(value)
    is_complex = jnp.issubdtype(value.dtype, jnp.complexfloating)
    parts = (module.real(value), module.imag(value)) if is_complex else (value,)
    least, largest = _range(wanted)
    for part in parts:
        found = _finite_range(part)
        if found[0] < least or found[1] > largest:
            raise OverflowError(f"values from {found[0]} to {found[1]}, of dtype {value.dtype}")


def _finite_range(array: Array) -> tuple[float, float]:
    """Returns the least and largest value; those that are not finite count as 0."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return int(array.min()), int(array.max())
    if array.ndim == 0:
        number = float(array) if np.isfinite(array) else 0.0
        return number, number
    module = module_of(array)
    finite = module.where(module.isfinite(array), array, module.zeros_like(array))
    return float(finite.min()), float(finite.max())


_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def is_number(value: object) -> bool:
    """Returns whether `value` is a Python number."""
    return isinstance(value, numbers.Number) and not isinstance(value, np.generic)


def dtype_rank(dtype: DTypeLike) -> int | None:
    """Returns the rank of a dtype in bool < int < float < complex, None for others.

    Converting to a dtype of lower rank loses information.
    """
    return next((i for i, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind)), None)


def convert(variable: Declared, value: PyTree, method: str) -> Array:
    """Returns `value` as an array with the shape and dtype of `variable`, or raises.

    A host value stays on the host, as a numpy array that nobody else holds. `method` is what the
    user called.
    """
    what = f"{method} of variable {variable.name!r}"
    numbers_fix = f"v.{method}(jnp.zeros(v.shape, v.dtype)), a number, or lists of numbers"
    array = _as_numbers(variable, value, what, numbers_fix)
    # `x` may be a Python number, which has no astype.
    array = to_dtype(array, variable.dtype, what, f"v.{method}(jnp.asarray(x).astype(v.dtype))")
    if array.shape != variable.shape:
        raise ValueError(
            message(
                f"{what} needs shape {variable.shape}",
                got=f"shape {array.shape}",
                why="a variable keeps its shape",
                fix="as many keys: jax.random.split(key, v.shape)"
                if jax_compat.is_key_dtype(variable.dtype)
                else "reshape or broadcast the value: jnp.broadcast_to(x, v.shape)",
            )
        )
    return without_alias(array)


def to_dtype(array: Array, dtype: DTypeLike, what: str, fix: str, *, rounds: bool = False) -> Array:
    """Returns an array cast to a dtype of its kind, or of a higher one; or raises.

    With `rounds` the user named the dtype, so that arrays of more bits are rounded. Otherwise a JAX
    array whose dtype is not weak may not lose bits: it is the result of a computation, which a
    numpy array or a number need not be.
    """
    if array.dtype == dtype:
        return without_weak_type(array)
    if jax_compat.is_key_dtype(dtype) or not _can_hold(dtype, array.dtype):
        raise TypeError(_dtype_text(dtype, what, f"dtype {array.dtype}", fix))
    if isinstance(array, jax.Array):
        if not rounds and _loses(dtype, array):
            raise TypeError(_dtype_text(dtype, what, f"dtype {array.dtype}", fix))
        return array.astype(dtype)
    try:
        return cast(array, dtype)
    except OverflowError as error:
        raise OverflowError(
            message(
                f"{what} needs values that {dtype} holds",
                got=str(error),
                why="they would silently wrap around or become infinite",
                fix="a variable of a wider dtype (64 bits need jax_enable_x64)",
            )
        ) from error


def without_weak_type(array: Array) -> Array:
    """Returns an array whose dtype counts in promotions: a weakly typed one is like a number."""
    if isinstance(array, jax.Array) and jax.typeof(array).weak_type:
        return jax.lax.convert_element_type(array, array.dtype)
    return array


def _as_numbers(variable: Declared, value: PyTree, what: str, fix: str) -> Array:
    if isinstance(value, jax.Array):
        return value
    is_known = hasattr(value, "dtype") or isinstance(value, (numbers.Number, list, tuple))
    if not is_known or jax_compat.is_key_dtype(variable.dtype):
        raise TypeError(_dtype_text(variable.dtype, what, describe_value(value), fix))
    require_no_mask(value, what)
    try:
        return as_array(value)
    except (TypeError, ValueError) as error:  # ragged lists, or lists of other objects
        raise TypeError(_dtype_text(variable.dtype, what, describe_value(value), fix)) from error


def as_array(value: PyTree) -> Array:
    """Returns an array of numbers as it is, and all others as numpy arrays unless traced."""
    if isinstance(value, jax.Array):
        return value
    return jnp.asarray(value) if is_traced(value) else np.asarray(value)


def is_traced(value: PyTree) -> bool:
    """Returns whether `value` is or contains a tracer."""
    return any(isinstance(x, jax_compat.Tracer) for x in jax.tree.leaves(value))


def _can_hold(wanted: DTypeLike, given: DTypeLike) -> bool:
    rank, limit = dtype_rank(given), dtype_rank(wanted)
    return rank is not None and limit is not None and rank <= limit


def rounded(value: PyTree, dtype: DTypeLike) -> PyTree:
    """Returns an array in a dtype of its kind, rounded on purpose; anything else as it is."""
    given = getattr(value, "dtype", None)
    is_same_kind = given is not None and dtype_rank(given) == dtype_rank(dtype) is not None
    return value.astype(dtype) if is_same_kind else value


def _loses(dtype: DTypeLike, array: jax.Array) -> bool:
    """Returns whether a JAX array would be rounded, or wrap around, in another dtype."""
    if jax.typeof(array).weak_type:
        return False
    try:
        with jax.numpy_dtype_promotion("standard"):  # not the user's, which may allow none
            return jnp.promote_types(array.dtype, dtype) != dtype
    except ValueError:  # JAX promotes no floats of 8 bits
        return True


def _dtype_text(dtype: DTypeLike, what: str, got: str, fix: str) -> str:
    if jax_compat.is_key_dtype(dtype):
        impl = jax_compat.key_impl(dtype)
        fix = f"a key of that kind: jax.random.key(0, impl={impl!r}), or of old data "
        fix += f"jax.random.wrap_key_data(data, impl={impl!r})"
    return message(
        f"{what} needs a value of dtype {dtype}",
        got=got,
        why="distjax does not convert implicitly where information would be lost",
        fix=fix,
    )
