"""Results of a mapped function as `jax.pmap` gives them: stacked along an axis.

`run` says by the type of a result whether it is proved equal. Here `out_axes` says what comes
back: [R, ...] in either case, or for None one value, with a warning where the others are lost.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from distjax import jax_compat
from distjax.collectives.constraint import constrain_to_replicas
from distjax.errors import LocalityWarning, message
from distjax.jax_compat import Literal
from distjax.placement.topology import Topology, renamed_topology
from distjax.replica.analysis import Analysis
from distjax.replica.arguments import PartitionedTree
from distjax.replica.global_value import GlobalValue, as_user_value, stack_replicas
from distjax.replica.output_layout import AlreadyPlaced
from distjax.variables.conversion import is_number


class _AsValues:
    """As an axis: the values that `run` returns."""


AS_VALUES = _AsValues()


@dataclasses.dataclass(frozen=True, eq=False)
class RunOptions:
    """What one call on the replicas does in another way than `run`.

    Attributes:
      axis_name: the name of the replica axis in this call; None: the strategy's.
      out_axes: a prefix of the tree of results: where their replica axis comes to stand;
        None for one value, AS_VALUES for what `run` returns.
      leaves_program: whether the results are those of a program, so that they have to say
        where they live.
    """

    axis_name: str | None = None
    out_axes: Any = AS_VALUES
    leaves_program: bool = False

    def for_first_of(self, count: int) -> RunOptions:
        """Returns the options where the results are the first of `count` trees."""
        if self.out_axes is AS_VALUES:
            return self
        return dataclasses.replace(self, out_axes=(self.out_axes, *[AS_VALUES] * (count - 1)))


AS_RUN = RunOptions()


class DataFlow(NamedTuple):
    """The jaxpr of a replica function, and which of its inputs differ."""

    jaxpr: Any
    varying: dict[Any, bool]
    analysis: Analysis

    def line_of(self, index: int) -> str:
        """Returns the user's line that made result `index` differ.

        It is the last one on the way to the result where a value that is equal meets one
        that differs, as parameters and a gradient do; else the one that made the result.
        """
        made_by = {v: eqn for eqn in self.jaxpr.eqns for v in eqn.outvars}
        varying = {**dict.fromkeys(self.jaxpr.constvars, False), **self.varying}
        self.analysis.run(self.jaxpr.eqns, varying)
        eqn = last = made_by.get(self.jaxpr.outvars[index])
        while eqn is not None:
            inputs = [v for v in eqn.invars if not isinstance(v, Literal)]
            if not all(varying[v] for v in inputs):
                return jax_compat.source_line(eqn)
            eqn = made_by.get(inputs[0]) if inputs else None
        return "an argument" if last is None else jax_compat.source_line(last)


def stack_results(
    name: str,
    result: PartitionedTree,
    values: Sequence[GlobalValue],
    flow: DataFlow,
    topology: Topology,
    options: RunOptions,
) -> Any:
    """Returns the user's tree of results, each with the replica axis where he wants it.

    Args:
      name: the user's name of the function.
      result: the tree.
      values: its arrays, in the global view.
      flow: how the function computes them.
      topology: the replicas.
      options: where the axis is to stand.

    Raises:
      ValueError: `out_axes` is no prefix of the tree.
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
    if lost and topology.num_replicas > 1:
        _warn_of_lost(name, [result.paths[i] for i in lost], flow.line_of(lost[0]), options)
    stacked = [
        _with_axis(leaf, axis, topology, options) for leaf, axis in zip(leaves, axes, strict=True)
    ]
    return jax.tree_util.tree_unflatten(result.treedef, stacked)


def _axis_of_each(name: str, treedef: Any, out_axes: Any) -> list[Any]:
    """Returns the axis of each leaf; a leaf here is a number, so that no class sees its fields."""
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


def broadcast_axes(axes: Any, treedef: Any) -> list[Any]:
    """Returns the axis of each leaf of a tree.

    Args:
      axes: a prefix of the tree.
      treedef: its structure.

    Raises:
      ValueError: it is no prefix.
    """
    if not axes and not isinstance(axes, (tuple, list, dict)):  # 0 or None: the same for all
        return [axes] * treedef.num_leaves
    prefix = jax.tree.structure(axes, is_leaf=_is_none)
    leaves = jax.tree.leaves(axes, is_leaf=_is_none)
    return [
        axis
        for axis, subtree in zip(leaves, _subtrees(prefix, treedef), strict=True)
        for _ in range(subtree.num_leaves)
    ]


def _subtrees(prefix: Any, full: Any) -> list[Any]:
    """Returns what stands in a tree in the places of the leaves of its prefix."""
    if prefix.node_data() is None:
        return [full]
    if prefix.node_data() != full.node_data() or len(prefix.children()) != len(full.children()):
        raise ValueError(f"{_node_text(prefix)} where the tree has {_node_text(full)}")
    pairs = zip(prefix.children(), full.children(), strict=True)
    return [tree for child, of in pairs for tree in _subtrees(child, of)]


def _node_text(treedef: Any) -> str:
    node = treedef.node_data()
    if node is None:
        return "a leaf" if treedef.num_leaves else "None"
    return f"a {node[0].__name__} of {len(treedef.children())}"


def _is_none(value: object) -> bool:
    return value is None


def _warn_of_lost(name: str, paths: Sequence[str], line: str, options: RunOptions) -> None:
    where = ", ".join(f"result{path}" for path in paths[:8])
    more = f" and {len(paths) - 8} more" if len(paths) > 8 else ""
    axis = "the axis" if options.axis_name is None else repr(options.axis_name)
    warnings.warn(
        message(
            f"{name} needs to return what is equal on every replica where out_axes is None",
            got=f"values that differ per replica at {where}{more}; made different at {line}",
            why="one value comes back for all: that of replica 0, and the others are lost",
            fix=f"jax.lax.pmean(x, {axis}) of the gradients, or of the value itself; out_axes=0 "
            "for a value per replica",
        ),
        LocalityWarning,
        stacklevel=jax_compat.user_stacklevel(),
    )


def _with_axis(leaf: Any, axis: Any, topology: Topology, options: RunOptions) -> Any:
    if axis is AS_VALUES:
        return as_user_value(leaf, topology) if isinstance(leaf, GlobalValue) else leaf
    if is_number(leaf):
        leaf = GlobalValue(jnp.asarray(leaf), False)
    if not isinstance(leaf, GlobalValue):
        return leaf
    if axis is None:
        value = leaf.array[0] if leaf.varying else leaf.array
        placed = constrain_to_replicas(value, topology, varying=False)
    else:
        # Named as in the call: what comes back can go in again, and nothing is compiled anew.
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
