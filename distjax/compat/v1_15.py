"""Names of the late replica API, TensorFlow 1.15.

Example:
  >>> from distjax.compat import v1_15
  >>> strategy = v1_15.Strategy(dj.VirtualStrategy(2))
  >>> def fn(three):
  ...     context = v1_15.get_replica_context()
  ...     v = three + context.replica_id_in_sync_group
  ...     return context.all_reduce("sum", v) + v
  >>> merged_results = strategy.experimental_run_v2(fn, args=[3])
  >>> [int(v) for v in strategy.experimental_local_results(merged_results)]
  [10, 11]
"""

from __future__ import annotations

from distjax._src.context import frames, has_strategy, in_cross_replica_context
from distjax._src.data.options import InputContext
from distjax._src.placement import PerReplica
from distjax._src.strategies.steps import MultiStepContext
from distjax._src.typing import ReduceOp, VariableAggregation, VariableSynchronization
from distjax._src.variables.variable import Variable
from distjax.compat import v1_13
from distjax.compat._renaming import (
    Adapter,
    Renamed,
    ReplicaContextAdapter,
    StrategyAdapter,
    constructors,
    getters,
)
from distjax.compat.v1_13 import StrategyExtended

__all__ = [
    "InputContext",
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
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]


class Strategy(StrategyAdapter):
    """A strategy under the names of 1.15.

    Args:
      strategy: a distjax strategy.
    """

    experimental_run_v2 = Renamed("run")
    experimental_local_results = unwrap = Renamed("local_results")
    experimental_distribute_dataset = Renamed("distribute_dataset")
    experimental_distribute_datasets_from_function = Renamed(
        "distribute_datasets_from_function", dataset_fn="fn"
    )
    extended = v1_13.Strategy.extended
    make_dataset_iterator = v1_13.Strategy.make_dataset_iterator
    make_input_fn_iterator = v1_13.Strategy.make_input_fn_iterator
    experimental_run = v1_13.Strategy.experimental_run


class ReplicaContext(ReplicaContextAdapter):
    """A replica context whose strategy uses the names of 1.15."""

    strategy_type = Strategy


MirroredStrategy, OneDeviceStrategy, ParameterServerStrategy = constructors(Strategy)
get_strategy, get_replica_context = getters(Strategy, ReplicaContext)


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """`dj.set_strategy`."""
    frames.set_strategy(strategy.wrapped if isinstance(strategy, Adapter) else strategy)
