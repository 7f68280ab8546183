"""distjax: the programming model of tf.distribute for JAX.

A step is written as if for one replica; a strategy says where replicas and
variables live; `merge_call` talks across replicas.
"""

from distjax import errors, testing
from distjax.collectives.communication import CommunicationImplementation, CommunicationOptions
from distjax.collectives.ops import ReduceOp
from distjax.data.batch import Batch
from distjax.data.dataset import DistributedDataset
from distjax.data.input_context import InputContext
from distjax.data.iterator import DistributedIterator
from distjax.data.options import InputOptions
from distjax.placement.locality import Locality
from distjax.placement.per_replica import PerReplica
from distjax.placement.topology import REPLICA_AXIS
from distjax.replica import lax
from distjax.replica.context import ReplicaContext
from distjax.replica.jit import jit
from distjax.strategies.default import DEFAULT_STRATEGY as _DEFAULT_STRATEGY
from distjax.strategies.extended import StrategyExtended
from distjax.strategies.mirrored import MirroredStrategy
from distjax.strategies.one_device import OneDeviceStrategy
from distjax.strategies.scoping import (
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    set_strategy,
)
from distjax.strategies.strategy import Strategy
from distjax.strategies.values import ValueContext, locality
from distjax.strategies.virtual import VirtualStrategy
from distjax.variables.policy import VariableAggregation, VariableSynchronization
from distjax.variables.variable import Variable

__version__ = "0.1.0"

__all__ = [
    "REPLICA_AXIS",
    "Batch",
    "CommunicationImplementation",
    "CommunicationOptions",
    "DistributedDataset",
    "DistributedIterator",
    "InputContext",
    "InputOptions",
    "Locality",
    "MirroredStrategy",
    "OneDeviceStrategy",
    "PerReplica",
    "ReduceOp",
    "ReplicaContext",
    "Strategy",
    "StrategyExtended",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "VirtualStrategy",
    "errors",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "jit",
    "lax",
    "locality",
    "set_strategy",
    "testing",
]
