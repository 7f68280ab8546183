"""One update: runs the transformation in the global view, then writes each variable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import optax

from distjax.optim.slots import OptimizerState
from distjax.replica.global_value import place_output
from distjax.typing import PyTree
from distjax.variables.conversion import rounded
from distjax.variables.variable import Variable


def update_variables(
    tx: optax.GradientTransformationExtraArgs,
    state: OptimizerState,
    variables: PyTree,
    grads: Sequence[Any],
    extra: dict[str, Any],
) -> None:
    """Runs `tx` once on all reduced gradients and writes variables and state.

    One `update` writes a variable and its slots where they live; one
    `update_non_slot` writes the non-slot state.

    Args:
      tx: the transformation, supporting extra arguments.
      state: its state.
      variables: the tree of variables.
      grads: their reduced gradients, in leaf order.
      extra: extra arguments of the transformation's update.

    Locality: V(v) in and out. Context: cross-replica, in a trace.
    """
    flat, treedef = jax.tree.flatten(variables)
    extended = flat[0].strategy.extended
    params = treedef.unflatten([v.value for v in flat])
    updates, new_state = tx.update(treedef.unflatten(grads), state.values(), params, **extra)
    new = state.pair_with(new_state)
    new_params = jax.tree.leaves(optax.apply_updates(params, updates))
    for variable, value in zip(flat, new_params, strict=True):
        slots = state.slots[variable]
        values = [_add_by_shards(variable, slots, value), *(new[s] for s in slots)]
        extended.update(variable, _assign_with_slots, args=(slots, values))
    if state.non_slots:
        values = [new[v] for v in state.non_slots]
        devices = extended.non_slot_devices(flat)
        extended.update_non_slot(devices, _assign_each, args=(state.non_slots, values))


def _add_by_shards(variable: Variable, slots: Sequence[Variable], value: jax.Array) -> jax.Array:
    """Returns a variable's new value, computed shard by shard if its slots are split.

    XLA would otherwise gather the update and add all of it on each replica, at the cost of
    R times the additions and a buffer of the variable's size.
    """
    form = variable.layout.local_form
    for other in (s.layout.local_form for s in slots if s.shape == value.shape):
        if other.is_split:
            shards = other.spread(value)
            topology = variable.strategy.extended.topology
            return form.spread(shards) if form.is_split else place_output(shards, topology)
    return value


def _assign_with_slots(
    variable: Variable, slots: Sequence[Variable], values: Sequence[Any]
) -> None:
    _assign_each([variable, *slots], values)


def _assign_each(variables: Sequence[Variable], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(rounded(value, variable.dtype))
