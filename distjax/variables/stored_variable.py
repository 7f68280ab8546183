"""StoredVariable: a variable's attributes and array, without read and write rules."""

from __future__ import annotations

from typing import Any, Protocol

import jax
from jax.sharding import Sharding

from distjax.context.contracts import ExtendedLike, StrategyLike
from distjax.jax_compat import ShapedArray, as_uncommitted, aval_of
from distjax.modes import VariableAggregation, VariableSynchronization
from distjax.placement.transfer import transfer
from distjax.traced_types import as_traced, type_of
from distjax.typing import ArrayLike
from distjax.variables.layouts import Layout, VariablePlacement
from distjax.variables.policy import Policy
from distjax.variables.storage import Stored, StoredArray, VariableLock


class OwningStrategy(StrategyLike, Protocol):
    """The strategy that a variable belongs to."""

    @property
    def extended(self) -> ExtendedForVariables:
        """The part that manages its variables."""
        ...


class ExtendedForVariables(ExtendedLike, Protocol):
    """A strategy's `extended`, as its variables need it."""

    variable_lock: VariableLock

    @property
    def placement(self) -> VariablePlacement: ...
    def make_storage(self, variable: StoredVariable) -> StoredArray: ...
    def copy_variable(self, variable: StoredVariable) -> Any: ...
    def split_components(
        self, variable: StoredVariable, stored: jax.Array
    ) -> tuple[jax.Array, ...]: ...


class StoredVariable:
    """The part of `Variable` that lower modules use; every instance is a `Variable`."""

    strategy: OwningStrategy
    shape: tuple[int, ...]
    dtype: Any
    name: str
    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    trainable: bool
    policy: Policy
    layout: Layout
    stored: StoredArray
    serial_number: int

    @property
    def sharding(self) -> Sharding | None:
        """Where the storage lives; None: on JAX's default device, uncommitted."""
        return self.layout.sharding

    @property
    def spans_processes(self) -> bool:
        """Whether the storage lies on devices of several processes."""
        return self.sharding is not None and not self.sharding.is_fully_addressable

    @property
    def global_shape(self) -> tuple[int, ...]:
        """[R, ...] for a variable with one component per replica, else `shape`."""
        return self.layout.local_form.global_shape(self.shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what one replica holds."""
        return self.layout.local_form.local_shape(self.shape)

    @property
    def storage(self) -> Stored | None:
        """The stored array in the layout's stored form, or None if there is none."""
        return self.stored.read()

    @property
    def stored_value(self) -> jax.Array:
        """The global form of the stored array; outside of traces only."""
        array: Any = self.stored.require()
        return self.layout.from_stored(array, self.shape)

    def global_type(self, stored: Stored | None) -> ShapedArray:
        """Returns the type that the global value has in a trace, for a stored array or None."""
        plain = ShapedArray(self.global_shape, self.dtype)
        if not isinstance(stored, jax.Array) or type_of(stored) == aval_of(stored):
            return plain
        value = jax.make_jaxpr(lambda x: self.layout.from_stored(x, self.shape))(stored)
        return as_traced(value.out_avals[0])

    def store(self, value: jax.Array) -> None:
        """Stores `value`, which is in global form and which nobody else may hold."""
        stored = self.layout.to_stored(value)
        is_array = isinstance(stored, jax.Array)
        # Always committed to its sharding, as what a step returns is: else the step compiles twice.
        in_place = is_array and stored.committed and stored.sharding == self.sharding
        if not in_place and not (is_array and self.sharding is None):
            stored = transfer(stored, self.sharding)
        self.stored.swap(stored)

    def on_own_devices(self, value: ArrayLike) -> Any:
        """Returns `value` on devices where it can be combined with the stored array."""
        if not isinstance(value, jax.Array) or not value.committed or self.sharding is None:
            return value
        devices = self.sharding.device_set
        return value if value.sharding.device_set == devices else as_uncommitted(value)

    def require_initialized(self) -> None:
        """Raises if there is no value: never made, lost, or deleted."""
        if not self.stored.is_being_made:
            self.stored.require_made()
