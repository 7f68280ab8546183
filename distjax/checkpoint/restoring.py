"""Restores saved values: reads and checks everything before changing anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distjax.checkpoint.description import saved_specs
from distjax.checkpoint.leaves import StateLeaf, pause_writers
from distjax.checkpoint.matching import match_keys, rename_keys
from distjax.checkpoint.positions import first_failure, own_state
from distjax.checkpoint.storage import Storage
from distjax.checkpoint.trees import Tree
from distjax.cluster.job import Job
from distjax.context import frames
from distjax.errors import CheckpointError, message


class Saved:
    """One step of a storage, to be restored under the tree's names for its keys.

    Attributes:
      names: the saved keys by their names in the tree.

    Raises:
      CheckpointError: not a distjax checkpoint, or a rename that does not fit.
    """

    def __init__(self, storage: Storage, step: int, rename: Mapping[str, str]):
        self._storage = storage
        self._step = step
        self._where = storage.place(step)
        self._description = storage.description(step)
        self._specs = saved_specs(self._description)
        self.names = rename_keys(self._specs, rename, self._where)

    def restore(self, wanted: Tree, names: Mapping[str, str], *, partial: bool) -> Any:
        """Returns the tree with the saved values of its keys `names`.

        A signal that raises meanwhile leaves everything unchanged, or everything restored.

        Raises:
          CheckpointError: the keys differ, or files are damaged.
        """
        specs = {key: leaf.spec for key, leaf in wanted.leaves.items()}
        names = match_keys(specs, self._specs, names, partial=partial, where=self._where)
        values = self._values(wanted, names)
        return self._storage.complete(lambda: self._put(wanted, values))

    def _put(self, wanted: Tree, values: Mapping[str, Any]) -> Any:
        """Puts values that were read and checked into the tree."""
        # In the default context, variables of every strategy can be written.
        with frames.with_stack(()), pause_writers(wanted.leaves.values()):
            leaves = {k: leaf for k, leaf in wanted.leaves.items() if k in values}
            states = [(x, values[k]) for k, x in leaves.items() if isinstance(x, StateLeaf)]
            _set_states(self._storage.job, states, self._where)
            now = {
                key: leaf.restore(values[key])
                if key in values and not isinstance(leaf, StateLeaf)
                else leaf.value
                for key, leaf in wanted.leaves.items()
            }
            return wanted.rebuilt(now)

    def _values(self, wanted: Tree, names: Mapping[str, str]) -> dict[str, Any]:
        """Returns each key's saved array (None for an empty one), number or state."""
        in_json = self._description["values"]
        in_arrays = {
            k: old
            for k, old in names.items()
            if self._specs[old].is_stored_as_array and old not in in_json
        }
        shardings = {old: wanted.leaves[key].sharding() for key, old in in_arrays.items()}
        values = {**in_json, **self._storage.arrays(self._step, shardings)}
        found = {key: values.get(old) for key, old in names.items()}
        return {key: own_state(self._storage.job, key, x, self._where) for key, x in found.items()}


def _set_states(joined: Job | None, states: list[tuple[StateLeaf, Any]], where: str) -> None:
    """Sets the states of iterators; if one rejects its state, puts all of them back."""
    before: list[tuple[Any, Any]] = []
    failure, cause = ("", ""), None
    for leaf, state in states:
        try:
            before.append((leaf.value, leaf.value.get_state()))
            leaf.restore(state)
        except Exception as error:
            text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            failure, cause = (leaf.key, text), error
            break
    key, got = first_failure(joined, failure) if states else failure
    if not got:
        return
    for changed, state in before:
        changed.set_state(state)
    raise CheckpointError(
        message(
            f"{key!r} needs to take the state that {where} has for it",
            got=got,
            why="it was saved from another dataset, or from an iterator of another kind. "
            "Nothing has been changed",
            fix="make the iterator from the dataset that was saved, or leave it out: "
            "restore(tree without it, partial=True)",
        )
    ) from cause
