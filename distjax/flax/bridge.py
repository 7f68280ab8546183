"""The bridge between programs and NNX objects, found by `distjax.objects.stateful`."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

from flax import nnx

from distjax.flax.graph_cache import references
from distjax.flax.layouts import as_argument, as_stored_output, as_value
from distjax.flax.module_description import describe_placed
from distjax.flax.plans import Objects, Plan, take_apart, write_entries
from distjax.flax.reconcile import combine_writes
from distjax.flax.traced_objects import Outcome, TracedNNXObjects
from distjax.variables.variable_description import VariableDescription

_JIT = type(nnx.jit(lambda: None))


class NNXObjectLeaves:
    """NNX objects taken apart, outside of a program.

    Attributes:
      plan, leaves, owners, members: as in `distjax.objects.stateful.ObjectLeaves`.
    """

    def __init__(self, objects: Objects):
        self._objects = objects
        self.plan, self.leaves = objects.plan, objects.leaves
        self.owners = objects.plan.places
        self.members = objects.variables

    def write_back(self, outcome: Outcome, stored: Mapping[int, Any]) -> None:
        """Gives the objects their new values, and their new graph where it changed."""
        if outcome.graphdef is None:
            write_entries(self._objects.variables, self._new_values(outcome, stored))
            return
        before = [_read_raw(v) for v in self._objects.variables]
        after = self._new_values(outcome, stored)
        values = [
            before[origin] if i not in after and origin is not None else after[i]
            for i, origin in enumerate(outcome.origins)
        ]
        outer = nnx.graph.IndexMap.from_refmap(references(self._objects.objects))
        nnx.graph.unflatten(outcome.graphdef, values, outer_index_outer_ref=outer)

    def _new_values(self, outcome: Outcome, stored: Mapping[int, Any]) -> dict[int, Any]:
        """Returns the values of the entries of which a leaf is stored anew."""
        values, number = {}, 0
        for i, entry in enumerate(outcome.entries):
            numbers = range(number, number + len(entry.layouts))
            number += len(entry.layouts)
            if any(n in stored for n in numbers):
                values[i] = entry.treedef.unflatten(
                    [stored[n] if n in stored else self.leaves[n] for n in numbers]
                )
        return values


def _read_raw(variable: Any) -> Any:
    return variable.get_raw_value() if isinstance(variable, nnx.Variable) else variable


class NNXBridge:
    """What `distjax.objects.stateful.Bridge` asks, for Flax NNX."""

    def is_stateful(self, value: object) -> bool:
        """Returns whether `value` is a module, an optimizer, a metric, Rngs or a variable."""
        return isinstance(value, (nnx.Pytree, nnx.Variable))

    def unwrap(self, fn: Any) -> Any:
        """Returns the function inside `nnx.jit`: it becomes part of a larger program."""
        return fn.fun if type(fn) is _JIT and fn.in_shardings is None else fn

    def split(self, objects: Sequence[Any], strategy: Any) -> NNXObjectLeaves:
        """Takes objects apart, outside of the program; places them for `strategy` first."""
        return NNXObjectLeaves(take_apart(objects, strategy))

    def as_arguments(self, plan: Plan, leaves: Sequence[Any]) -> list[Any]:
        """Returns stored leaves as what `run` takes, in the global view."""
        strategy = None if plan.strategy is None else plan.strategy()
        if strategy is None:
            return list(leaves)
        topology = strategy.extended.topology
        return [
            as_argument(x, layout, topology) for x, layout in zip(leaves, plan.layouts, strict=True)
        ]

    def as_values(self, plan: Plan, leaves: Sequence[Any]) -> list[Any]:
        """Returns stored leaves as global values, in the global view."""
        return [as_value(x, layout) for x, layout in zip(leaves, plan.layouts, strict=True)]

    def merge(self, plan: Plan, leaves: Sequence[Any], context: Any) -> TracedNNXObjects:
        """Puts the objects together, in a replica (`context`) or the global view (None)."""
        return TracedNNXObjects(plan, leaves, context)

    def combine_writes(
        self, plan: Plan, outcome: Outcome, finals: Mapping[int, Any], strategy: Any
    ) -> dict[int, Any]:
        """Returns what is stored of what the replicas wrote, by the rule of each."""
        return combine_writes(plan, outcome, finals, strategy)

    def store(self, plan: Plan, outcome: Outcome, finals: Mapping[int, Any]) -> dict[int, Any]:
        """Returns what is stored of what code in the global view wrote."""
        strategy = None if plan.strategy is None else plan.strategy()
        if strategy is None:
            return dict(finals)
        layouts = [layout for entry in outcome.entries for layout in entry.layouts]
        return {i: as_stored_output(value, layouts[i]) for i, value in finals.items()}

    def describe(self, strategy: Any) -> list[VariableDescription]:
        """Returns a description of each variable of the objects placed for `strategy`."""
        return describe_placed(strategy)

    def find_baked(self, constants: Sequence[Any]) -> str | None:
        """Returns a description of a variable whose array is among `constants`, or None."""
        for referrer in gc.get_referrers(*constants):
            if isinstance(referrer, nnx.Variable):
                return f"an nnx.{type(referrer).__name__} of shape {tuple(referrer.shape)}"
        return None


BRIDGE = NNXBridge()
