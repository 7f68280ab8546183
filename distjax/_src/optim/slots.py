"""The state of an optax transformation as variables, each placed where it belongs.

A slot is state that optax identifies as per-parameter (a moment, an accumulator); it
lives where its variable lives. The rest (step counts, hyperparameters) lives on the
non-slot devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import optax
from jax.tree_util import keystr, tree_leaves_with_path

from distjax._src.replica.arguments import is_array
from distjax._src.replica.global_value import place_output
from distjax._src.strategies.extended import StrategyExtended
from distjax._src.typing import PyTree
from distjax._src.variables.conversion import is_number, rounded
from distjax._src.variables.variable import Variable
from distjax.errors import message


def update_variables(
    tx: optax.GradientTransformationExtraArgs,
    state: OptimizerState,
    variables: PyTree,
    grads: Sequence[Any],
    extra: dict[str, Any],
) -> None:
    """Runs `tx` once on all reduced gradients and writes variables and state.

    One `update` writes a variable and its slots where they live; one `update_non_slot` writes the
    non-slot state. In cross-replica context, in a trace.
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
        extended.update(variable, _write_all, args=(slots, values))
    if state.non_slots:
        first, *others = state.non_slots
        values = [new[v] for v in state.non_slots]
        devices = extended.non_slot_devices(flat)
        extended.update_non_slot(devices, _write_all, args=(first, others, values))


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


def _write_all(first: Variable, others: Sequence[Variable], values: Sequence[Any]) -> None:
    for variable, value in zip((first, *others), values, strict=True):
        variable.write(rounded(value, variable.dtype))


@dataclasses.dataclass(frozen=True)
class OptimizerState:
    """An optax state whose arrays are variables.

    `slots` are leaves of its tree by the variable they belong to, `non_slots` the others.
    """

    #: `init` makes another state: see `objects/reached`.
    is_compared_whole: ClassVar = True

    tree: Any
    slots: dict[Variable, list[Variable]]
    non_slots: list[Variable]

    def values(self) -> Any:
        """Returns the optax state as arrays, as the current context sees them."""
        return jax.tree.map(lambda x: x.value if isinstance(x, Variable) else x, self.tree)

    def pair_with(self, new: PyTree) -> dict[Variable, Any]:
        """Returns each variable's value in the state `new`, which has to have this structure."""
        leaves, treedef = jax.tree.flatten(self.tree)
        try:
            values = treedef.flatten_up_to(new)
        except ValueError as error:
            raise ValueError(_changed_text(self.tree, new)) from error
        pairs = zip(leaves, values, strict=True)
        return {old: value for old, value in pairs if isinstance(old, Variable)}


def _changed_text(old: PyTree, new: PyTree) -> str:
    paths = lambda tree: {keystr(path) for path, _ in tree_leaves_with_path(tree)}
    differing = sorted(paths(old) ^ paths(new))[:5]
    return message(
        "Optimizer needs a transformation whose update returns a state of the structure that init "
        "returned",
        got=f"one that differs at {', '.join(differing) or 'a node without leaves'}",
        why="init makes the variables that keep the state, once",
        fix="return zeros there from init, which jax.lax.scan needs too; in place of "
        "optax.monitor: optax.snapshot",
    )


class _Owned:
    """A leaf of an optax state, and the variable that it is a slot of, if any.

    That is `owner`, with the length of its path in the tree of variables.
    """

    def __init__(self, value: PyTree, owner: tuple[Variable, int] | None):
        self.value, self.owner = value, owner


def make_state(
    tx: optax.GradientTransformationExtraArgs, extended: StrategyExtended, variables: PyTree
) -> OptimizerState:
    """Returns the initial state of `tx` for `variables`, as new variables.

    In a distjax trace, so that one program computes all initial values.
    """
    optimized = jax.tree.leaves(variables)
    initial = tx.init(jax.tree.map(lambda v: v.value, variables))
    slots: dict[Variable, list[Variable]] = {v: [] for v in optimized}
    non_slots: list[Variable] = []

    def make(path: Sequence[Any], leaf: _Owned) -> Any:
        if not (is_array(leaf.value) or is_number(leaf.value)):
            return leaf.value
        if leaf.owner is None:
            target, kept = extended.non_slot_devices(optimized), non_slots
            name = _field(path, "non_slot")
        else:
            owner, depth = leaf.owner
            target, kept = owner, slots[owner]
            name = f"{owner.name}/{_field(path[: len(path) - depth], 'slot')}"
        with extended.colocate_vars_with(target):
            made = Variable(leaf.value, name=name, trainable=False)
        kept.append(made)
        return made

    tree = jax.tree_util.tree_map_with_path(make, _with_owners(tx, initial, variables))
    return OptimizerState(tree, slots, non_slots)


def _with_owners(
    tx: optax.GradientTransformationExtraArgs, state: PyTree, variables: PyTree
) -> Any:
    """Returns `state` with each leaf an `_Owned`, as attributed by optax.

    If the `init` of a transformation inspects its parameters, optax cannot attribute its
    state, and all of it counts as non-slot state.
    """
    owners = jax.tree_util.tree_map_with_path(lambda path, v: (v, len(path)), variables)
    try:
        return optax.tree_utils.tree_map_params(
            tx,
            lambda x, owner: x if _is_masked(x) else _Owned(x, owner),
            state,
            owners,
            transform_non_params=_of_nobody,
            is_leaf=_is_masked,
        )
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        return _of_nobody(state)


def _of_nobody(state: PyTree) -> Any:
    return jax.tree.map(lambda x: _Owned(x, None), state)


def _is_masked(x: object) -> bool:
    return isinstance(x, optax.MaskedNode)


def _field(path: Sequence[Any], default: str) -> str:
    """Returns the name of the innermost field of an optax state on `path`."""
    names = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
    return names[-1] if names else default
