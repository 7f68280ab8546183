"""Restores saved values: reads and checks everything before changing anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from distjax.checkpoint.agreement import agree_on_step
from distjax.checkpoint.description import require_readable, saved_settings, saved_specs
from distjax.checkpoint.leaves import Leaf, StateLeaf, pause_writers
from distjax.checkpoint.matching import match_keys, rename_keys
from distjax.checkpoint.positions import first_failure, own_state
from distjax.checkpoint.storage import Storage
from distjax.checkpoint.trees import Tree
from distjax.checkpoint.value_checks import require_one_value_each, require_settings
from distjax.cluster.job import Job
from distjax.context import frames
from distjax.data.iterator import DistributedIterator
from distjax.errors import CheckpointError, describe_error, message
from distjax.typing import PyTree


class Saved:
    """One saved step, whose keys may have other names in the tree.

    Attributes:
      names: the saved keys by their names in the tree.

    Raises:
      CheckpointError: not a distjax checkpoint, one of a later format, or a rename that does
        not fit.
    """

    def __init__(self, storage: Storage, step: int, rename: Mapping[str, str]):
        self._storage = storage
        self._step = step
        self._where = storage.describe_step(step)
        self._description = storage.description(step)
        require_readable(self._description, self._where)
        self._specs = saved_specs(self._description)
        self.names = rename_keys(self._specs, rename, self._where)

    def agree(self, occasion: str, leaves: Iterable[Leaf]) -> None:
        """Waits until every process is about to restore these leaves: see `agree_on_step`."""
        agree_on_step(self._storage.job, occasion, self._step, leaves)

    def restore(self, wanted: Tree, names: Mapping[str, str], *, partial: bool) -> Any:
        """Returns the tree with saved values for its keys in `names`.

        If a signal raises meanwhile, either everything is restored or nothing has changed.

        Raises:
          CheckpointError: the keys differ, a value is out of the range of its place or of an
            object of another setting, one variable has two values, or files are damaged.
        """
        specs = {key: leaf.spec for key, leaf in wanted.leaves.items()}
        names = match_keys(specs, self._specs, names, partial=partial, where=self._where)
        values = {
            key: self._convert(wanted.leaves[key], saved)
            for key, saved in self._values(wanted, names).items()
        }
        settings = saved_settings(self._description)
        settings = {key: settings[old] for key, old in names.items() if old in settings}
        require_settings(wanted.leaves, values, settings, self._where)
        require_one_value_each(wanted.leaves, values, self._where)
        return self._storage.complete(lambda: self._put(wanted, values))

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
                message(
                    f"{leaf.key!r} of {self._where} needs values that {leaf.spec} can hold",
                    got=str(error),
                    why="they would wrap around, or become infinite. Nothing has been changed",
                    fix="give the tree a wider dtype there: one of 64 bits as a numpy array, or "
                    "with jax_enable_x64",
                )
            ) from error

    def _values(self, wanted: Tree, names: Mapping[str, str]) -> dict[str, Any]:
        """Returns each key's saved array (None for an empty one), number or state."""
        in_json = self._description["values"]
        in_arrays = {
            k: old
            for k, old in names.items()
            if self._specs[old].is_stored_as_array and old not in in_json
        }
        shardings = {
            old: wanted.leaves[key].sharding() if self._specs[old].is_in_jax else None
            for key, old in in_arrays.items()
        }
        values = {**in_json, **self._storage.arrays(self._step, shardings)}
        found = {key: values.get(old) for key, old in names.items()}
        return {key: own_state(self._storage.job, key, x, self._where) for key, x in found.items()}


def _set_states(joined: Job | None, states: list[tuple[StateLeaf, Any]], where: str) -> None:
    """Sets the states of iterators; if one rejects its state, puts all of them back."""
    ours = [leaf.value for leaf, _ in states if isinstance(leaf.value, DistributedIterator)]
    for iterator in ours:
        iterator.stop_reading()
    # A source that is in the tree itself was read ahead; its distributed iterator, set last,
    # knows the position.
    states = sorted(states, key=lambda pair: isinstance(pair[0].value, DistributedIterator))
    before: list[tuple[StateLeaf, Any]] = []
    failure, cause = ("", ""), None
    for leaf, state in states:
        try:
            before.append((leaf, leaf.snapshot()))
            leaf.put(state)
        except Exception as error:
            failure, cause = (leaf.key, describe_error(error)), error
            break
    if not failure[1]:
        failure, cause = _reach_positions(states)
    key, got = first_failure(joined, failure) if states else failure
    if not got:
        return
    lost = [leaf.key for leaf, state in before if not _put_back(leaf, state)]
    left = f"Nothing but {', '.join(map(repr, lost))}, which cannot go back," if lost else "Nothing"
    raise CheckpointError(
        message(
            f"{key!r} needs to take the state that {where} has for it",
            got=got,
            why="it was saved from another dataset, from one that is shuffled anew whenever it is "
            f"iterated, or from an iterator of another kind. {left} has been changed",
            fix="make the iterator from the dataset that was saved; give a dataset that shuffles a "
            "method set_epoch(epoch), which seeds its order; or leave the iterator out, and begin "
            "the epoch again: restore(tree without it, partial=True)",
        )
    ) from cause


def _reach_positions(
    states: list[tuple[StateLeaf, Any]],
) -> tuple[tuple[str, str], Exception | None]:
    """Reads sources that cannot be read again up to their positions; returns the first failure.

    After all else, since what they give until then is gone.
    """
    for leaf, _ in states:
        if isinstance(leaf.value, DistributedIterator):
            try:
                leaf.value.reach_position()
            except Exception as error:
                return (leaf.key, describe_error(error)), error
    return ("", ""), None


def _put_back(leaf: StateLeaf, before: PyTree) -> bool:
    """Returns whether a leaf has the state it had before: still, or again."""
    try:
        if leaf.snapshot() != before:
            leaf.put(leaf.convert(before))
    except Exception:  # of a user's class
        return False
    return True
