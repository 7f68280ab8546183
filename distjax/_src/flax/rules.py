"""Rules: what each type of NNX variable becomes at the end of a step.

Inside `run`, every replica writes to its own copy of a variable. A rule says how these writes
become the variable's single new value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from flax import nnx

from distjax._src import jax_compat
from distjax._src.placement import is_per_replica
from distjax._src.typing import PyTree
from distjax.errors import LocalityError, describe_value, message

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


# -- metric rules -------------------------------------------------------------
# How the replicas' parts of a metric are combined, by metric class.
#
# In `run`, replica 0 starts from the metric's state and the others from the state after
# `reset`; each updates its own part. The parts are combined at the end of the step, so the
# previous state and each replica's change count once.


#: Maps the parts, name -> [R, ...], to the whole, name -> [...].
CombineParts = Callable[[Mapping[str, jax.Array]], Mapping[str, jax.Array]]

#: The rule for metrics whose state consists of sums: the element-wise sum of the parts.
SUM = "sum"


def combine_welford(parts: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the count, mean and m2 of all samples, given those of R groups, each [R].

    With n = sum n_r: mean = sum(n_r mean_r) / n and m2 = sum(m2_r) + sum(n_r (mean_r - mean)^2);
    all zero where n is zero.

    Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
      sample variances", 1979.
    """
    count, mean, m2 = parts["count"], parts["mean"], parts["m2"]
    total = jnp.sum(count)
    weights = count / jnp.maximum(total, 1)
    whole = jnp.sum(weights * mean)
    spread = jnp.sum(count * (mean - whole) ** 2)
    return {"count": total, "mean": whole, "m2": jnp.sum(m2) + spread}


_COMBINES: dict[type, str | CombineParts] = {
    nnx.metrics.Average: SUM,
    nnx.metrics.Accuracy: SUM,
    nnx.metrics.Welford: combine_welford,
}


def register_metric(metric: type, combine: str | CombineParts = SUM) -> None:
    """Sets how the replicas' parts of a Flax metric are combined.

    Args:
      metric: a subclass of `nnx.metrics.Metric` whose `reset` empties it. A subclass of a
        registered class must be registered too: its state may mean something else.
      combine: "sum" if the whole state consists of sums; otherwise a function from the
        parts, name -> [R, ...] for each `MetricState` of the metric, to name -> [...].

    Raises:
      ValueError: not a metric class, or not a valid combination.

    Example:
      >>> from flax import nnx
      >>> class Largest(nnx.metrics.Metric):
      ...     def __init__(self):
      ...         self.value = nnx.metrics.MetricState(jnp.float32(-jnp.inf))
      ...     def reset(self):
      ...         self.value[...] = jnp.float32(-jnp.inf)
      ...     def update(self, values):
      ...         self.value[...] = jnp.maximum(self.value[...], values.max())
      ...     def compute(self):
      ...         return self.value[...]
      >>> dj.flax.register_metric(Largest, lambda parts: {"value": parts["value"].max(0)})
    """
    if not (inspect.isclass(metric) and issubclass(metric, nnx.metrics.Metric)):
        raise ValueError(
            message(
                "register_metric needs a subclass of nnx.metrics.Metric",
                got=describe_value(metric),
                why="the rule is looked up by the class of a metric",
                fix='dj.flax.register_metric(MyMetric, "sum")',
            )
        )
    if combine != SUM and not callable(combine):
        raise ValueError(
            message(
                'register_metric needs "sum" or a function of the parts',
                got=describe_value(combine),
                why="it says how R parts of the state become one",
                fix="dj.flax.register_metric(MyMetric, lambda parts: {'value': "
                "parts['value'].max(0)})",
            )
        )
    _COMBINES[metric] = combine


def combine_of(metric: nnx.Metric) -> str | CombineParts | None:
    """Returns how the parts of a metric are combined, or None if that is not registered."""
    return _COMBINES.get(type(metric))


def metrics_as_key() -> tuple[tuple[type, Any], ...]:
    """Returns the table as a hashable part of a plan's key."""
    return tuple(_COMBINES.items())


def refuse(path: str, metric: str | None) -> NoReturn:
    """Raises a LocalityError for metric state that differs per replica and has no rule.

    Args:
      path: the path of the variable.
      metric: the name of its metric's class; None: a metric that the step made.
    """
    if metric is None:
        raise LocalityError(
            f"{path} needs to be state of a metric that was made before the step",
            got="values that differ per replica, in an nnx.metrics.MetricState",
            why="the class of the metric says how the replicas' parts become one",
            fix="metrics = nnx.MultiMetric(...) before the step, and the metrics themselves, "
            "not their nnx.state, as an argument of it",
        )
    raise LocalityError(
        f"{path} needs a rule that makes one value of what the replicas wrote",
        got=f"values that differ per replica, and no rule for {metric}",
        why="the sum, the mean or the largest of the replicas' states may be meant",
        fix=f'dj.flax.register_metric({metric}, "sum"), or a function of '
        "the parts in place of the sum",
    )


def require_whole(metric: type, whole: object, names: Iterable[str]) -> Mapping[str, Any]:
    """Returns the result of a metric's combination, or raises if it lacks one of `names`."""
    if isinstance(whole, Mapping) and set(names) <= set(whole):
        return whole
    got = sorted(map(str, whole)) if isinstance(whole, Mapping) else describe_value(whole)
    raise ValueError(
        message(
            f"the combine function of {metric.__name__} needs to return the whole state, by name",
            got=f"{got}",
            why="each MetricState of the metric gets the value of its name",
            fix=f"return a dict with the keys {sorted(names)}",
        )
    )


def metrics_in(objects: Sequence[Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Returns each metric in the graphs of `objects` with the state it holds, by name."""
    found = []
    for _, node in nnx.iter_graph(tuple(objects)):
        if isinstance(node, nnx.metrics.Metric):
            own = {k: v for k, v in vars(node).items() if isinstance(v, nnx.metrics.MetricState)}
            if own:
                found.append((node, own))
    return found
