"""Results of a mapped function as in `jax.pmap`: stacked along an axis.

With `run`, a result's type says whether it is proved equal. Here `out_axes` decides what is
returned: [R, ...] in either case, or one value for None, with a warning if others are lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from distjax import user_lines
from distjax.collectives.mapping import constrain_to_replicas
from distjax.context.expectation import reason_in
from distjax.context.reporting import Finding, report
from distjax.errors import LocalityWarning, message
from distjax.jax_compat import Jaxpr, JaxprEqn, Literal
from distjax.placement.topology import Topology, renamed_topology
from distjax.replica.analysis import Analysis
from distjax.replica.arguments import PartitionedTree
from distjax.replica.axis_prefix import broadcast_axes
from distjax.replica.global_value import AlreadyPlaced, GlobalValue, as_user_value, stack_replicas
from distjax.replica.run_options import AsValues, RunOptions
from distjax.typing import PyTree
from distjax.variables.conversion import is_number


class DataFlow(NamedTuple):
    """The jaxpr of a replica function, its inputs, and the name of the replica axis."""

    jaxpr: Jaxpr
    inputs: Sequence[GlobalValue]
    axis_name: str

    def origins(self, indices: Sequence[int]) -> list[JaxprEqn | None]:
        """Returns the equations that made these results differ; None for an argument.

        Each is the last one on the way to the result at which an equal value meets a differing
        one, as parameters and a gradient do; otherwise the one that made the result.
        """
        made_by: dict[Any, JaxprEqn] = {v: eqn for eqn in self.jaxpr.eqns for v in eqn.outvars}
        varying = Analysis(self.axis_name).values(self.jaxpr, [x.varying for x in self.inputs])

        def find(last: JaxprEqn | None) -> JaxprEqn | None:
            eqn = last
            while eqn is not None:
                inputs = [v for v in eqn.invars if not isinstance(v, Literal)]
                if not all(varying[v] for v in inputs):
                    return eqn
                eqn = made_by.get(inputs[0]) if inputs else None
            return last

        return [find(made_by.get(self.jaxpr.outvars[index])) for index in indices]


def stack_results(
    name: str,
    result: PartitionedTree,
    values: Sequence[GlobalValue],
    flow: DataFlow,
    topology: Topology,
    options: RunOptions,
) -> Any:
    """Returns the user's tree of results, with the replica axis as in `out_axes`.

    Args:
      name: the user's name for the function.
      result: the tree.
      values: its arrays, in the global view.
      flow: how the function computes them.
      topology: the replicas.
      options: where to put the axis.

    Raises:
      ValueError: `out_axes` is not a prefix of the tree.
    """
    leaves = result.combine_leaves(values)
    axes = _axis_of_each(name, result.treedef, options.out_axes)
    lost = [
        index
        for index, (value, axis) in enumerate(
            (leaf, a) for leaf, a in zip(leaves, axes, strict=True) if isinstance(leaf, GlobalValue)
        )
        if axis is None and value.varying
    ]
    if lost:
        _report_lost(name, [result.paths[i] for i in lost], flow.origins(lost), options)
    stacked = [
        _with_axis(leaf, axis, topology, options) for leaf, axis in zip(leaves, axes, strict=True)
    ]
    return jax.tree_util.tree_unflatten(result.treedef, stacked)


def _axis_of_each(name: str, treedef: jax.tree_util.PyTreeDef, out_axes: PyTree) -> list[Any]:
    """Returns each leaf's axis; never unflattens user classes with axes as leaves."""
    try:
        return broadcast_axes(out_axes, treedef)
    except ValueError as error:
        raise ValueError(
            message(
                f"pmap: out_axes={out_axes!r} needs to be a prefix of what {name} returns",
                got=str(error).splitlines()[0].removesuffix("."),
                why="each axis in it stands for all results below it",
                fix="out_axes=0, or a tuple with an axis for each result",
            )
        ) from None


def _report_lost(
    name: str, paths: Sequence[str], origins: Sequence[JaxprEqn | None], options: RunOptions
) -> None:
    """Warns where all values but one are dropped, grouped by `dj.expect` reason."""
    reasons = [None if e is None else reason_in(str(e.source_info.name_stack)) for e in origins]
    axis = "the axis" if options.axis_name is None else repr(options.axis_name)
    for reason in dict.fromkeys(reasons):
        own = [f"result{p}" for p, r in zip(paths, reasons, strict=True) if r == reason]
        origin = origins[reasons.index(reason)]
        line = "an argument" if origin is None else user_lines.source_line(origin)
        more = f" and {len(own) - 8} more" if len(own) > 8 else ""
        text = message(
            f"{name} needs to return what is equal on every replica where out_axes is None",
            got=f"values that differ per replica at {', '.join(own[:8])}{more}; made different at "
            f"{line}",
            why="one value comes back for all: that of replica 0, and the others are lost",
            fix=f"jax.lax.pmean(x, {axis}) of the gradients, or of the value itself; out_axes=0 "
            "for a value per replica",
        )
        rule = "one value of those that differ"
        report(Finding("warning", rule, text, line, reason), LocalityWarning)


def _with_axis(
    leaf: PyTree, axis: int | AsValues | None, topology: Topology, options: RunOptions
) -> Any:
    if isinstance(axis, AsValues):
        return as_user_value(leaf, topology) if isinstance(leaf, GlobalValue) else leaf
    if is_number(leaf):
        leaf = GlobalValue(jnp.asarray(leaf), False)
    if not isinstance(leaf, GlobalValue):
        return leaf
    if axis is None:
        value = leaf.array[0] if leaf.varying else leaf.array
        placed = constrain_to_replicas(value, topology, varying=False)
    else:
        # Renamed as in the call, so that results can be fed back in without recompiling.
        named = renamed_topology(topology, options.axis_name or topology.axis_name)
        placed = _place_stacked(stack_replicas(leaf, named), axis, named)
    return AlreadyPlaced(placed) if options.leaves_program else placed


def _place_stacked(stacked: jax.Array, axis: int, topology: Topology) -> jax.Array:
    placed = constrain_to_replicas(stacked, topology, varying=True)
    if not axis:
        return placed
    moved = jnp.moveaxis(placed, 0, axis)
    if topology.mesh is None or topology.model_axes:
        return moved
    spec = PartitionSpec(*[None] * axis, topology.axis_name)
    return lax.with_sharding_constraint(moved, NamedSharding(topology.mesh, spec))
