"""Casts to a dtype of the same or a higher kind; raises if a value does not fit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distjax.typing import DTypeLike

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
