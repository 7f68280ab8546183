"""Descriptions of NNX variables placed for a strategy, for `strategy.describe()`."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from distjax.context.contracts import StrategyLike
from distjax.flax import rules, strategy_of
from distjax.flax.layouts import layout_of
from distjax.flax.plans import raw_value
from distjax.placement.per_replica import PerReplica, is_per_replica
from distjax.variables.description import VariableDescription, describe_stored
from distjax.variables.layouts import Layout, StackedLayout

#: The aggregation of a `dj.Variable` that is equivalent to a rule.
_AGGREGATIONS = {rules.MEAN: "MEAN", rules.METRIC: "SUM"}


def describe_placed(strategy: StrategyLike) -> list[VariableDescription]:
    """Returns a description of each variable, named by its longest path in an object."""
    found: dict[int, tuple[tuple[Any, ...], Any]] = {}
    for node in strategy_of.objects_placed_for(strategy):
        for path, variable in nnx.iter_graph(node):
            if not isinstance(variable, nnx.Variable):
                continue
            name = (type(node).__name__, *path)
            if len(name) > len(found.get(id(variable), ((), None))[0]):
                found[id(variable)] = (name, variable)
    named = sorted((".".join(map(str, path)), id(v), v) for path, v in found.values())
    return [
        _describe_leaf(name, variable, leaf, strategy)
        for name, _, variable in named
        for leaf in jax.tree.leaves(raw_value(variable), is_leaf=is_per_replica)
        if isinstance(leaf, (jax.Array, PerReplica))
    ]


def _describe_leaf(
    name: str, variable: nnx.Variable[Any], leaf: jax.Array | PerReplica, strategy: StrategyLike
) -> VariableDescription:
    rule = rules.rule_of(variable)
    if isinstance(leaf, PerReplica):
        layout: Layout = StackedLayout(leaf.topology)
        stored, shape = leaf.stacked, leaf.stacked.shape[1:]
    else:
        layout = layout_of(strategy, variable, leaf.shape, leaf.dtype)
        stored, shape = leaf, leaf.shape
    return describe_stored(
        name,
        stored,
        layout,
        shape=shape,
        synchronization="ON_READ" if rule == rules.PER_REPLICA else "ON_WRITE",
        aggregation=_AGGREGATIONS.get(rule, "NONE"),
        trainable=rules.is_parameter(variable),
    )
