"""Spec: the contents of a checkpoint key, and whether they fit a tree's place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from distjax import jax_compat
from distjax.typing import DTypeLike, PyTree
from distjax.variables.conversion import dtype_rank

#: Python number types in widening order; text converts to nothing else.
NUMBER_TYPES: dict[str, type] = {t.__name__: t for t in (bool, int, float, complex, str)}


@dataclasses.dataclass(frozen=True)
class Spec:
    """Form, shape and dtype of the value at one key.

    Attributes:
      form: "array", "number" (a Python number or text) or "state" (of an iterator).
      shape: the shape of one value.
      dtype: its dtype, "key<impl>" for PRNG keys; the type name for a number.
      num_replicas: R of a PerReplica, else None.
    """

    form: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    num_replicas: int | None = None

    def __str__(self) -> str:
        if self.form == "state":
            return "the state of an iterator"
        if self.form == "number":
            return f"a Python {self.dtype}"
        one = f"{self.dtype}{list(self.shape)}"
        return (
            one if self.num_replicas is None else f"{one} on each of {self.num_replicas} replicas"
        )

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the array: [R, ...] for a PerReplica."""
        return self.shape if self.num_replicas is None else (self.num_replicas, *self.shape)

    @property
    def is_key(self) -> bool:
        """Whether the values are PRNG keys."""
        return self.form == "array" and self.dtype.startswith("key<")

    @property
    def key_impl(self) -> str:
        """The implementation of PRNG keys."""
        return self.dtype.removeprefix("key<").removesuffix(">")

    @property
    def is_stored_as_array(self) -> bool:
        """Whether orbax writes an array for it; an empty one needs none."""
        return self.form == "array" and 0 not in self.stored_shape

    @property
    def is_in_jax(self) -> bool:
        """Whether JAX has the dtype; 64-bit values wrap around without jax_enable_x64."""
        return self.is_key or jax.dtypes.canonicalize_dtype(self.dtype) == jnp.dtype(self.dtype)

    def to_json(self) -> dict[str, Any]:
        """Returns the spec as JSON."""
        return {**dataclasses.asdict(self), "shape": list(self.shape)}

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> Spec:
        """Returns the spec that `to_json` was called on."""
        return Spec(saved["form"], tuple(saved["shape"]), saved["dtype"], saved["num_replicas"])


def array_spec(value: PyTree, num_replicas: int | None = None) -> Spec:
    """Returns the spec of an array, or of [R, ...] if `num_replicas` is given."""
    shape = tuple(value.shape) if num_replicas is None else tuple(value.shape[1:])
    return Spec("array", shape, dtype_name(value.dtype), num_replicas)


def dtype_name(dtype: DTypeLike) -> str:
    """Returns the name of a dtype, including the implementation of PRNG keys."""
    if jax_compat.is_key_dtype(dtype):
        return f"key<{jax_compat.key_impl(dtype)}>"
    return jnp.dtype(dtype).name


def fits(saved: Spec, wanted: Spec) -> bool:
    """Returns whether a saved value can be restored to a place of spec `wanted`.

    A Python number and a scalar array are interchangeable (a step counter starts
    as one and becomes the other). A conversion that loses information, such as
    float to int, does not fit.
    """
    if "state" in (saved.form, wanted.form):
        return saved.form == wanted.form
    if (saved.shape, saved.num_replicas) != (wanted.shape, wanted.num_replicas):
        return False
    if saved.dtype == wanted.dtype:
        return True
    before, after = _rank(saved), _rank(wanted)
    return before is not None and after is not None and before <= after


def _rank(spec: Spec) -> int | None:
    if spec.is_key or spec.dtype == "str":
        return None
    dtype = NUMBER_TYPES[spec.dtype] if spec.form == "number" else jnp.dtype(spec.dtype)
    return dtype_rank(jax.dtypes.canonicalize_dtype(dtype))
