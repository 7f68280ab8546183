"""The leaves of a tree: how each kind is saved and put back."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from distjax import jax_compat
from distjax.checkpoint import json_values
from distjax.checkpoint.specs import NUMBER_TYPES, Spec, array_spec, dtype_name
from distjax.checkpoint.state_objects import keeps_own_state
from distjax.errors import AggregationError, CheckpointError, describe_value, message
from distjax.placement.host_values import require_no_mask
from distjax.placement.locality import is_host_memory
from distjax.placement.per_replica import PerReplica, is_per_replica
from distjax.placement.transfer import transfer
from distjax.typing import PyTree
from distjax.variables.casting import cast
from distjax.variables.policy import Combine
from distjax.variables.variable import Variable


def pause_writers(leaves: Iterable[Leaf]) -> contextlib.ExitStack:
    """Returns a context in which the variables among `leaves` are consistent."""
    stack = contextlib.ExitStack()
    for strategy in {x.value.strategy: None for x in leaves if isinstance(x, VariableLeaf)}:
        stack.enter_context(strategy.extended.pause_writers())
    return stack


class Leaf(abc.ABC):
    """One leaf of a tree, under its key.

    Attributes:
      key: the path to it, joined by "/".
      value: the leaf's value.
      lives: its description in the checkpoint's JSON.
      setting: the setting, as code, of the object that keeps it, which its value depends on; "" for
        none.
    """

    key: str
    value: Any
    lives: str
    setting: str = ""

    @property
    @abc.abstractmethod
    def spec(self) -> Spec:
        """The leaf's form, shape and dtype."""

    @abc.abstractmethod
    def snapshot(self) -> Any:
        """Returns the current value: an array for orbax, or JSON."""

    @abc.abstractmethod
    def sharding(self) -> Sharding | None:
        """Returns the sharding to read the saved array into; None: host memory."""

    @abc.abstractmethod
    def convert(self, saved: PyTree) -> Any:
        """Converts a saved array (None: an empty one) or JSON value to what `put` takes.

        Raises:
          OverflowError: it has values that this leaf's dtype cannot hold.
        """

    @abc.abstractmethod
    def put(self, value: PyTree) -> Any:
        """Returns the leaf's value after a restore: changed in place, or a new one.

        Args:
          value: what `convert` returned.
        """


def make_leaf(key: str, value: PyTree, setting: str) -> Leaf:
    """Returns the leaf for `value`.

    Args:
      key: the path to it.
      value: a value of any kind.
      setting: of the object that keeps it: see `Leaf`.

    Raises:
      CheckpointError: a value of no known kind.
    """
    if isinstance(value, Variable):
        return VariableLeaf(key, value, setting)
    if is_per_replica(value):
        return PerReplicaLeaf(key, value)
    if type(value) in NUMBER_TYPES.values():
        return NumberLeaf(key, value)
    if keeps_own_state(value):
        return StateLeaf(key, value)
    if _is_array(value):
        return ArrayLeaf(key, value)
    raise CheckpointError(
        message(
            f"{key!r} needs to be something that a checkpoint can hold",
            got=describe_value(value),
            why="a checkpoint holds variables, arrays, PerReplica values, numbers, text, Flax NNX "
            "objects, iterators with get_state and set_state, and objects with such attributes",
            fix="leave it out of the tree, or give its class a method kept_variables() that "
            "returns a tree of the variables in it",
        )
    )


def _is_array(value: object) -> bool:
    if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
        return True
    if not isinstance(value, (np.ndarray, np.generic)):
        return False
    if value.dtype.char in "gG":  # long doubles, which cannot be written
        return False
    return value.dtype.kind in "biufc" or jnp.issubdtype(value.dtype, jnp.number)


