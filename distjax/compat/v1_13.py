"""Names of the early replica API, TensorFlow 1.13.

Example:
  >>> from distjax.compat import v1_13
  >>> distribution = v1_13.Strategy(dj.VirtualStrategy(2))
  >>> def merge_fn(distribution, three_plus_replica_id):
  ...     return sum(distribution.unwrap(three_plus_replica_id))
  >>> def fn(three):
  ...     replica_ctx = v1_13.get_replica_context()
  ...     v = three + replica_ctx.replica_id_in_sync_group
  ...     return replica_ctx.merge_call(merge_fn, args=(v,)) + v
  >>> with distribution.scope():
  ...     merged_results = distribution.call_for_each_replica(fn, args=[3])
  >>> [int(v) for v in distribution.unwrap(merged_results)]
  [10, 11]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from distjax.compat import v1_12
from distjax.compat.adapters import (
    Adapter,
    ReplicaContextAdapter,
    StrategyAdapter,
    adapt_or_none,
    iterator_of,
)
from distjax.context import scoping
from distjax.context.scoping import has_strategy, in_cross_replica_context
from distjax.modes import ReduceOp, VariableAggregation, VariableSynchronization
from distjax.placement.per_replica import PerReplica
from distjax.servers.strategy import ParameterServerStrategy as _ParameterServer
from distjax.strategies.mirrored import MirroredStrategy as _Mirrored
from distjax.strategies.one_device import OneDeviceStrategy as _OneDevice
from distjax.strategies.steps import MultiStepContext
from distjax.typing import DatasetLike, KeywordArgs, PositionalArgs, PyTree
from distjax.variables.variable import Variable

__all__ = [
    "MirroredStrategy",
    "MultiStepContext",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PerReplica",
    "ReduceOp",
    "ReplicaContext",
    "Strategy",
    "StrategyExtended",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]


class StrategyExtended(Adapter):
    """A `StrategyExtended` under the names of 1.13; most are distjax's own."""

    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[..., Any],
        iterator: Iterator[PyTree],
        iterations: int = 1,
        initial_loop_values: Mapping[str, PyTree] | None = None,
    ) -> Any:
        """`run_steps_on_iterator`."""
        return self.wrapped.run_steps_on_iterator(fn, iterator, iterations, initial_loop_values)

    @property
    def experimental_between_graph(self) -> bool:
        """`between_graph`."""
        return self.wrapped.between_graph

    @property
    def experimental_require_static_shapes(self) -> bool:
        """`require_static_shapes`."""
        return self.wrapped.require_static_shapes

    @property
    def experimental_should_init(self) -> bool:
        """`should_init`."""
        return self.wrapped.should_init


class Strategy(StrategyAdapter):
    """A strategy under the names of 1.13.

    Args:
      strategy: a distjax strategy.
    """

    @property
    def extended(self) -> StrategyExtended:
        """The methods for distribution-aware algorithms."""
        return StrategyExtended(self.wrapped.extended)

    def make_dataset_iterator(self, dataset: DatasetLike) -> Any:
        """``iter(distribute_dataset(dataset))``, with `get_next`."""
        return iterator_of(self.wrapped.distribute_dataset(dataset))

    def distribute_dataset(self, dataset: DatasetLike) -> v1_12.PerDeviceDataset:
        """`dj.Strategy.distribute_dataset`, with one-shot iterators (deprecated)."""
        return v1_12.PerDeviceDataset(self.wrapped.distribute_dataset(dataset))

    def make_input_fn_iterator(self, input_fn: Callable[[Any], Any]) -> Any:
        """``iter(distribute_datasets_from_function(input_fn))``."""
        return iterator_of(self.wrapped.distribute_datasets_from_function(input_fn))

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: PositionalArgs = (), kwargs: KeywordArgs = None
    ) -> Any:
        """`extended.call_for_each_replica`, called as in the example of TF 1.13."""
        return self.wrapped.extended.call_for_each_replica(fn, args, kwargs)

    def experimental_run(
        self, fn: Callable[..., Any], input_iterator: Iterator[PyTree] | None = None
    ) -> Any:
        """`dj.Strategy.run`, on the next element of the iterator if given."""
        args = () if input_iterator is None else (next(input_iterator),)
        return self.wrapped.run(fn, args)

    def experimental_initialize(self) -> list[Any]:
        """Returns []: nothing is left to initialize."""
        return []

    def experimental_finalize(self) -> list[Any]:
        """Returns []: nothing is left to finalize."""
        return []

    broadcast = v1_12.DistributionStrategy.broadcast
    unwrap = v1_12.DistributionStrategy.unwrap
    group = v1_12.DistributionStrategy.group


class ReplicaContext(ReplicaContextAdapter):
    """A replica context whose strategy uses the names of 1.13."""

    strategy_type = Strategy


def MirroredStrategy(devices: Sequence[jax.Device] | None = None) -> Strategy:
    """`dj.MirroredStrategy`."""
    return Strategy(_Mirrored(devices))


def OneDeviceStrategy(device: jax.Device | str | None = None) -> Strategy:
    """`dj.OneDeviceStrategy`."""
    return Strategy(_OneDevice(device))


def ParameterServerStrategy(workers: int | None = None) -> Strategy:
    """`dj.ParameterServerStrategy`; pass its `wrapped` to `dj.Coordinator`."""
    return Strategy(_ParameterServer(workers))


def get_replica_context() -> ReplicaContext | None:
    """`dj.get_replica_context`."""
    return adapt_or_none(ReplicaContext, scoping.get_replica_context())


def get_strategy() -> Strategy:
    """`dj.get_strategy`."""
    return Strategy(scoping.get_strategy())
