"""distjax: data-parallel training in JAX, with the programming model of tf.distribute.

You write the training step for one replica; a strategy places the state, inserts the collectives
and compiles the step for all replicas:

    strategy = dj.MirroredStrategy()  # one replica per local device
    for batch in strategy.distribute_dataset(batches):
        losses = strategy.run(train_step, args=(model, optimizer, batch))

"Locality:" in a docstring says where values live. T: one value per replica (a `PerReplica`); M: a
mirrored value, equal on every replica; V(v): laid out like the variable v.
"""

import importlib as _importlib
import sys as _sys
from typing import Any as _Any

from distjax import diagnostics, errors, lax, testing
from distjax._src import hooks as _hooks
from distjax._src import lint as lint  # installs itself
from distjax._src.cluster.joining import initialize
from distjax._src.cluster.ledger import phase
from distjax._src.cluster.meeting import any_process
from distjax._src.collectives.reductions import CommunicationImplementation, CommunicationOptions
from distjax._src.context import (
    expect,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    set_strategy,
)
from distjax._src.data.dataset import DistributedDataset
from distjax._src.data.iterator import DistributedIterator
from distjax._src.data.options import Batch, InputContext, InputOptions
from distjax._src.placement import REPLICA_AXIS, Locality, PerReplica, is_per_replica
from distjax._src.pmap import pmap
from distjax._src.program.jit import jit
from distjax._src.replica.arguments import static
from distjax._src.replica.contexts import ReplicaContext
from distjax._src.servers.coordinator import (
    Coordinator,
    ParameterServerStrategy,
    RemoteValue,
)
from distjax._src.servers.per_worker import PerWorkerDataset, PerWorkerValues
from distjax._src.strategies.default import DefaultStrategy
from distjax._src.strategies.extended import StrategyExtended
from distjax._src.strategies.mirrored import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    TPUStrategy,
    VirtualStrategy,
)
from distjax._src.strategies.sharded import CentralStorageStrategy, ShardedStrategy
from distjax._src.strategies.steps import MultiStepContext
from distjax._src.strategies.strategy import Strategy
from distjax._src.strategies.values import ValueContext, locality
from distjax._src.typing import ReduceOp, VariableAggregation, VariableSynchronization
from distjax._src.variables.variable import Variable
from distjax.diagnostics import check, explain, visualize

__version__ = "0.2.0"

# The layers: what the kernel calls at its events (`hooks`).
for _layer in ("programs", "data"):
    _importlib.import_module(f"distjax._src.cluster.{_layer}")
_hooks.object_layers["flax.nnx"] = "distjax._src.flax.bridge"

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
    "any_process",
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
#: exported by these modules and this one is public; what is in `distjax._src` is private.
_LAZY = frozenset(
    {
        "checkpoint",
        "compat",
        "flax",
        "launch",
        "layers",
        "losses",
        "metrics",
        "optim",
        "parts",
        "plan",
        "servers",
    }
)


def __getattr__(name: str) -> _Any:
    if name in _LAZY:
        return _importlib.import_module(f"distjax.{name}")
    owners = {"strategy": Strategy, "dj.get_replica_context()": ReplicaContext}
    found = [f"{owner}.{name}" for owner, kind in owners.items() if hasattr(kind, name)]
    hint = f"; there is {' and '.join(found)}" if found else ""
    text = f"module 'distjax' has no attribute {name!r}{hint}"
    raise AttributeError(text, name=name, obj=_sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*__all__, *_LAZY, "__version__"})
