"""State that goes into a replica function equal and comes out different: a forgotten reduction."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

import jax

from distjax import jax_compat
from distjax.errors import LocalityError, LocalityWarning, explain
from distjax.replica.arguments import Template, function_name
from distjax.replica.located import Located


def check_state(
    fn: Any,
    names: Sequence[str],
    template: Template,
    located: Sequence[Located],
    result: Template,
    results: Sequence[Located],
) -> None:
    """Warns (for Flax parameters: raises) where state went in M and came out T."""
    args, _ = template.fill(located)
    outs = result.fill(results)
    for name, arg in zip(names, args, strict=True):
        structure = _structure(arg)
        if jax.tree_util.treedef_is_leaf(structure):  # a lone value is no state
            continue
        for candidate in _subtrees(outs):
            if _structure(candidate) != structure:
                continue
            changed = _changed_paths(name, arg, candidate)
            if changed:
                _report(fn, arg, changed)
                break


def _is_located(value: Any) -> bool:
    return isinstance(value, Located)


def _structure(tree: Any) -> Any:
    return jax.tree.structure(tree, is_leaf=_is_located)


def _subtrees(tree: Any) -> list[Any]:
    inner = []
    if isinstance(tree, (tuple, list)) and not _is_located(tree):
        inner = [s for child in tree for s in _subtrees(child)]
    elif isinstance(tree, dict):
        inner = [s for child in tree.values() for s in _subtrees(child)]
    return [tree, *inner]


def _changed_paths(name: str, arg: Any, out: Any) -> list[str]:
    befores = jax.tree_util.tree_leaves_with_path(arg, is_leaf=_is_located)
    afters = jax.tree.leaves(out, is_leaf=_is_located)
    return [
        name + jax.tree_util.keystr(path)
        for (path, before), after in zip(befores, afters, strict=True)
        if _is_located(before)
        and _is_located(after)
        and not before.differs
        and after.differs
        and before.array.shape == after.array.shape[1:]
    ]


def _report(fn: Any, arg: Any, paths: list[str]) -> None:
    train_state = sys.modules.get("flax.training.train_state")
    is_train_state = train_state is not None and isinstance(arg, train_state.TrainState)
    strict = [p for p in paths if is_train_state and (".params" in p or ".opt_state" in p)]
    text = explain(
        f"{function_name(fn)} takes state that is equal on every replica and needs to return it so",
        got=f"values that differ per replica at {', '.join((strict or paths)[:8])}"
        + (f" and {len(strict or paths) - 8} more" if len(strict or paths) > 8 else ""),
        why="a missing all_reduce makes every replica train a model of its own",
        fix="grads = dj.get_replica_context().all_reduce('mean', grads) before the update",
    )
    if strict:
        raise LocalityError(text)
    warnings.warn(text, LocalityWarning, stacklevel=jax_compat.user_stacklevel())
