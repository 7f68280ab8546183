"""How the replicas' parts of a metric are combined, by metric class.

In `run`, replica 0 starts from the metric's state and the others from the state after
`reset`; each updates its own part. The parts are combined at the end of the step, so the
previous state and each replica's change count once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from flax import nnx

from distjax.errors import LocalityError, describe_value, message

#: Maps the parts, name -> [R, ...], to the whole, name -> [...].
CombineParts = Callable[[Mapping[str, jax.Array]], Mapping[str, jax.Array]]

#: The rule for metrics whose state consists of sums: the element-wise sum of the parts.
SUM = "sum"


def combine_welford(parts: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the count, mean and m2 of all samples, given those of R groups.

    With n = sum n_r: mean = sum(n_r mean_r) / n and
    m2 = sum(m2_r) + sum(n_r (mean_r - mean)^2); all zero where n is zero.

    Args:
      parts: "count", "mean" and "m2", each [R].

    Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
      computing sample variances", 1979.
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


def as_key() -> tuple[tuple[type, Any], ...]:
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
            message(
                f"{path} needs to be state of a metric that was made before the step",
                got="values that differ per replica, in an nnx.metrics.MetricState",
                why="the class of the metric says how the replicas' parts become one",
                fix="metrics = nnx.MultiMetric(...) before the step, and the metrics themselves, "
                "not their nnx.state, as an argument of it",
            )
        )
    raise LocalityError(
        message(
            f"{path} needs a rule that makes one value of what the replicas wrote",
            got=f"values that differ per replica, and no rule for {metric}",
            why="the sum, the mean or the largest of the replicas' states may be meant",
            fix=f'dj.flax.register_metric({metric}, "sum"), or a function of '
            "the parts in place of the sum",
        )
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
