"""Checks the gradients and variables that users pass, and puts them in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from distjax.errors import LocalityError, StrategyMismatchError, describe_value, message, require
from distjax.modes import VariableSynchronization
from distjax.placement.per_replica import is_per_replica
from distjax.strategies.extended import StrategyExtended
from distjax.strategies.values import is_mirrored
from distjax.typing import PyTree
from distjax.variables.variable import Variable


def require_variables(variables: PyTree) -> list[Variable]:
    """Returns the leaves of a tree of variables to optimize.

    Raises:
      TypeError: a leaf that is not a variable.
      ValueError: no variables, or the same one twice.
      LocalityError: a sync-on-read variable.
      StrategyMismatchError: variables of several strategies.
    """
    leaves = jax.tree.leaves(variables)
    fix = "optimizer.init(variables), a list or any tree of the variables to optimize"
    for leaf in leaves:
        if not isinstance(leaf, Variable):
            why = "an optimizer updates variables in place"
            raise TypeError(_init_text("distjax.Variables only", describe_value(leaf), why, fix))
        if leaf.synchronization is VariableSynchronization.ON_READ:
            why = "its components differ: no one value can be optimized"
            raise LocalityError(_init_text("ON_WRITE variables", repr(leaf), why, fix))
    if not leaves:
        why = "an optimizer keeps its state where its variables live"
        raise ValueError(_init_text("at least one variable", "none", why, fix))
    for i, leaf in enumerate(leaves):
        if any(leaf is other for other in leaves[:i]):
            why = "each variable has one gradient"
            raise ValueError(_init_text("each variable once", f"{leaf!r} twice", why, fix))
        if leaf.strategy is not leaves[0].strategy:
            why = "one update runs under one strategy"
            got = f"{leaf!r} beside {leaves[0]!r}"
            raise StrategyMismatchError(_init_text("variables of one strategy", got, why, fix))
    return leaves


def _init_text(needs: str, got: str, why: str, fix: str) -> str:
    return message(f"Optimizer.init needs {needs}", got=got, why=why, fix=fix)


def in_order(grads_and_vars: Iterable[Any], variables: Sequence[Variable]) -> list[Any]:
    """Returns one gradient for each of `variables`, in their order.

    Args:
      grads_and_vars: (gradient, variable) pairs, or pairs of trees.
      variables: the variables that the optimizer was initialized with.

    Raises:
      ValueError: not pairs; a variable that is unknown, missing or duplicated; a
        gradient that is None or of the wrong shape.
    """
    grads: dict[Variable, Any] = {}
    known = set(variables)
    for gradient, variable in _flat_pairs(grads_and_vars):
        if variable in grads or variable not in known:
            raise ValueError(_misplaced_text(variable, variable in grads, variables))
        _require_shape(gradient, variable)
        grads[variable] = gradient
    missing = [v.name for v in variables if v not in grads]
    require(
        not missing,
        ValueError,
        "apply_gradients needs a gradient for every variable of the optimizer",
        got=f"none for {missing}",
        why="the transformation sees all gradients at once (a global norm, for one)",
        fix="pass zeros for it, or leave it out of init (or optax.masked)",
    )
    return [grads[v] for v in variables]


def _flat_pairs(grads_and_vars: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
    for pair in grads_and_vars:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            raise ValueError(_pair_text(describe_value(pair)))
        grads, variables = pair
        leaves, treedef = jax.tree.flatten(variables)
        if not all(isinstance(v, Variable) for v in leaves):
            raise ValueError(_pair_text(f"({describe_value(grads)}, {describe_value(variables)})"))
        try:
            flat = treedef.flatten_up_to(grads)
        except ValueError as error:
            raise ValueError(_pair_text("a tree of gradients unlike that of variables")) from error
        yield from zip(flat, leaves, strict=True)


def _pair_text(got: str) -> str:
    return message(
        "apply_gradients needs pairs (gradient, variable)",
        got=got,
        why="each variable is updated by its own gradient",
        fix="optimizer.apply_gradients(zip(grads, variables)); or for trees: "
        "optimizer.apply_gradients([(grads, variables)])",
    )


def _misplaced_text(variable: Variable, is_twice: bool, known: Sequence[Variable]) -> str:
    names = [v.name for v in known[:8]]
    return message(
        "apply_gradients needs each variable that init was called with, once",
        got=f"{variable!r}, {'a second time' if is_twice else 'which init did not have'}",
        why="the variable's slots were made by init, and it is updated once per step",
        fix="add up its gradients first" if is_twice else f"pass it to init (which has {names})",
    )


def _require_shape(gradient: PyTree, variable: Variable) -> None:
    if gradient is None:
        got, why = "None", "the loss does not depend on it, or it was filtered out"
    elif not is_per_replica(gradient) and isinstance(gradient, (dict, list, tuple, str)):
        got, why = describe_value(gradient), "a gradient is an array"
    elif tuple(getattr(gradient, "shape", np.shape(gradient))) != variable.shape:
        got, why = describe_value(gradient), "a gradient has its variable's shape"
    else:
        return
    raise ValueError(
        message(
            f"apply_gradients needs a gradient of shape {variable.shape} for variable "
            f"{variable.name!r}",
            got=got,
            why=why,
            fix="grads = jax.grad(loss)(variable.value), one for each variable",
        )
    )


# -- locality -----------------------------------------------------------------


def require_no_per_replica(values: PyTree) -> None:
    """Raises a LocalityError for a PerReplica passed in a replica function."""
    found = [x for x in jax.tree.leaves(values, is_leaf=is_per_replica) if is_per_replica(x)]
    if not found:
        return
    raise LocalityError(
        message(
            "apply_gradients in a replica context needs this replica's values",
            got=f"a PerReplica of {found[0].num_replicas} values",
            why="a replica sees its own value of an argument of run, but a PerReplica that the "
            "function closes over keeps all of them",
            fix="pass it: strategy.run(step, args=(x,)); or call apply_gradients outside of run",
        )
    )


def require_one_value(extra: dict[str, Any]) -> None:
    """Raises a LocalityError if an extra argument of an update differs per replica."""
    for name, value in extra.items():
        require(
            not any(is_per_replica(x) for x in jax.tree.leaves(value, is_leaf=is_per_replica)),
            LocalityError,
            f"apply_gradients needs argument {name} to be one value",
            got="a value that differs per replica",
            why="the update is computed once, for all replicas",
            fix=f"{name}=dj.get_replica_context().all_reduce('mean', {name})",
        )


def require_placed(
    extended: StrategyExtended, grads: Sequence[Any], variables: Sequence[Variable]
) -> None:
    """Raises a ValueError if a gradient to be summed over replicas is not on them."""
    for gradient, variable in zip(grads, variables, strict=True):
        if is_per_replica(gradient) or is_mirrored(extended.topology, gradient):
            continue
        raise ValueError(
            message(
                f"apply_gradients needs the gradient of {variable.name!r} on the replicas, to sum "
                "it over them",
                got=f"{describe_value(gradient)}, which lives elsewhere",
                why="it is unclear whether it stands for one gradient or for R equal ones",
                fix="return it from strategy.run, or place it: strategy.extended.broadcast_to(g); "
                "or average: Optimizer(tx, 'mean')",
            )
        )
