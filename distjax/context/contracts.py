"""What a strategy is to the code that asks the context for it.

Protocols, since that code lies below the strategies. There are three of `ExtendedLike`:
`StrategyExtended`, the inside of the default strategy, and that of the reference
interpreter. Values and trees of values are the user's, and so `Any`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax

from distjax.placement.topology import Topology


class StrategyLike(Protocol):
    """A strategy: see `distjax.Strategy`."""

    @property
    def extended(self) -> ExtendedLike:
        """All that it can do."""
        ...

    @property
    def num_replicas_in_sync(self) -> int: ...
    def run(
        self, fn: Callable[..., Any], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any: ...
    def reduce(self, op: Any, value: Any, axis: Any = None, mask: Any = None) -> Any: ...


class VariableLike(Protocol):
    """A variable, as far as the context asks: see `distjax.Variable`."""

    @property
    def strategy(self) -> StrategyLike:
        """The strategy that it belongs to."""
        ...


class ExtendedLike(Protocol):
    """The inside of a strategy: see the methods of `distjax.StrategyExtended`."""

    is_default: bool
    wraps: bool
    strategy: Any

    def bind(self, strategy: Any) -> None:
        """Says of which strategy this is the inside."""
        ...

    # -- where things are -----------------------------------------------------

    @property
    def topology(self) -> Topology: ...
    @property
    def num_replicas(self) -> int: ...
    @property
    def public_axis_name(self) -> str | None: ...
    @property
    def worker_devices(self) -> tuple[jax.Device, ...]: ...
    @property
    def parameter_devices(self) -> tuple[jax.Device, ...]: ...

    # -- what the strategy says of itself -------------------------------------

    @property
    def require_static_shapes(self) -> bool: ...
    @property
    def between_graph(self) -> bool: ...
    @property
    def should_init(self) -> bool: ...
    @property
    def should_checkpoint(self) -> bool: ...
    @property
    def should_save_summary(self) -> bool: ...

    # -- replicas and what they hold ------------------------------------------

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any: ...
    def reduce(self, op: Any, value: Any, axis: Any = None, mask: Any = None) -> Any: ...
    def reduce_to(self, op: Any, value: Any, destinations: Any) -> Any: ...
    def batch_reduce_to(self, op: Any, value_destination_pairs: Any) -> list[Any]: ...
    def broadcast_to(self, value: Any, destinations: Any = None) -> Any: ...
    def gather(self, value: Any, axis: int) -> Any: ...
    def local_results(self, value: Any) -> tuple[Any, ...]: ...

    # -- input ----------------------------------------------------------------

    def distribute_values_from_function(self, fn: Callable[[Any], Any]) -> Any: ...
    def distribute_dataset(self, dataset: Any, options: Any = None) -> Any: ...
    def distribute_datasets_from_function(
        self, fn: Callable[[Any], Any], options: Any = None
    ) -> Any: ...

    # -- variables ------------------------------------------------------------

    def create_variable(
        self, initial_value: Any, *, trainable: bool | None, name: str, dtype: Any, modes: Any
    ) -> Any: ...
    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any: ...
    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any: ...
    def non_slot_devices(self, var_list: Sequence[Any]) -> Any: ...
    def colocate_vars_with(self, colocate_with_variable: Any) -> AbstractContextManager[None]: ...
    def read_var(self, v: Any) -> jax.Array: ...
    def value_container(self, value: Any) -> Any: ...
    def variable_created_in_scope(self, v: Any) -> bool: ...
