"""dj.visualize: which device holds which part of a value."""

from __future__ import annotations

import jax

from distjax._src import jax_compat
from distjax._src.context import frames
from distjax._src.placement import PerReplica
from distjax._src.tables import Table
from distjax._src.typing import PyTree
from distjax._src.variables.variable import Variable
from distjax.errors import ContextError, describe_value, message


def visualize(x: PyTree) -> Table:
    """Returns a table of which devices hold which part of a value.

    Print it, or make it the last line of a notebook cell.

    Args:
      x: a PerReplica, a variable, or a JAX array.

    Context: any; it reads no values.

    Raises:
      TypeError: a value that lives on no device.
      ContextError: a traced value.

    Example:
      >>> strategy = dj.MirroredStrategy(jax.devices()[:2])
      >>> x = strategy.run(lambda: dj.get_replica_context().replica_id_in_sync_group * jnp.ones(3))
      >>> print(dj.visualize(x))
      PerReplica float32[3] on 2 replicas
        replica 0  ...
        replica 1  ...

    Source: `jax.debug.visualize_array_sharding`, which draws arrays of one or two axes.
    """
    array = _array_of(x)
    if isinstance(x, PerReplica):
        caption = f"PerReplica {x.dtype}{list(x.shape)} on {x.num_replicas} replicas"
    elif isinstance(x, Variable):
        caption = f"Variable {x.name!r} {x.dtype}{list(x.shape)}, {x.layout}"
    else:
        caption = f"Array {array.dtype}{list(array.shape)}"
    holders: dict[str, list[jax.Device]] = {}
    if isinstance(x, PerReplica) or (isinstance(x, Variable) and x.policy.stacked):
        topology = x.topology if isinstance(x, PerReplica) else x.strategy.extended.topology
        for r in range(topology.num_replicas):
            holders[f"replica {r}"] = list(topology.replica_devices(r))
    else:
        for device, index in array.sharding.devices_indices_map(array.shape).items():
            holders.setdefault(_as_text(index, array.shape), []).append(device)
    rows = ((part, ", ".join(map(str, devices))) for part, devices in holders.items())
    return Table(caption, (), tuple(rows))


def _as_text(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    spans = [(*cut.indices(size)[:2], size) for cut, size in zip(index, shape, strict=True)]
    axes = [":" if (a, b) == (0, size) else f"{a}:{b}" for a, b, size in spans]
    return "whole" if set(axes) <= {":"} else f"[{', '.join(axes)}]"


def _array_of(x: PyTree) -> jax.Array:
    array = x.storage if isinstance(x, Variable) else x
    array = x.stacked if isinstance(x, PerReplica) else array
    is_traced = isinstance(x, Variable) and frames.current().state is not None
    if is_traced or isinstance(array, jax_compat.Tracer):
        raise ContextError(
            "visualize needs a value that exists",
            got=f"a traced value, in {frames.current().name}",
            why="where it will live is decided when the program is compiled",
            fix="return it, and visualize the result; or jax.debug.inspect_array_sharding",
        )
    if not isinstance(array, jax.Array):
        raise TypeError(
            message(
                "visualize needs a PerReplica, a variable or a JAX array",
                got=describe_value(array),
                why="only these are placed on devices",
                fix="strategy.broadcast(x), or visualize what run returned; for a "
                "tree: jax.tree.map",
            )
        )
    return array
