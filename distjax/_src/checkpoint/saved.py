"""A saved step: the description of the run that wrote it, and how its values are put back.

The description is JSON beside the arrays: a restore reads it, matches all keys, reads all arrays,
converts and checks them, and only then changes anything. Iterators, which may reject a state, come
first and are put back if one does.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from typing import Any

import jax

import distjax
from distjax._src.checkpoint.leaves import (
    Leaf,
    NumberLeaf,
    StateLeaf,
    VariableLeaf,
    pause_writers,
)
from distjax._src.checkpoint.matching import Spec, match_keys, rename_keys
from distjax._src.checkpoint.storage import Place, Storage
from distjax._src.checkpoint.trees import Tree
from distjax._src.cluster.job import Job
from distjax._src.cluster.meeting import hear_all
from distjax._src.context import frames
from distjax._src.data.iterator import DistributedIterator
from distjax._src.interrupts import interrupts
from distjax._src.typing import PyTree
from distjax.errors import CheckpointError, describe_error, require

#: Marks states stored by process in a checkpoint's JSON; no tag of `json_values` has this name.
_BY_PROCESS = "processes"


def gather_states(joined: Job | None, leaves: Iterable[Leaf]) -> dict[str, Any]:
    """Returns the states of iterators in checkpoint form: one per process where they differ."""
    kept = [leaf for leaf in leaves if isinstance(leaf, StateLeaf)]
    if not kept:
        return {}
    occasion = "the save of the position in the data"
    everyone = hear_all(joined, occasion, lambda: {leaf.key: leaf.snapshot() for leaf in kept})
    by_key = {leaf.key: [said[leaf.key] for said in everyone] for leaf in kept}
    return {
        key: own[0] if all(state == own[0] for state in own) else {_BY_PROCESS: own}
        for key, own in by_key.items()
    }


def own_state(joined: Job | None, key: str, saved: PyTree, where: str) -> Any:
    """Returns this process's part of a saved state, if as many processes saved it."""
    if not (isinstance(saved, dict) and _BY_PROCESS in saved):
        return saved
    states, count = saved[_BY_PROCESS], 1 if joined is None else joined.num_processes
    if len(states) == count:
        return states[0 if joined is None else joined.process_id]
    raise CheckpointError(
        f"{key!r} of {where} needs the number of processes that saved it, {len(states)}",
        got=f"{count}",
        why="each of them read data of its own, and other processes would read some examples "
        "twice and others never. Nothing has been changed",
        fix="start as many processes; leave it out: restore(tree without it, partial=True); or "
        "let all read the same global batches, whose position holds for any number",
    )


#: Incremented when older versions can no longer read what is written.
FORMAT = 1


def describe(
    step: int, leaves: Iterable[Leaf], metrics: Mapping[str, float], joined: Job | None
) -> dict[str, Any]:
    """Returns versions, strategies, step, metrics and each key's contents, as JSON.

    Values that are not arrays (numbers, iterator states) are stored in it.
    """
    leaves = tuple(leaves)
    numbers = {leaf.key: leaf.snapshot() for leaf in leaves if isinstance(leaf, NumberLeaf)}
    own = {x.value.strategy: None for x in leaves if isinstance(x, VariableLeaf)}
    strategies = list(own) or [frames.current().strategy]
    return {
        "format": FORMAT,
        "distjax": distjax.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "step": step,
        "metrics": dict(metrics),
        "strategies": [
            {"strategy": repr(s), "num_replicas": s.num_replicas_in_sync} for s in strategies
        ],
        "keys": {leaf.key: {**leaf.spec.to_json(), "lives": leaf.lives} for leaf in leaves},
        "values": numbers | gather_states(joined, leaves),
    }