@dataclasses.dataclass(frozen=True)
class VariableLeaf(Leaf):
    """A variable: its one value in cross-replica context, whatever its storage."""

    key: str
    value: Variable
    setting: str = ""

    @property
    def spec(self) -> Spec:
        v = self.value
        return Spec("array", v.shape, dtype_name(v.dtype))

    @property
    def lives(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        v = self.value
        return f"{v.layout.kind} variable, {v.synchronization.name} {v.aggregation.name}"

    def require_one_value(self, action: str) -> None:
        """Raises an AggregationError if nothing says how to combine the components."""
        if self.value.policy.cross_read is not Combine.REFUSE:
            return
        raise AggregationError(
            message(
                f"{action} of variable {self.value.name!r} needs an aggregation",
                got=f"ON_READ with aggregation NONE, at key {self.key!r}",
                why="a checkpoint holds one value per variable, so that it fits any number of "
                "replicas, and nothing says how the components combine",
                fix="aggregation=dj.VariableAggregation.SUM (or MEAN, ONLY_FIRST_REPLICA); or "
                "leave it out of the tree",
            )
        )

    def snapshot(self) -> Any:
        return _as_writable(self.value.value)

    def sharding(self) -> Sharding | None:
        # An encoded or per-replica array gets its layout from the assignment.
        v = self.value
        is_value = v.layout.unencoded(v.shape) == v.layout and not is_host_memory(v.sharding)
        return v.sharding if is_value and not self.spec.is_key else None

    def convert(self, saved: PyTree) -> Any:
        return _array(self.spec, saved)

    def put(self, value: PyTree) -> Variable:
        self.value.write(value)
        return self.value


@dataclasses.dataclass(frozen=True)
class ArrayLeaf(Leaf):
    """An array, a PRNG key array, or the shape and dtype of one."""

    key: str
    value: Any
    lives = "array"

    @property
    def spec(self) -> Spec:
        return array_spec(self.value)

    def snapshot(self) -> Any:
        if isinstance(self.value, jax.ShapeDtypeStruct):
            raise CheckpointError(
                message(
                    f"save of {self.key!r} needs a value",
                    got=f"the shape and dtype alone: {self.value}",
                    why="they say what to restore, not what to save",
                    fix="checkpointer.save(step, tree) with the arrays",
                )
            )
        return _as_writable(self.value)

    def require_of_all_processes(self) -> None:
        """Raises a CheckpointError for an array on devices of this process alone."""
        if isinstance(self.value, jax.Array) and self.value.is_fully_addressable:
            raise CheckpointError(
                message(
                    f"save of {self.key!r} needs an array of all processes",
                    got=f"{describe_value(self.value)} on devices of this process alone",
                    why="every process has one of its own, and the checkpoint of a job has one",
                    fix="strategy.extended.broadcast_to(x) where it is the same on all of them; "
                    "a checkpoint of this process alone: Checkpointer(directory, local=True)",
                )
            )

    def sharding(self) -> Sharding | None:
        target = self._place()
        if target is None or self.spec.is_key:
            return None
        default = next(iter(target.device_set)).default_memory().kind
        return target if target.memory_kind in (None, default) else None

    def _place(self) -> Sharding | None:
        """Returns the sharding of the restored array; None: wherever JAX puts it.

        An uncommitted array stays uncommitted, or it could no longer be combined
        with arrays of a strategy.
        """
        if isinstance(self.value, jax.Array):
            return self.value.sharding if self.value.committed else None
        return getattr(self.value, "sharding", None)

    def convert(self, saved: PyTree) -> Any:
        return _array(self.spec, saved)

    def put(self, value: PyTree) -> Any:
        if isinstance(self.value, np.generic):
            return np.asarray(value)[()]
        if isinstance(self.value, np.ndarray):
            return np.asarray(value)
        array, place = jnp.asarray(value), self._place()
        return array if place is None else transfer(array, place)


@dataclasses.dataclass(frozen=True)
class PerReplicaLeaf(Leaf):
    """A PerReplica with all its values; it fits only the same number of replicas."""

    key: str
    value: PerReplica
    lives = "per_replica"

    @property
    def spec(self) -> Spec:
        return array_spec(self.value.stacked, self.value.num_replicas)

    def snapshot(self) -> Any:
        return _as_writable(self.value.stacked)

    def sharding(self) -> Sharding | None:
        topology = self.value.topology
        return topology.per_replica if topology.is_placed and not self.spec.is_key else None

    def convert(self, saved: PyTree) -> Any:
        return _array(self.spec, saved)

    def put(self, value: PyTree) -> PerReplica:
        topology = self.value.topology
        if topology.is_placed:
            value = transfer(value, topology.per_replica)
        return PerReplica(value, topology)


@dataclasses.dataclass(frozen=True)
class NumberLeaf(Leaf):
    """A Python number or text."""

    key: str
    value: Any
    lives = "number"

    @property
    def spec(self) -> Spec:
        return Spec("number", dtype=type(self.value).__name__)

    def snapshot(self) -> Any:
        return json_values.encode(self.value)

    def sharding(self) -> None:
        return None

    def convert(self, saved: PyTree) -> Any:
        value = saved.item() if hasattr(saved, "item") else json_values.decode(saved)
        return type(self.value)(value)

    def put(self, value: PyTree) -> Any:
        return value


@dataclasses.dataclass(frozen=True)
class StateLeaf(Leaf):
    """An object with `get_state` and `set_state`: the position in the data."""

    key: str
    value: Any
    lives = "iterator"

    @property
    def spec(self) -> Spec:
        return Spec("state")

    def snapshot(self) -> Any:
        try:
            return json_values.encode(self.value.get_state())
        except TypeError as error:
            raise CheckpointError(
                message(
                    f"save of {self.key!r} needs a state of numbers, text, bytes, lists, tuples, "
                    "dicts and numpy arrays",
                    got=f"{type(self.value).__name__}.get_state() with {error}",
                    why="it is written as JSON, which any later version can read",
                    fix="return such a state from get_state(), or leave it out of the tree",
                )
            ) from error

    def sharding(self) -> None:
        return None

    def convert(self, saved: PyTree) -> Any:
        return json_values.decode(saved)

    def put(self, value: PyTree) -> Any:
        self.value.set_state(value)
        return self.value


# -- arrays -------------------------------------------------------------------


#: Dtypes unknown to tensorstore, through which orbax writes. Restoring converts them back.
_WRITTEN_AS_BYTES = (jnp.dtype(jnp.uint2), jnp.dtype(jnp.uint4))


def _as_writable(value: PyTree) -> Any:
    """Returns the array for orbax to write, with PRNG keys as their data.

    No copy is needed here: orbax copies numpy arrays and accelerator arrays before its
    `save` returns; on a CPU, JAX does not let a program donate a buffer that numpy
    views (measured with 0.10.2 and 0.12; pinned by tests).
    """
    if not isinstance(value, jax.Array):
        require_no_mask(value, "a value that is saved")
        value = np.asarray(value)
    if value.dtype in _WRITTEN_AS_BYTES:
        return value.astype(np.uint8)
    if not isinstance(value, jax.Array):
        return value
    return jax.random.key_data(value) if jax_compat.is_key_dtype(value.dtype) else value


def _array(spec: Spec, saved: PyTree) -> Any:
    """Returns the array for `spec` from its saved form (None: an empty array)."""
    if spec.is_key:
        if saved is None:
            one = jax.random.key_data(jax.random.key(0, impl=spec.key_impl))
            saved = np.zeros((*spec.stored_shape, *one.shape), np.uint32)
        data = saved if hasattr(saved, "dtype") else json_values.decode(saved)
        return jax.random.wrap_key_data(jnp.asarray(data), impl=spec.key_impl)
    if saved is None:
        return np.zeros(spec.stored_shape, jnp.dtype(spec.dtype))
    if not isinstance(saved, (jax.Array, np.ndarray)):
        saved = np.asarray(json_values.decode(saved))
    return cast(saved, spec.dtype)
