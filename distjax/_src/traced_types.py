"""The types with which code is traced for values, and what stands for an array with a type only.

The type that JAX gives an array also names a mesh and a sharding. These matter to a trace only on
explicit axes, or on manual ones over which the value varies; all other arrays of one shape, dtype
and memory space share a trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import jax
from jax.core import AbstractValue
from jax.sharding import AxisType, Sharding

from distjax._src.jax_compat import ShapedArray, Var
from distjax._src.typing import ArrayLike, DTypeLike


def type_of(value: ArrayLike) -> Any:
    """Returns the type that an array or Python number has in a trace."""
    return as_traced(jax.typeof(value))


def as_traced(aval: AbstractValue) -> Any:
    """Returns a JAX type without the sharding that does not matter."""
    if not isinstance(aval, ShapedArray):  # of a mutable array
        return aval
    is_explicit = AxisType.Explicit in aval.sharding.mesh.axis_types
    if is_explicit or aval.manual_axis_type.varying:
        return aval
    return aval.update(sharding=ShapedArray(aval.shape, aval.dtype).sharding)


def have_types_of(operands: Sequence[Any], atoms: Sequence[Var]) -> bool:
    """Returns whether `operands` are arrays of the types that `atoms` were traced with."""
    given = list(map(type_of, operands))
    traced = [as_traced(atom.aval) for atom in atoms]
    return given == traced and all(isinstance(t, ShapedArray) for t in given)


def struct(
    shape: tuple[int, ...], dtype: DTypeLike, sharding: Sharding | None = None
) -> jax.ShapeDtypeStruct:
    """Returns what stands for an array where code is traced or compiled, but not run."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def is_struct(value: object) -> TypeGuard[jax.ShapeDtypeStruct]:
    """Returns whether `value` stands for an array."""
    return isinstance(value, jax.ShapeDtypeStruct)
