"""Clear messages for errors in replica functions that JAX reports badly or late."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from distjax import jax_compat, user_lines
from distjax.collectives.replica_axis import is_bound_axis
from distjax.context import frames
from distjax.errors import MergeError, message
from distjax.jax_compat import Jaxpr, JaxprEqn
from distjax.placement.topology import Topology
from distjax.replica.analysis import Analysis
from distjax.replica.emit import holds_merge
from distjax.replica.partitioned_tree import PartitionedTree
from distjax.replica.user_names import function_name, user_path

#: JAX's messages for a traced number used as a shape, a length or an index.
_NEEDS_A_NUMBER = re.compile("Shapes must be 1D|concrete value is expected|__index__")


def add_number_note(
    error: Exception, fn: Callable[..., Any], partitioned: PartitionedTree, names: Sequence[str]
) -> None:
    """Adds a note to a JAX error that names the traced argument and how to make it static."""
    found = re.search(r"leaves\[(\d+)\]", str(error))
    if found is None or not _NEEDS_A_NUMBER.search(str(error)):
        return
    name = user_path(partitioned.paths[int(found[1])], names)
    error.add_note(
        f"Inside {function_name(fn)}, argument {name} is an array, since a number may change from "
        "call to call.\n"
        f"  Fix: step = functools.partial({function_name(fn)}, {name}=3), made once; or "
        "dj.pmap(fn, static_broadcasted_argnums=...)"
    )


def require_no_other_mesh(name: str, jaxpr: Jaxpr, topology: Topology) -> None:
    """Raises if a replica function has a `shard_map` or `pmap` over devices of its strategy.

    Only one over model axes may stay: XLA rejects a second one over the replica axis, or aborts.

    Raises:
      MergeError: naming the axes and the line.
    """
    own = topology.mesh.axis_names if topology.mesh is not None else ()
    for outer, eqn in ((e, s) for e in jaxpr.eqns for s in _shard_maps(e)):
        axes = tuple(eqn.params["mesh"].axis_names)
        mapped = eqn.params["newly_manual_axes"]
        maps_replicas = topology.axis_name in mapped and topology.num_replicas > 1
        # The emitter reports merges.
        if (set(axes) <= set(own) and not maps_replicas) or holds_merge(eqn):
            continue
        raise MergeError(
            message(
                f"{name} needs to leave devices to its strategy",
                got=f"a jax.pmap or jax.shard_map over axes {axes}, at "
                f"{user_lines.source_line(outer)}",
                why="a replica function already runs on every device, and has no further devices "
                "to map over",
                fix="jax.vmap in its place; model_axes={...} of dj.MirroredStrategy for axes "
                "inside a replica; or the call outside of run",
            )
        )


def require_own_axis(name: str, jaxpr: Jaxpr, topology: Topology) -> None:
    """Raises if the collectives of `jaxpr` would bind to an enclosing `jax.vmap`.

    JAX gives them the vmap's axis if the mesh has an axis of the same name.
    """
    axis_name = topology.axis_name
    in_replica = any(frame.replica_context is not None for frame in frames.stack())
    if topology.mesh is None or in_replica or not is_bound_axis(axis_name):
        return
    if next(Analysis(axis_name).collectives(jaxpr), None) is None:
        return
    raise ValueError(
        message(
            f"pmap of {name} needs an axis_name that no jax.vmap around it has",
            got=f"{axis_name!r}, for both",
            why="JAX would run its collectives over the vmap's axis, as it does under jax.pmap",
            fix="another axis_name for one of the two",
        )
    )


def _shard_maps(eqn: JaxprEqn) -> list[JaxprEqn]:
    if eqn.primitive.name == "shard_map":
        return [eqn]
    return [e for sub in jax_compat.sub_jaxprs(eqn) for s in sub.eqns for e in _shard_maps(s)]
