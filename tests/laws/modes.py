"""What the one function of a script does, by its mode.

A mode gets the script, names of variables, a number that may differ per replica, and the type of
error that it raises if it raises one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import distjax as dj

SUM, MEAN = dj.VariableAggregation.SUM, dj.VariableAggregation.MEAN
ON_READ = dj.VariableSynchronization.ON_READ


def ramp(v: dj.Variable, total: Any) -> jax.Array:
    """Returns `total` times 1, 2, 3, ... in the shape of `v`: an element out of place shows."""
    return (total * (1 + jnp.arange(v.size))).astype(v.dtype)


def _chosen(script: Any, names: Sequence[str]) -> list[dj.Variable]:
    return [script.variables[name] for name in names]


def _write(method: str) -> Callable[..., Any]:
    def write(script: Any, names: Any, total: Any, error: Any) -> Any:
        return [getattr(v, method)(ramp(v, total)) for v in _chosen(script, names)]

    return write


_add = _write("assign_add")


def _eval(script: Any, names: Any, total: Any, error: Any) -> Any:
    return [v.value * total for v in _chosen(script, names)]


def _reset(script: Any, names: Any, total: Any, error: Any) -> None:
    for v in _chosen(script, names):
        v.assign(jnp.zeros(v.shape, v.dtype))


def _half(script: Any, names: Any, total: Any, error: Any) -> None:
    """Reads one variable and writes others."""
    for v in _chosen(script, names):
        if v.dtype == jnp.float32:  # a whole number of a nearly exact one would jump
            v.assign(0.25 * script.variables["mean"].value + ramp(v, total))


def _merge(script: Any, names: Any, total: Any, error: Any) -> Any:
    def write(strategy: dj.Strategy, total: Any) -> Any:
        total = strategy.reduce("sum", total, axis=None)
        for v in _chosen(script, names):
            is_on_read = v.synchronization is ON_READ
            (v.assign if is_on_read else v.assign_add)(ramp(v, total))
        return total

    return dj.get_replica_context().merge_call(write, args=(total,))


def _update(script: Any, names: Any, total: Any, error: Any) -> None:
    chosen = _chosen(script, names)

    def update(strategy: dj.Strategy, changes: Any) -> None:
        for v, g in zip(chosen, changes, strict=True):
            g = strategy.extended.reduce_to("sum", g, v)
            strategy.extended.update(v, lambda v, g: v.assign_sub(g), args=(g,))

    dj.get_replica_context().merge_call(update, args=([ramp(v, total) for v in chosen],))


def _loop(script: Any, names: Any, total: Any, error: Any) -> Any:
    def body(i: Any, carry: Any) -> Any:
        _add(script, names, carry, error)
        return carry + 1

    return dj.lax.fori_loop(0, 2, body, total)


def _cond(script: Any, names: Any, total: Any, error: Any) -> Any:
    def add(total: Any) -> Any:
        _add(script, names, total, error)
        return total + 1

    is_more = dj.get_replica_context().all_reduce("sum", total) > 0
    return dj.lax.cond(is_more, add, lambda total: total, total)


def _late(script: Any, names: Any, total: Any, error: Any) -> Any:
    """Makes a variable at its first use, of what that call is given."""
    if "late" not in script.late:
        first = jnp.full(6, total)
        script.late["late"] = dj.Variable(first, name="late", aggregation=SUM)
    return script.late["late"].assign_add(jnp.full(6, total))


def _later(script: Any, names: Any, total: Any, error: Any) -> Any:
    """Makes another one, of zeros, and writes some that are there."""
    if "later" not in script.late:
        script.late["later"] = dj.Variable(jnp.zeros(6), name="later", aggregation=MEAN)
    _add(script, names, total, error)
    return script.late["later"].assign_sub(jnp.full(6, total))


def _raise(script: Any, names: Any, total: Any, error: Any) -> None:
    _add(script, names, total, error)
    raise error("raise")


def _raise_in_merge(script: Any, names: Any, total: Any, error: Any) -> None:
    def write(strategy: dj.Strategy) -> None:
        _reset(script, names, total, error)
        raise error("raise_in_merge")

    _add(script, names, total, error)
    dj.get_replica_context().merge_call(write)


def _raise_later(script: Any, names: Any, total: Any, error: Any) -> None:
    """What a call that raises has made has no value: the next one makes it anew."""
    is_new = "later" not in script.late
    _later(script, names, total, error)
    if is_new:
        del script.late["later"]
    raise error("raise_later")


MODES: Mapping[str, Callable[..., Any]] = {
    "eval": _eval,
    "add": _add,
    "sub": _write("assign_sub"),
    "assign": _write("assign"),
    "shape": _add,  # of the variables that the shape of `x` names
    "reset": _reset,
    "half": _half,
    "merge": _merge,
    "update": _update,
    "loop": _loop,
    "cond": _cond,
    "late": _late,
    "later": _later,
    "raise": _raise,
    "raise_in_merge": _raise_in_merge,
    "raise_across": _add,  # the cross-replica function raises
    "raise_later": _raise_later,
}
