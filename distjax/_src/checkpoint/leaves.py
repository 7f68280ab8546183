"""The leaves of a tree: how each kind is saved and put back."""

from __future__ import annotations

import abc
import base64
import contextlib
import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from distjax._src import jax_compat
from distjax._src.checkpoint.matching import NUMBER_TYPES, Spec, array_spec
from distjax._src.placement import PerReplica, is_per_replica, require_no_mask, transfer
from distjax._src.traces import is_struct
from distjax._src.typing import PyTree
from distjax._src.variables.conversion import cast
from distjax._src.variables.layouts import PartitionedLayout
from distjax._src.variables.policy import OTHER_AGGREGATIONS, Combine
from distjax._src.variables.variable import Variable
from distjax.errors import AggregationError, CheckpointError, describe_value, require


def pause_writers(leaves: Iterable[Leaf]) -> contextlib.ExitStack:
    """Returns a context in which the variables among `leaves` are consistent."""
    stack = contextlib.ExitStack()
    for strategy in {x.value.strategy: None for x in leaves if isinstance(x, VariableLeaf)}:
        stack.enter_context(strategy.extended.pause_writers())
    return stack


@dataclasses.dataclass(frozen=True)
class Leaf(abc.ABC):
    """One leaf of a tree, under its key: the path to it, joined by "/"."""

    key: str
    value: Any
    _lives: ClassVar[str]

    @property
    def lives(self) -> str:
        """Its description in the checkpoint's JSON."""
        return self._lives

    @property
    @abc.abstractmethod
    def spec(self) -> Spec:
        """The leaf's form, shape and dtype."""

    @abc.abstractmethod
    def snapshot(self) -> Any:
        """Returns the current value: an array for orbax, or JSON."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the array as it lives: that of the value, or padded."""
        return self.spec.stored_shape

    @property
    def place(self) -> Sharding | None:
        """The sharding of the restored array; None: wherever JAX puts it, or there is none."""
        return None

    def sharding(self) -> Sharding | None:
        """Returns the sharding to read the saved array into; None: host memory."""
        place = self.place
        if place is None or self.spec.is_key:
            return None
        default = next(iter(place.device_set)).default_memory().kind
        return place if place.memory_kind in (None, default) else None

    def convert(self, saved: PyTree) -> Any:
        """Returns what `put` takes: a saved value (None: an empty array) in the dtype of the leaf.

        Changes nothing; raises an OverflowError for values that the dtype cannot hold.
        """
        spec = self.spec
        if spec.is_key:
            if saved is None:
                one = jax.random.key_data(jax.random.key(0, impl=spec.key_impl))
                saved = np.zeros((*spec.stored_shape, *one.shape), np.uint32)
            data = saved if hasattr(saved, "dtype") else decode(saved)
            return jax.random.wrap_key_data(jnp.asarray(data), impl=spec.key_impl)
        if saved is None:
            return np.zeros(spec.stored_shape, jnp.dtype(spec.dtype))
        if not isinstance(saved, (jax.Array, np.ndarray)):
            saved = np.asarray(decode(saved))
        return cast(saved, spec.dtype)

    @abc.abstractmethod
    def put(self, value: PyTree) -> Any:
        """Returns the leaf's value after a restore, from a converted one: changed, or a new one."""


def make_leaf(key: str, value: PyTree) -> Leaf:
    """Returns the leaf for `value`; raises a CheckpointError for one of no known kind."""
    kinds = {
        VariableLeaf: isinstance(value, Variable),
        PerReplicaLeaf: is_per_replica(value),
        NumberLeaf: type(value) in NUMBER_TYPES.values(),
        StateLeaf: keeps_own_state(value),
        ArrayLeaf: _is_array(value),
    }
    for kind, is_it in kinds.items():
        if is_it:
            return kind(key, value)
    raise CheckpointError(
        f"{key!r} needs to be something that a checkpoint can hold",
        got=describe_value(value),
        why="a checkpoint holds variables, arrays, PerReplica values, numbers, text, Flax NNX "
        "objects, iterators with get_state and set_state, and objects with such attributes",
        fix="of a dataset, its iterator: iter(dataset); otherwise leave it out of the tree, or "
        "give its class a method kept_variables() that returns a tree of the variables in it",
    )


