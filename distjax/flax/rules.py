"""The table of what happens to each type of NNX variable at the end of a step.

Inside `run` every replica writes to its own variables. A rule says how these writes
become the variable's one new value.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from distjax.errors import describe_value, message
from distjax.typing import PyTree

MIRRORED = "mirrored"  #: all replicas must write the same value
MEAN = "mean"  #: the mean of the replicas' values
PER_REPLICA = "per_replica"  #: each replica keeps its own: the variable holds a PerReplica
FOLD = "fold"  #: a PRNG key: the replicas draw from keys folded with their number
COMMON = "common"  #: a PRNG key: all replicas draw the same numbers
METRIC = "metric"  #: by the rule of the metric that the variable belongs to
NONE = "none"  #: no known rule: all replicas must write the same value

#: Rule by variable type; the nearest base class in the table applies.
_RULES: dict[type, str] = {
    nnx.Variable: NONE,
    nnx.Param: MIRRORED,
    nnx.OptState: MIRRORED,
    nnx.BatchStat: MEAN,
    nnx.RngKey: FOLD,
    nnx.RngCount: MIRRORED,
    nnx.Cache: PER_REPLICA,
    nnx.Intermediate: PER_REPLICA,
    nnx.metrics.MetricState: METRIC,
}

#: Streams whose keys initialize parameters, which are equal on all replicas.
_COMMON_STREAMS = frozenset({"params"})

_CHOICES = (MIRRORED, MEAN, PER_REPLICA, FOLD, COMMON)
_METADATA = "distjax_rule"


def set_rule(target: PyTree, rule: str, only: nnx.filterlib.Filter = ...) -> None:
    """Sets how the replicas' writes to Flax variables become one value.

    For a type, it applies to all variables of that type from the next trace on; for
    an object, to its variables, and is stored in their metadata.

    Args:
      target: an `nnx.Variable` subclass, or a module (any NNX object).
      rule: "mirrored" (all replicas write the same), "mean", "per_replica" (each
        keeps its own, the variable holds a PerReplica), for PRNG keys "fold" (each
        replica draws its own numbers) or "common" (all draw the same).
      only: an NNX filter, for a module: a type, `nnx.PathContains("bn")`, a tuple
        of these for any of them; default: all variables.

    Context: outside of `run`.

    Raises:
      ValueError: an unknown rule, or a target without variables.

    Example:
      >>> from flax import nnx
      >>> rngs = nnx.Rngs(params=0, dropout=1)
      >>> dj.flax.set_rule(rngs.dropout, "common")  # one mask for all replicas
      >>> model = nnx.BatchNorm(3, rngs=rngs)
      >>> dj.flax.set_rule(model, "per_replica", nnx.BatchStat)
    """
    if rule not in _CHOICES:
        raise ValueError(
            message(
                f"set_rule needs a rule of {', '.join(_CHOICES)}",
                got=describe_value(rule),
                why="it says how what the replicas write becomes one value",
                fix='dj.flax.set_rule(nnx.BatchStat, "mean")',
            )
        )
    if isinstance(target, type) and issubclass(target, nnx.Variable):
        _RULES[target] = rule
        return
    if not isinstance(target, (nnx.Pytree, nnx.Variable)):
        raise ValueError(
            message(
                "set_rule needs a type of nnx.Variable or an NNX object",
                got=describe_value(target),
                why="rules belong to variables",
                fix='dj.flax.set_rule(model, "per_replica", nnx.BatchStat)',
            )
        )
    matches = nnx.filterlib.to_predicate(only)
    for path, variable in nnx.iter_graph(target):
        if isinstance(variable, nnx.Variable) and matches(path, variable):
            variable.set_metadata(_METADATA, rule)


def rule_of(variable: nnx.Variable[Any] | jax.Array) -> str:
    """Returns the rule of a variable; `NONE` for a bare array in a module."""
    if not isinstance(variable, nnx.Variable):
        return NONE
    own = variable.get_metadata().get(_METADATA)
    if own is not None:
        return own
    rule = next(_RULES[base] for base in type(variable).__mro__ if base in _RULES)
    stream = variable.get_metadata().get("tag")
    return COMMON if rule == FOLD and stream in _COMMON_STREAMS else rule


def of_types() -> tuple[tuple[type, str], ...]:
    """Returns the table, as part of the key of a plan."""
    return tuple(_RULES.items())


def is_slot_state(variable: nnx.Variable[Any] | jax.Array) -> bool:
    """Returns whether a variable is optimizer state, which lives beside parameters."""
    return isinstance(variable, nnx.OptState)


def is_parameter(variable: nnx.Variable[Any] | jax.Array) -> bool:
    """Returns whether a variable is a parameter."""
    return isinstance(variable, nnx.Param)
