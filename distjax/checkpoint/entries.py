"""Entries: the values of a tree, each under the key that it has in a checkpoint.

What is saved is one logical value per variable, whatever its strategy stores: so
a checkpoint moves between strategies, numbers of replicas and plain arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from distjax import jax_compat
from distjax.errors import CheckpointError, explain
from distjax.placement import locality as kinds
from distjax.placement.per_replica import PerReplica
from distjax.replica.arguments import is_array, is_number
from distjax.variables.policy import Combine
from distjax.variables.variable import Variable


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a value is like, apart from its numbers.

    Attributes:
      shape: its shape; [R, ...] for a value per replica.
      dtype: the name of its dtype ("key<fry>" of a PRNG key); "int", "float" or
        "complex" of a Python number.
      num_replicas: R for a value per replica, None for any other.
    """

    shape: tuple[int, ...]
    dtype: str
    num_replicas: int | None = None

    def fits(self, other: Spec) -> bool:
        """Returns whether a value like this can take the place of one like `other`.

        A Python number and an array [] of its kind can: a step counter begins as 0.
        """
        if (self.shape, self.num_replicas) != (other.shape, other.num_replicas):
            return False
        pairs = (self.dtype, other.dtype), (other.dtype, self.dtype)
        return self.dtype == other.dtype or any(_is_of_kind(a, b) for a, b in pairs)

    def __str__(self) -> str:
        text = f"{self.dtype}{list(self.shape)}"
        return text if self.num_replicas is None else f"{text} of {self.num_replicas} replicas"


def _is_of_kind(number: str, dtype: str) -> bool:
    """Returns whether `dtype` is one of arrays that a kind of Python number can become."""
    kinds_of = {"int": jnp.integer, "float": jnp.floating, "complex": jnp.complexfloating}
    is_array_dtype = dtype not in kinds_of and not dtype.startswith("key<")
    return number in kinds_of and is_array_dtype and jnp.issubdtype(dtype, kinds_of[number])


@dataclasses.dataclass(frozen=True)
class Entry:
    """A value of the user's tree.

    Attributes:
      key: its name in the checkpoint.
      read: returns the value to save: an array, or an object for JSON.
      write: takes the restored value and returns what stands in the tree.
      spec: what the value is like; None for an object that JSON holds.
      sharding: where a restored array is put; None: on the host.
    """

    key: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    spec: Spec | None
    sharding: Sharding | None = None


def _spec_of(value: Any, num_replicas: int | None = None) -> Spec:
    return Spec(tuple(value.shape), str(value.dtype), num_replicas)


def variable_entry(key: str, variable: Variable) -> Entry:
    """Returns the entry of a variable, restored in place."""
    extended = variable.strategy.extended
    if variable.layout.kind == kinds.PARTITIONED:
        sharding = variable.sharding
    else:
        sharding = None if extended.is_default else extended.topology.mirrored

    def read() -> Any:
        if variable.policy.cross_read is Combine.REFUSE:
            raise CheckpointError(
                explain(
                    f"variable {variable.name!r} needs an aggregation to be saved",
                    got="an ON_READ variable with aggregation NONE",
                    why="a checkpoint holds one value, and nothing says which its components make",
                    fix="aggregation=dj.VariableAggregation.SUM (or MEAN, ONLY_FIRST_REPLICA)",
                )
            )
        return variable.value

    def write(value: Any) -> Variable:
        variable.assign(value)
        return variable

    return Entry(key, read, write, Spec(tuple(variable.shape), str(variable.dtype)), sharding)


def leaf_entry(key: str, leaf: Any, replace: Callable[[Any], Any] = lambda value: value) -> Entry:
    """Returns the entry of an array, a PerReplica, a number or a string.

    Args:
      key: its name in the checkpoint.
      leaf: the value in the tree.
      replace: takes the new leaf and returns what stands in the tree.
    """
    if isinstance(leaf, PerReplica):
        topology = leaf.topology
        spec, sharding = _spec_of(leaf.stacked, leaf.num_replicas), topology.per_replica
        return Entry(
            key, lambda: leaf.stacked, lambda x: replace(PerReplica(x, topology)), spec, sharding
        )
    if isinstance(leaf, jax.Array) or isinstance(leaf, jax.ShapeDtypeStruct):
        return Entry(key, lambda: leaf, replace, _spec_of(leaf), leaf.sharding)
    if isinstance(leaf, (str, bool)):
        return Entry(key, lambda: leaf, replace, None)
    if is_number(leaf):
        kind = type(leaf)
        spec = Spec((), kind.__name__)
        return Entry(key, lambda: np.asarray(leaf), lambda x: replace(kind(x)), spec)
    if is_array(leaf):
        return Entry(key, lambda: np.asarray(leaf), replace, _spec_of(leaf))
    raise CheckpointError(
        explain(
            f"{key} needs a value that can be saved: an array, a number, a string, a variable",
            got=f"{type(leaf).__module__}.{type(leaf).__qualname__} without a variable in it",
            why="a checkpoint holds values; it cannot make an object anew",
            fix="leave it out of the tree that is saved, and build it in code",
        )
    )


def as_saved(value: Any) -> Any:
    """Returns an array as orbax takes it: PRNG keys as their data."""
    if jax_compat.is_key_dtype(getattr(value, "dtype", None)):
        return jax.random.key_data(value)
    return value
