"""Names of the tower API, TensorFlow 1.12.

A tower is a replica. Functions take bare arguments: `f(fn, x)` where later
versions take `f(fn, args=(x,))`.

Example:
  >>> from distjax.compat import v1_12
  >>> distribution = v1_12.DistributionStrategy(dj.VirtualStrategy(2))
  >>> def merge_fn(distribution, three_plus_tower_id):
  ...     return sum(distribution.unwrap(three_plus_tower_id))
  >>> def fn(three):
  ...     tower_ctx = v1_12.get_tower_context()
  ...     v = three + tower_ctx.tower_id
  ...     return tower_ctx.merge_call(merge_fn, v) + v
  >>> with distribution.scope():
  ...     merged_results = distribution.call_for_each_tower(fn, 3)
  >>> [int(v) for v in distribution.unwrap(merged_results)]
  [10, 11]
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from distjax._src.context import Destinations, frames
from distjax._src.context import has_strategy as has_distribution_strategy
from distjax._src.placement import PerReplica as PerDevice
from distjax._src.strategies.steps import MultiStepContext
from distjax._src.typing import (
    DatasetLike,
    PyTree,
    ReduceOpLike,
    VariableAggregation,
    VariableSynchronization,
)
from distjax._src.variables.variable import Variable
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
    "DistributionStrategy",
    "MirroredStrategy",
    "MultiStepContext",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PerDevice",
    "TowerContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "get_cross_tower_context",
    "get_distribution_strategy",
    "get_tower_context",
    "has_distribution_strategy",
]


class DistributionStrategy(StrategyAdapter):
    """A strategy under the names of the tower API, including those of `extended`.

    Args:
      strategy: a distjax strategy.
    """

    call_for_each_tower = Renamed("extended.call_for_each_replica", 1, run_concurrently=None)
    update = Renamed("extended.update", 2, grouped="group")
    update_non_slot = Renamed("extended.update_non_slot", 2, grouped="group")
    broadcast = Renamed("extended.broadcast_to", tensor="value")
    batch_reduce = Renamed("extended.batch_reduce_to", aggregation="op")
    num_towers = num_replicas = Renamed("num_replicas_in_sync")
    initialize = finalize = StrategyAdapter.nothing_to_do

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__("extended") if name != "wrapped" else None
        return getattr(found, name) if hasattr(found, name) else super().__getattr__(name)

    def reduce(
        self, aggregation: ReduceOpLike, value: PyTree, destinations: Destinations = None
    ) -> Any:
        """`extended.reduce_to`, by default to where the value lives."""
        where = value if destinations is None else destinations
        return self.extended.reduce_to(aggregation, value, where)

    def unwrap(self, value: PyTree) -> list[Any]:
        """`dj.Strategy.local_results`, as a list."""
        return list(self.wrapped.local_results(value))

    def group(self, value: PyTree, name: str | None = None) -> Any:
        """Blocks until `value` has been computed, and returns it (there is no graph)."""
        return jax.block_until_ready(self.unwrap(value))

    def fetch(
        self,
        val: PyTree,
        destination: Destinations = None,
        fn: Callable[[PyTree], PyTree] = lambda x: x,
    ) -> Any:
        """Returns ``fn(val)`` on the host, for any locality; a list for a PerDevice."""
        frames.require_cross_replica(self.wrapped, "fetch")
        if isinstance(val, PerDevice):
            return jax.device_get([fn(x) for x in self.unwrap(val)])
        return jax.device_get(fn(self.read_var(val) if isinstance(val, Variable) else val))

    def distribute_dataset(self, dataset: DatasetLike) -> PerDeviceDataset:
        """`Strategy.distribute_dataset`, of a dataset or a function returning one."""
        made = dataset() if callable(dataset) else dataset
        return PerDeviceDataset(self.wrapped.distribute_dataset(made))

    def run_steps_on_dataset(
        self,
        fn: Callable[..., Any],
        iterator: Iterator[PyTree],
        iterations: int = 1,
        initial_loop_values: Mapping[str, PyTree] | None = None,
    ) -> Any:
        """`extended.run_steps_on_iterator`, on an iterator or a dataset's own."""
        own = iterator.iterator if isinstance(iterator, PerDeviceDataset) else iterator
        return self.extended.run_steps_on_iterator(fn, own, iterations, initial_loop_values)

    @property
    def is_single_tower(self) -> bool:
        """Whether there is only one tower."""
        return self.num_towers == 1


class PerDeviceDataset(Adapter):
    """A distributed dataset with the iterator methods of TF 1.12."""

    def make_one_shot_iterator(self) -> Any:
        """``iter(dataset)``, with `get_next`."""
        return iterator_of(self.wrapped)

    make_initializable_iterator = make_one_shot_iterator

    def get_next(self) -> Any:
        """Returns the next element of the dataset's single iterator."""
        return self.iterator.get_next()

    @functools.cached_property
    def iterator(self) -> Any:
        """The iterator that `get_next` reads from, created at its first use."""
        return iterator_of(self.wrapped)

    def __iter__(self) -> Any:
        return iter(self.wrapped)


class TowerContext(ReplicaContextAdapter):
    """A replica context under the names of the tower API.

    Args:
      context: a distjax replica context.
    """

    strategy_type = DistributionStrategy
    tower_id = Renamed("replica_id_in_sync_group")
    num_towers = Renamed("num_replicas_in_sync")
    is_single_tower = DistributionStrategy.is_single_tower
    distribution_strategy = ReplicaContextAdapter.strategy

    def merge_call(self, merge_fn: Callable[..., Any], *args: PyTree, **kwargs: PyTree) -> Any:
        """`ReplicaContext.merge_call`; `merge_fn` receives a DistributionStrategy."""
        return super().merge_call(merge_fn, args, kwargs)

    @property
    def device(self) -> Any:
        """The first of `ReplicaContext.devices`: one trace stands for all towers."""
        return self.wrapped.devices[0]


MirroredStrategy, OneDeviceStrategy, ParameterServerStrategy = constructors(DistributionStrategy)
get_distribution_strategy, get_tower_context = getters(DistributionStrategy, TowerContext)


def get_cross_tower_context() -> DistributionStrategy | None:
    """Returns the strategy in cross-tower context, else None."""
    return get_distribution_strategy() if frames.in_cross_replica_context() else None
