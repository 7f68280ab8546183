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

from collections.abc import Callable, Iterator
from typing import Any

from distjax._src.context import has_strategy, in_cross_replica_context
from distjax._src.placement import PerReplica
from distjax._src.strategies.steps import MultiStepContext
from distjax._src.typing import (
    DatasetLike,
    PyTree,
    ReduceOp,
    VariableAggregation,
    VariableSynchronization,
)
from distjax._src.variables.variable import Variable
from distjax.compat import v1_12
from distjax.compat._renaming import (
    Adapter,
    Renamed,
    ReplicaContextAdapter,
    StrategyAdapter,
    constructors,
    getters,
    iterator_of,
)

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

    experimental_run_steps_on_iterator = Renamed("run_steps_on_iterator")
    experimental_between_graph = Renamed("between_graph")
    experimental_require_static_shapes = Renamed("require_static_shapes")
    experimental_should_init = Renamed("should_init")


class Strategy(StrategyAdapter):
    """A strategy under the names of 1.13.

    Args:
      strategy: a distjax strategy.
    """

    call_for_each_replica = Renamed("extended.call_for_each_replica")
    broadcast = v1_12.DistributionStrategy.broadcast
    unwrap = v1_12.DistributionStrategy.unwrap
    group = v1_12.DistributionStrategy.group
    experimental_initialize = experimental_finalize = StrategyAdapter.nothing_to_do

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

    def experimental_run(
        self, fn: Callable[..., Any], input_iterator: Iterator[PyTree] | None = None
    ) -> Any:
        """`dj.Strategy.run`, on the next element of the iterator if given."""
        args = () if input_iterator is None else (next(input_iterator),)
        return self.wrapped.run(fn, args)


class ReplicaContext(ReplicaContextAdapter):
    """A replica context whose strategy uses the names of 1.13."""

    strategy_type = Strategy


MirroredStrategy, OneDeviceStrategy, ParameterServerStrategy = constructors(Strategy)
get_strategy, get_replica_context = getters(Strategy, ReplicaContext)
