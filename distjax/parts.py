"""Parts for building custom strategies.

A strategy is a `dj.Strategy` around a `StrategyExtended`, which takes a topology
(which devices, how many replicas) and a placement (where variables live). A
placement returns layouts (how one variable is stored), and may consult a
partitioner (how many shards to split it into).

Modules that neither this package nor the rest of the API reference exposes are
private and may change without notice.
"""

from distjax._src.placement import Topology, mesh_topology, one_device_topology
from distjax._src.strategies.extended import StrategyExtended
from distjax._src.strategies.sharded import CentralStoragePlacement, ShardedPlacement
from distjax._src.variables.layouts import (
    WHOLE,
    AxisShards,
    HostLayout,
    HostShardedLayout,
    Layout,
    LocalForm,
    MirroredLayout,
    MirroredPlacement,
    OneDeviceLayout,
    PartitionedLayout,
    PlainPlacement,
    Shards,
    StackedLayout,
    VariablePlacement,
)
from distjax._src.variables.partitioners import FixedShards, MaxSize, MinSize

__all__ = [
    "WHOLE",
    "AxisShards",
    "CentralStoragePlacement",
    "FixedShards",
    "HostLayout",
    "HostShardedLayout",
    "Layout",
    "LocalForm",
    "MaxSize",
    "MinSize",
    "MirroredLayout",
    "MirroredPlacement",
    "OneDeviceLayout",
    "PartitionedLayout",
    "PlainPlacement",
    "ShardedPlacement",
    "Shards",
    "StackedLayout",
    "StrategyExtended",
    "Topology",
    "VariablePlacement",
    "mesh_topology",
    "one_device_topology",
]
