"""distjax: the programming model of tf.distribute for JAX.

Write a step as if for one replica; a strategy decides where replicas and variables
live, and `merge_call` communicates across replicas.
"""

import importlib as _importlib
from typing import Any as _Any

from distjax import diagnostics, errors, testing
from distjax import hooks as _hooks
from distjax import lint as lint  # installs itself
from distjax.cluster.joining import initialize
from distjax.cluster.ledger import phase
from distjax.collectives.reductions import CommunicationImplementation, CommunicationOptions
from distjax.context.expectation import expect
from distjax.context.scoping import (
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    set_strategy,
)
from distjax.data.dataset import DistributedDataset
from distjax.data.iterator import DistributedIterator
from distjax.data.options import Batch, InputContext, InputOptions
from distjax.diagnostics import check, explain, visualize
from distjax.modes import ReduceOp, VariableAggregation, VariableSynchronization
from distjax.placement.per_replica import PerReplica, is_per_replica
from distjax.placement.topology import REPLICA_AXIS, Locality
from distjax.program.jit import jit
from distjax.replica import lax
from distjax.replica.arguments import static
from distjax.replica.contexts import ReplicaContext
from distjax.servers.coordinator import Coordinator, RemoteValue
from distjax.servers.per_worker import PerWorkerDataset, PerWorkerValues
from distjax.servers.strategy import ParameterServerStrategy
from distjax.strategies.default import DefaultStrategy
from distjax.strategies.extended import StrategyExtended
from distjax.strategies.mirrored import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    TPUStrategy,
    VirtualStrategy,
)
from distjax.strategies.pmap import pmap
from distjax.strategies.sharded import CentralStorageStrategy, ShardedStrategy
from distjax.strategies.steps import MultiStepContext
from distjax.strategies.strategy import Strategy
from distjax.strategies.values import ValueContext, locality
from distjax.variables.variable import Variable

__version__ = "0.1.0"

# The layers: what the kernel calls at its events (`hooks`).
for _layer in ("programs", "devices", "data"):
    _importlib.import_module(f"distjax.cluster.{_layer}")
_hooks.object_layers["flax.nnx"] = "distjax.flax.bridge"

__all__ = [
    "REPLICA_AXIS",
    "Batch",
    "CentralStorageStrategy",
    "CommunicationImplementation",
    "CommunicationOptions",
    "Coordinator",
    "DefaultStrategy",
    "DistributedDataset",
    "DistributedIterator",
    "InputContext",
    "InputOptions",
    "Locality",
    "MirroredStrategy",
    "MultiStepContext",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PerReplica",
    "PerWorkerDataset",
    "PerWorkerValues",
    "ReduceOp",
    "RemoteValue",
    "ReplicaContext",
    "ShardedStrategy",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "VirtualStrategy",
    "check",
    "diagnostics",
    "errors",
    "expect",
    "explain",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "initialize",
    "is_per_replica",
    "jit",
    "lax",
    "locality",
    "phase",
    "pmap",
    "set_strategy",
    "static",
    "testing",
    "visualize",
]

#: Imported on first access, so that `import distjax` imports no optional library. Everything
#: exported by these modules and this one is public; all other modules are private.
_LAZY = frozenset(
    {"checkpoint", "compat", "flax", "layers", "losses", "metrics", "optim", "parts", "servers"}
)


def __getattr__(name: str) -> _Any:
    if name in _LAZY:
        return _importlib.import_module(f"distjax.{name}")
    raise AttributeError(f"module 'distjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
