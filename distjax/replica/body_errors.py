"""What distjax knows of errors in a replica function that JAX tells in its own words, or late."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from distjax import jax_compat
from distjax.errors import MergeError, message
from distjax.placement.topology import Topology
from distjax.replica.arguments import PartitionedTree, function_name, user_path
from distjax.replica.emit import holds_merge

#: What JAX says of a traced number where a Python number has to be: a shape, a length, an index.
_NEEDS_A_NUMBER = re.compile("Shapes must be 1D|concrete value is expected|__index__")


def add_number_note(
    error: Exception, fn: Callable[..., Any], partitioned: PartitionedTree, names: Sequence[str]
) -> None:
    """Adds to an error of JAX which argument is a number, and how it stays one."""
    found = re.search(r"leaves\[(\d+)\]", str(error))
    if found is None or not _NEEDS_A_NUMBER.search(str(error)):
        return
    name = user_path(partitioned.paths[int(found[1])], names)
    error.add_note(
        f"Argument {name} of {function_name(fn)} is an array inside: a number may be another one "
        "at each call.\n"
        f"  Fix: step = functools.partial({function_name(fn)}, {name}=3), made once; or "
        "dj.pmap(fn, static_broadcasted_argnums=...)"
    )


def require_no_other_mesh(name: str, jaxpr: Any, topology: Topology) -> None:
    """Raises if a replica function holds a `shard_map`, or `pmap`, over other devices.

    Raises:
      MergeError: naming its axes and line.
    """
    own = topology.mesh.axis_names if topology.mesh is not None else ()
    for outer, eqn in ((e, s) for e in jaxpr.eqns for s in _shard_maps(e)):
        axes = tuple(eqn.params["mesh"].axis_names)
        if set(axes) <= set(own) or holds_merge(eqn):  # of a merge the emitter speaks
            continue
        raise MergeError(
            message(
                f"{name} needs to leave devices to its strategy",
                got=f"a jax.pmap or jax.shard_map over axes {axes}, at "
                f"{jax_compat.source_line(outer)}",
                why="a replica function runs on each device already, and a device has no others "
                "of its own",
                fix="jax.vmap in its place; model_axes={...} of dj.MirroredStrategy for axes "
                "inside a replica; or the call outside of run",
            )
        )


def _shard_maps(eqn: Any) -> list[Any]:
    if eqn.primitive.name == "shard_map":
        return [eqn]
    return [e for sub in jax_compat.sub_jaxprs(eqn) for s in sub.eqns for e in _shard_maps(s)]
