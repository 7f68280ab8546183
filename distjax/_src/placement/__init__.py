"""What other packages use of placement."""

# pyright: reportUnusedImport=false

from distjax._src.placement.model_axes import (
    Spec,
    adopted_spec,
    fits,
    free_axes,
    on_own_parts,
    require_spec,
    spec_of_sharding,
    spec_text,
)
from distjax._src.placement.per_replica import (
    AuxData,
    PerReplica,
    is_per_replica,
    off_their_devices,
    require_in_front,
    require_local,
    require_same_topology,
    return_to_replicas,
    with_aux,
)
from distjax._src.placement.rows import (
    ELEMENTWISE,
    holds_noted,
    holds_rows,
    is_batch,
    is_split_over_replicas,
    note_batch,
    note_one_value,
    replica_axis,
    require_not_split,
    stand_in,
)
from distjax._src.placement.topology import (
    REPLICA_AXIS,
    Locality,
    Topology,
    abstract_topology,
    are_exchanged,
    devices_or_all,
    devices_or_local,
    exchanging_topologies,
    in_force,
    is_host_memory,
    local_devices,
    mesh_topology,
    one_device_topology,
    require_axis_name,
    take_local,
)
from distjax._src.placement.transfer import (
    HELD_FIX,
    copied,
    is_elsewhere,
    is_narrowed,
    local_rows,
    require_held,
    require_no_mask,
    require_wholly_here,
    take_apart,
    transfer,
    transfer_each,
    transfer_local_rows,
    without_alias,
    wraps_around,
)
