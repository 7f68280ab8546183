"""dj.visualize: which device holds which part of a value."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import Sharding

from distjax import jax_compat
from distjax.context import frames
from distjax.diagnostics.picture import Block, Picture
from distjax.errors import ContextError, describe_value, message
from distjax.placement.per_replica import PerReplica
from distjax.placement.topology import Topology
from distjax.typing import PyTree
from distjax.variables.variable import Variable

Span = tuple[int, int]


def visualize(x: PyTree) -> Picture:
    """Returns a picture of which device holds which part of a value.

    Print it, or make it the last line of a notebook cell. The vertical axis is the
    replica axis or the first split axis, the horizontal axis the second split axis.

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
      +--...--+
      | replica 0 on ... |
      +--...--+
      | replica 1 on ... |
      +--...--+

    Source: `jax.debug.visualize_array_sharding`.
    """
    array = _array_of(x)
    caption = _caption(x, array)
    if isinstance(x, PerReplica) or (isinstance(x, Variable) and x.policy.stacked):
        topology = x.topology if isinstance(x, PerReplica) else x.strategy.extended.topology
        return Picture(caption, _replica_blocks(topology, array))
    return Picture(caption, _blocks(array.shape, array.sharding))


def _array_of(x: PyTree) -> jax.Array:
    array = x.storage if isinstance(x, Variable) else x
    array = x.stacked if isinstance(x, PerReplica) else array
    is_traced = isinstance(x, Variable) and frames.current().state is not None
    if is_traced or isinstance(array, jax_compat.Tracer):
        raise ContextError(
            message(
                "visualize needs a value that exists",
                got=f"a traced value, in {frames.current().name}",
                why="where it will live is decided when the program is compiled",
                fix="return it, and visualize the result; or jax.debug.inspect_array_sharding",
            )
        )
    if not isinstance(array, jax.Array):
        raise TypeError(
            message(
                "visualize needs a PerReplica, a variable or a JAX array",
                got=describe_value(array),
                why="anything else lives on no device",
                fix="strategy.extended.broadcast_to(x), or visualize what run returned; for a "
                "tree: jax.tree.map",
            )
        )
    return array


def _caption(x: object, array: jax.Array) -> str:
    if isinstance(x, PerReplica):
        return f"PerReplica {x.dtype}{list(x.shape)} on {x.num_replicas} replicas"
    if isinstance(x, Variable):
        return f"Variable {x.name!r} {x.dtype}{list(x.shape)}, {x.layout}"
    return f"Array {array.dtype}{list(array.shape)}"


def _replica_blocks(topology: Topology, stacked: jax.Array) -> tuple[Block, ...]:
    width = (0, stacked.shape[1] if stacked.ndim > 1 else 1)
    return tuple(
        Block(r, 0, (r, r + 1), width, f"replica {r} on {_names(topology.replica_devices(r))}")
        for r in range(topology.num_replicas)
    )


def _blocks(shape: tuple[int, ...], sharding: Sharding) -> tuple[Block, ...]:
    """Returns the blocks of an array along its first two split axes."""
    spans: dict[jax.Device, tuple[Span, ...]] = {
        device: tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        for device, index in sharding.devices_indices_map(shape).items()
    }
    split = [i for i in range(len(shape)) if len({span[i] for span in spans.values()}) > 1]
    whole = [i for i in range(len(shape)) if i not in split]
    axes = sorted([*split, *whole][:2])
    sides = [sorted({span[axis] for span in spans.values()}) for axis in axes]
    sides += [[(0, 1)]] * (2 - len(sides))
    holders: dict[tuple[Span, ...], list[jax.Device]] = {}
    for device, span in spans.items():
        place = (*(span[axis] for axis in axes), (0, 1), (0, 1))[:2]
        holders.setdefault(place, []).append(device)
    return tuple(
        Block(i, j, rows, columns, _names(holders[rows, columns]))
        for i, rows in enumerate(sides[0])
        for j, columns in enumerate(sides[1])
    )


def _names(devices: Sequence[jax.Device]) -> str:
    return ", ".join(map(str, devices))
