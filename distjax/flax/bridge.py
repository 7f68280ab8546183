"""The bridge between programs and NNX objects, found by `distjax.replica.stateful`."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

from flax import nnx

from distjax.flax.describing import describe_placed
from distjax.flax.homes import as_argument, as_settled, as_value
from distjax.flax.plans import Objects, Plan, take_apart, write_entries
from distjax.flax.settling import settle
from distjax.flax.stand_ins import Outcome, StandIns
from distjax.flax.walks import references
from distjax.variables.describing import VariableDescription

_JIT = type(nnx.jit(lambda: None))


class NNXSplit:
    """NNX objects taken apart, outside of a program.

    Attributes:
      plan, leaves, owners, members: as in `distjax.replica.stateful.Split`.
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
        before = [_held(v) for v in self._objects.variables]
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
            numbers = range(number, number + len(entry.homes))
            number += len(entry.homes)
            if any(n in stored for n in numbers):
                values[i] = entry.treedef.unflatten(
                    [stored[n] if n in stored else self.leaves[n] for n in numbers]
                )
        return values


def _held(variable: Any) -> Any:
    return variable.get_raw_value() if isinstance(variable, nnx.Variable) else variable


class NNXBridge:
    """What `distjax.replica.stateful.Bridge` asks, for Flax NNX."""

    def is_stateful(self, value: object) -> bool:
        """Returns whether `value` is a module, an optimizer, a metric, Rngs or a variable."""
        return isinstance(value, (nnx.Pytree, nnx.Variable))

    def unwrapped(self, fn: Any) -> Any:
        """Returns the function inside `nnx.jit`: it becomes part of a larger program."""
        return fn.fun if type(fn) is _JIT and fn.in_shardings is None else fn

    def split(self, objects: Sequence[Any], strategy: Any) -> NNXSplit:
        """Takes objects apart, outside of the program; places them for `strategy` first."""
        return NNXSplit(take_apart(objects, strategy))

    def as_arguments(self, plan: Plan, leaves: Sequence[Any]) -> list[Any]:
        """Returns stored leaves as what `run` takes, in the global view."""
        return [as_argument(x, home) for x, home in zip(leaves, plan.homes, strict=True)]

    def as_values(self, plan: Plan, leaves: Sequence[Any]) -> list[Any]:
        """Returns stored leaves as global values, in the global view."""
        return [as_value(x, home) for x, home in zip(leaves, plan.homes, strict=True)]

    def merge(self, plan: Plan, leaves: Sequence[Any], context: Any) -> StandIns:
        """Puts the objects together, in a replica (`context`) or the global view (None)."""
        return StandIns(plan, leaves, context)

    def settle(
        self, plan: Plan, outcome: Outcome, finals: Mapping[int, Any], strategy: Any
    ) -> dict[int, Any]:
        """Returns what is stored of what the replicas wrote, by the rule of each."""
        return settle(plan, outcome, finals, strategy)

    def store(self, plan: Plan, outcome: Outcome, finals: Mapping[int, Any]) -> dict[int, Any]:
        """Returns what is stored of what code in the global view wrote."""
        strategy = None if plan.strategy is None else plan.strategy()
        if strategy is None:
            return dict(finals)
        homes = [home for entry in outcome.entries for home in entry.homes]
        topology = strategy.extended.topology
        return {i: as_settled(value, homes[i], topology) for i, value in finals.items()}

    def described(self, strategy: Any) -> list[VariableDescription]:
        """Returns a description of each variable of the objects placed for `strategy`."""
        return describe_placed(strategy)

    def baked(self, constants: Sequence[Any]) -> str | None:
        """Returns a description of a variable whose array is among `constants`, or None."""
        for referrer in gc.get_referrers(*constants):
            if isinstance(referrer, nnx.Variable):
                return f"an nnx.{type(referrer).__name__} of shape {tuple(referrer.shape)}"
        return None


BRIDGE = NNXBridge()