def keeps_own_state(value: object) -> bool:
    """Returns whether `value` has a state of its own, as data iterators do.

    Only its class is looked at, since reading an attribute of an arbitrary object may run code.
    """
    methods = (getattr(type(value), name, None) for name in ("get_state", "set_state"))
    return all(callable(method) for method in methods)


def _is_array(value: object) -> bool:
    if isinstance(value, jax.Array) or is_struct(value):
        return True
    if not isinstance(value, (np.ndarray, np.generic)):
        return False
    if value.dtype.char in "gG":  # long doubles, which cannot be written
        return False
    return value.dtype.kind in "biufc" or jnp.issubdtype(value.dtype, jnp.number)


class VariableLeaf(Leaf):
    """A variable: its one value in cross-replica context, whatever its storage."""

    value: Variable

    @property
    def spec(self) -> Spec:
        return array_spec(self.value)

    @property
    def lives(self) -> str:
        v = self.value
        return f"{v.layout.kind} variable, {v.synchronization.name} {v.aggregation.name}"

    def require_one_value(self, action: str) -> None:
        """Raises an AggregationError if nothing says how to combine the components."""
        require(
            self.value.policy.cross_read is not Combine.REFUSE,
            f"{action} of variable {self.value.name!r} needs an aggregation",
            got=f"ON_READ with aggregation NONE, at key {self.key!r}",
            why="a checkpoint holds one value per variable, so that it fits any number of "
            "replicas, and nothing says how the components combine",
            fix=f"aggregation=dj.VariableAggregation.SUM {OTHER_AGGREGATIONS}; or "
            "leave it out of the tree",
            error=AggregationError,
        )

    @property
    def stored_shape(self) -> tuple[int, ...]:
        layout, shape = self.value.layout, self.value.shape
        return layout.stored_shape(shape) if isinstance(layout, PartitionedLayout) else shape

    @property
    def _is_padded(self) -> bool:
        return self.stored_shape != self.value.shape

    def snapshot(self) -> Any:
        # Each shard is written from where it is: the value of padded ones would be whole.
        v = self.value
        return _as_writable(v.stored.hand_out() if self._is_padded else v.value)

    @property
    def place(self) -> Sharding | None:
        # An encoded or per-replica array gets its layout from the assignment.
        v = self.value
        is_as_it_is = self._is_padded or v.layout.unencoded(v.shape) == v.layout
        return v.sharding if is_as_it_is else None

    def put(self, value: PyTree) -> Variable:
        if self._is_padded and value.shape == self.stored_shape:
            self.value.stored.swap(transfer(value, self.value.sharding))
        else:
            self.value.write(value)
        return self.value


class ArrayLeaf(Leaf):
    """An array, a PRNG key array, or the shape and dtype of one."""

    _lives = "array"

    @property
    def spec(self) -> Spec:
        return array_spec(self.value)

    def snapshot(self) -> Any:
        require(
            not is_struct(self.value),
            f"save of {self.key!r} needs a value",
            got=f"the shape and dtype alone: {describe_value(self.value)}",
            why="they say what to restore, not what to save",
            fix="checkpointer.save(step, tree) with the arrays",
            error=CheckpointError,
        )
        return _as_writable(self.value)

    def require_of_all_processes(self) -> None:
        """Raises a CheckpointError for an array on devices of this process alone."""
        require(
            not (isinstance(self.value, jax.Array) and self.value.is_fully_addressable),
            f"save of {self.key!r} needs an array of all processes",
            got=f"{describe_value(self.value)} on devices of this process alone",
            why="every process has one of its own, and the checkpoint of a job has one",
            fix="strategy.broadcast(x) where it is the same on all of them; "
            "a checkpoint of this process alone: Checkpointer(directory, local=True)",
            error=CheckpointError,
        )

    @property
    def place(self) -> Sharding | None:
        # An uncommitted array stays uncommitted, or it could no longer be combined with arrays of a
        # strategy.
        is_anywhere = isinstance(self.value, jax.Array) and not self.value.committed
        return None if is_anywhere else getattr(self.value, "sharding", None)

    def put(self, value: PyTree) -> Any:
        if isinstance(self.value, (np.ndarray, np.generic)):
            array = np.asarray(value)
            return array if isinstance(self.value, np.ndarray) else array[()]
        array = jnp.asarray(value)
        return array if self.place is None else transfer(array, self.place)