def padded_shapes(leaves: Iterable[Leaf]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of values whose snapshots are padded, by key."""
    return {
        leaf.key: leaf.spec.stored_shape
        for leaf in leaves
        if leaf.stored_shape != leaf.spec.stored_shape
    }


class Saved:
    """One saved step, that this version can read; `names` has its keys by names in the tree."""

    def __init__(self, storage: Storage, step: int, rename: Mapping[str, str]):
        self._storage = storage
        self._step = step
        self._where = storage.describe_step(step)
        self._description = storage.description(step)
        _require_readable(self._description, self._where)
        keys = self._description["keys"].items()
        self._specs = {key: Spec.from_json(entry) for key, entry in keys}
        self.names = rename_keys(self._specs, rename, self._where)

    def agree(self, occasion: str, leaves: Iterable[Leaf]) -> None:
        """Waits until every process is about to restore these leaves: see `Storage.agree`."""
        self._storage.agree(occasion, self._step, leaves)

    def restore(self, wanted: Tree, names: Mapping[str, str], *, partial: bool) -> Any:
        """Returns the tree with saved values for its keys in `names`; or changes nothing.

        Ctrl-C raises before anything has changed, or once everything is restored.
        """
        specs = {key: leaf.spec for key, leaf in wanted.leaves.items()}
        names = match_keys(specs, self._specs, names, partial=partial, where=self._where)
        values = {
            key: self._convert(wanted.leaves[key], saved)
            for key, saved in self._values(wanted, names).items()
        }
        with interrupts.held():
            return self._put(wanted, values)

    def _put(self, wanted: Tree, values: Mapping[str, Any]) -> Any:
        """Puts values that were read, checked and converted into the tree."""
        # In the default context, variables of every strategy can be written.
        with frames.with_stack(()), pause_writers(wanted.leaves.values()):
            leaves = {k: leaf for k, leaf in wanted.leaves.items() if k in values}
            states = [(x, values[k]) for k, x in leaves.items() if isinstance(x, StateLeaf)]
            _set_states(self._storage.job, states, self._where)
            now = {
                key: leaf.put(values[key])
                if key in values and not isinstance(leaf, StateLeaf)
                else leaf.value
                for key, leaf in wanted.leaves.items()
            }
            return wanted.rebuilt(now)

    def _convert(self, leaf: Leaf, saved: PyTree) -> Any:
        try:
            return leaf.convert(saved)
        except OverflowError as error:
            raise CheckpointError(
                f"{leaf.key!r} of {self._where} needs values that {leaf.spec} can hold",
                got=str(error),
                why="they would wrap around, or become infinite. Nothing has been changed",
                fix="give the tree a wider dtype there: one of 64 bits as a numpy array, or "
                "with jax_enable_x64",
            ) from error

    def _values(self, wanted: Tree, names: Mapping[str, str]) -> dict[str, Any]:
        """Returns each key's saved array (None for an empty one), number or state."""
        in_json = self._description["values"]
        in_arrays = {
            k: old
            for k, old in names.items()
            if self._specs[old].is_stored_as_array and old not in in_json
        }
        places: dict[str, Place] = {}
        for key, old in in_arrays.items():
            leaf = wanted.leaves[key]
            sharding = leaf.sharding() if self._specs[old].is_in_jax else None
            saved = self._specs[old].stored_shape
            resized = leaf.stored_shape if saved != leaf.stored_shape else None
            places[old] = Place(sharding, None if sharding is None else resized)
        values = {**in_json, **self._storage.arrays(self._step, places)}
        found = {key: values.get(old) for key, old in names.items()}
        return {key: own_state(self._storage.job, key, x, self._where) for key, x in found.items()}


def _set_states(joined: Job | None, states: list[tuple[StateLeaf, Any]], where: str) -> None:
    """Sets the states of iterators; if one rejects its state, puts all of them back."""
    if not states:
        return
    ours = [leaf.value for leaf, _ in states if isinstance(leaf.value, DistributedIterator)]
    for iterator in ours:
        iterator.stop_reading()
    # A source that is in the tree itself was read ahead; its distributed iterator, set last,
    # knows the position.
    states = sorted(states, key=lambda pair: isinstance(pair[0].value, DistributedIterator))
    before: list[tuple[StateLeaf, Any]] = []
    cause: Exception | None = None

    def set_each() -> list[str] | None:
        nonlocal cause
        leaf = states[0][0]
        try:
            for leaf, state in states:
                before.append((leaf, leaf.snapshot()))
                leaf.put(state)
        except Exception as error:
            cause = error
            return [leaf.key, describe_error(error)]
        return None

    said = hear_all(joined, "the restoration of the position in the data", set_each)
    process = next((i for i, failure in enumerate(said) if failure is not None), None)
    if process is None:
        return
    key, got = said[process]
    lost = [leaf.key for leaf, state in before if not _put_back(leaf, state)]
    left = f"Nothing but {', '.join(map(repr, lost))}, which cannot go back," if lost else "Nothing"
    raise CheckpointError(
        f"{key!r} needs to take the state that {where} has for it",
        got=got if joined is None else f"on {joined.name_process(process)}: {got}",
        why="it was saved from another dataset, from one that is shuffled anew whenever it is "
        f"iterated, or from an iterator of another kind. {left} has been changed",
        fix="make the iterator from the dataset that was saved; give a dataset that shuffles a "
        "method set_epoch(epoch), which seeds its order; or leave the iterator out, and begin "
        "the epoch again: restore(tree without it, partial=True)",
    ) from cause


def _put_back(leaf: StateLeaf, before: PyTree) -> bool:
    """Returns whether a leaf has the state it had before: still, or again."""
    try:
        if leaf.snapshot() != before:
            leaf.put(leaf.convert(before))
    except Exception:  # of a user's class
        return False
    return True


# -- what is refused before anything changes -------------------------------------------


def _require_readable(description: Mapping[str, Any], where: str) -> None:
    """Raises a CheckpointError if a later version wrote what this one cannot read."""
    require(
        description["format"] <= FORMAT,
        f"{where} needs a version of distjax that can read it",
        got=f"format {description['format']}, written by distjax {description['distjax']}",
        why=f"distjax {distjax.__version__} reads formats up to {FORMAT}. Nothing has been changed",
        fix=f"restore it with distjax {description['distjax']} or later",
        error=CheckpointError,
    )
