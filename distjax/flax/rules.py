"""Rules: what each type of NNX variable becomes at the end of a step.

Inside `run` every replica writes to variables of its own. A rule says how these writes
become the variable's single new value.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from distjax import jax_compat
from distjax.errors import describe_value, message
from distjax.placement.per_replica import is_per_replica
from distjax.typing import PyTree

MIRRORED = "mirrored"  #: every replica must write the same value
MEAN = "mean"  #: the mean of the replicas' values
PER_REPLICA = "per_replica"  #: each replica keeps its own; the variable holds a PerReplica
FOLD = "fold"  #: a PRNG key: each replica draws from the key folded with its number
COMMON = "common"  #: a PRNG key: all replicas draw the same numbers
METRIC = "metric"  #: as registered for the class of the variable's metric
NONE = "none"  #: no known rule: every replica must write the same value

#: The rule of each variable type; a type not listed has that of its nearest base class.
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

#: Streams that initialize parameters, which must be equal on all replicas.
_COMMON_STREAMS = frozenset({"params"})

_OF_KEYS = (FOLD, COMMON)
_CHOICES = (MIRRORED, MEAN, PER_REPLICA, *_OF_KEYS)
_METADATA = "distjax_rule"


def set_rule(target: PyTree, rule: str, only: nnx.filterlib.Filter = ...) -> None:
    """Sets how the replicas' writes to Flax variables become one value.

    The rule of a type applies to all variables of that type, from the next trace on. The
    rule of an object applies to the variables in it and is stored in their metadata.

    Args:
      target: an `nnx.Variable` subclass, or an NNX object such as a module.
      rule: "mirrored" (every replica must write the same value), "mean", "per_replica" (each
        keeps its own, and the variable holds a PerReplica); for PRNG keys, the only
        variables of an object that get it, "fold" (each replica draws its own numbers) or
        "common" (all draw the same).
      only: which variables of an object: an NNX filter, such as a type,
        `nnx.PathContains("bn")`, or a tuple of filters to match any of them; default: all.

    Context: outside of `run`.

    Raises:
      ValueError: an unknown rule, a target of another type, or an object without a
        variable that gets the rule.

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
                f"set_rule needs one of the rules {', '.join(_CHOICES)}",
                got=describe_value(rule),
                why="it says how the replicas' writes become one value",
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
    for variable in _require_variables_for(rule, target, only):
        variable.set_metadata(_METADATA, rule)


def _require_variables_for(
    rule: str, target: nnx.Pytree | nnx.Variable[Any], only: nnx.filterlib.Filter
) -> list[nnx.Variable[Any]]:
    """Returns the variables of `target` that get the rule; raises a ValueError if none does."""
    matches = nnx.filterlib.to_predicate(only)
    chosen = [
        variable
        for path, variable in nnx.iter_graph(target)
        if isinstance(variable, nnx.Variable)
        and matches(path, variable)
        and (rule not in _OF_KEYS or _holds_key(variable))
    ]
    if not chosen:
        kind = "PRNG key" if rule in _OF_KEYS else "variable"
        raise ValueError(
            message(
                f"set_rule needs a {kind} in {type(target).__name__} to give the rule {rule!r}",
                got="none" if only is ... else f"none that matches {only!r}",
                why="the rule would change nothing, and another one would apply",
                fix="nnx.state(model) shows the types and paths that a filter can select",
            )
        )
    return chosen


def _holds_key(variable: nnx.Variable[Any]) -> bool:
    leaves = jax.tree.leaves(variable.get_raw_value(), is_leaf=is_per_replica)
    return any(hasattr(x, "dtype") and jax_compat.is_key_dtype(x.dtype) for x in leaves)


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


def as_key() -> tuple[tuple[type, str], ...]:
    """Returns the table as a hashable part of a plan's key."""
    return tuple(_RULES.items())


def is_parameter(variable: nnx.Variable[Any] | jax.Array) -> bool:
    """Returns whether a variable is a parameter."""
    return isinstance(variable, nnx.Param)