class PerReplicaLeaf(Leaf):
    """A PerReplica with all its values; it fits only the same number of replicas."""

    value: PerReplica
    _lives = "per_replica"

    @property
    def spec(self) -> Spec:
        return array_spec(self.value.stacked, self.value.num_replicas)

    def snapshot(self) -> Any:
        return _as_writable(self.value.stacked)

    @property
    def place(self) -> Sharding | None:
        return self.value.topology.per_replica

    def put(self, value: PyTree) -> PerReplica:
        return PerReplica(transfer(value, self.place), self.value.topology)


class NumberLeaf(Leaf):
    """A Python number or text."""

    _lives = "number"

    @property
    def spec(self) -> Spec:
        return Spec("number", dtype=type(self.value).__name__)

    def snapshot(self) -> Any:
        return encode(self.value)

    def convert(self, saved: PyTree) -> Any:
        return type(self.value)(saved.item() if hasattr(saved, "item") else decode(saved))

    def put(self, value: PyTree) -> Any:
        return value


class StateLeaf(Leaf):
    """An object with `get_state` and `set_state`: the position in the data."""

    _lives = "iterator"

    @property
    def spec(self) -> Spec:
        return Spec("state")

    def snapshot(self) -> Any:
        try:
            return encode(self.value.get_state())
        except TypeError as error:
            raise CheckpointError(
                f"save of {self.key!r} needs a state of numbers, text, bytes, lists, tuples, "
                "dicts and numpy arrays",
                got=f"{type(self.value).__name__}.get_state() with {error}",
                why="it is written as JSON, which any later version can read",
                fix="return such a state from get_state(), or leave it out of the tree",
            ) from error

    def convert(self, saved: PyTree) -> Any:
        return decode(saved)

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


# -- states and numbers as JSON ------------------------------------------------

_PLAIN = (bool, int, float, str, type(None))


def encode(value: object) -> Any:
    """Returns `value` as JSON; raises a TypeError for what has no form there."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return {type(value).__name__: [encode(x) for x in value]}
    if type(value) is dict:
        return {"dict": [[encode(k), encode(v)] for k, v in value.items()]}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        data = base64.b64encode(np.asarray(value).tobytes()).decode()
        return {"numpy": [data, value.dtype.str, list(value.shape), isinstance(value, np.generic)]}
    raise TypeError(f"a {type(value).__name__} has no form in JSON")


def encode_array(array: np.ndarray) -> Any:
    """Returns an array as JSON; dtypes that numpy does not have become float32."""
    return encode(array if array.dtype.kind in "biufc" else array.astype(np.float32))


def decode(saved: PyTree) -> Any:
    """Returns the value passed to `encode`."""
    if not isinstance(saved, dict):
        return saved
    ((kind, content),) = saved.items()
    if kind == "complex":
        return complex(*content)
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "dict":
        return {decode(k): decode(v) for k, v in content}
    if kind == "numpy":
        data, dtype, shape, is_scalar = content
        array = np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
        return array[()] if is_scalar else array
    return (list if kind == "list" else tuple)(decode(x) for x in content)
