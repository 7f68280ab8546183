"""From the user's tree to entries, and back to a tree of what was restored."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from distjax.checkpoint.entries import Entry, leaf_entry, variable_entry
from distjax.errors import CheckpointError, explain
from distjax.placement.per_replica import PerReplica
from distjax.replica.arguments import is_array
from distjax.strategies.extended import StrategyExtended
from distjax.strategies.strategy import Strategy
from distjax.variables.variable import Variable

#: Objects with attributes that are no part of a user's state.
_NOT_SEARCHED = (type, types.FunctionType, types.ModuleType, Strategy, StrategyExtended)


@dataclasses.dataclass(frozen=True)
class Collected:
    """A tree taken apart.

    Attributes:
      entries: its values, in order.
      strategies: those of the variables in it, each once.
      rebuild: takes what `Entry.write` returned, by key; returns the tree.
    """

    entries: list[Entry]
    strategies: list[Any]
    rebuild: Callable[[Mapping[str, Any]], Any]


def collect(tree: Any) -> Collected:
    """Takes a tree apart into entries with distinct keys.

    Arrays and numbers are named by their path in the tree; variables in an object
    (an optimizer, a metric, a class of the user's) by the path of attributes too. A
    variable that is reached twice has the name of the first time.

    Raises:
      CheckpointError: a leaf that cannot be saved, or two values with one name.
    """
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_leaf)
    entries: list[Entry] = []
    seen: dict[int, Any] = {}
    stands: list[Callable[[Mapping[str, Any]], Any]] = []
    for path, leaf in pairs:
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "value"
        own = _entries_in(name, leaf, seen)
        entries += own
        in_place = not own or own[0].key != name or isinstance(leaf, Variable)
        stands.append(_standing(leaf) if in_place else _taken(name))
    _require_distinct(entries)
    strategies = list(dict.fromkeys(v.strategy for v in seen.values() if isinstance(v, Variable)))
    return Collected(
        entries, strategies, lambda restored: treedef.unflatten([s(restored) for s in stands])
    )


def _standing(leaf: Any) -> Callable[[Mapping[str, Any]], Any]:
    return lambda restored: leaf


def _taken(name: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda restored: restored[name]


def _is_leaf(value: Any) -> bool:
    return isinstance(value, PerReplica) or _is_nnx(value)


def _entries_in(name: str, leaf: Any, seen: dict[int, Any]) -> list[Entry]:
    """Returns the entries of one leaf of the tree."""
    if isinstance(leaf, (str, bool, int, float, complex, PerReplica)):
        return [leaf_entry(name, leaf)]
    if is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
        return [leaf_entry(name, leaf)]
    found = _Search(seen)
    found.search(name, leaf)
    if not found.entries and not found.is_known:
        return [leaf_entry(name, leaf)]  # raises: nothing in it can be saved
    return found.entries


class _Search:
    """Finds what an object holds that a checkpoint keeps.

    Args:
      seen: the variables found so far, by identity.

    Attributes:
      entries: what was found.
      is_known: whether the object is one to keep, even if it adds no entry.
    """

    def __init__(self, seen: dict[int, Any]):
        self._seen, self._visited = seen, set[int]()
        self.entries: list[Entry] = []
        self.is_known = False

    def search(self, name: str, value: Any) -> None:
        """Adds the entries of `value`, a variable or an object that holds some."""
        if isinstance(value, Variable):
            self._add(name, value, variable_entry)
        elif _is_nnx(value):
            self.is_known = True  # one without variables has nothing to lose
            from distjax.checkpoint import nnx_entries

            for key, variable in nnx_entries.variables_in(name, value):
                self._add(key, variable, nnx_entries.entry_of)
        elif hasattr(value, "get_state") and hasattr(value, "set_state"):
            self.entries.append(_position_entry(name, value))
        elif id(value) not in self._visited:
            self._visited.add(id(value))
            for key, child in _children(value):
                self.search(f"{name}/{key}", child)

    def _add(self, name: str, value: Any, make: Callable[[str, Any], Entry]) -> None:
        if id(value) in self._seen:
            self.is_known = True
            return
        self._seen[id(value)] = value
        self.entries.append(make(name, value))


def _children(value: Any) -> list[tuple[str, Any]]:
    """Returns what an object says that it keeps, or else its containers and attributes."""
    if hasattr(type(value), "kept_variables"):
        return _named_leaves(value.kept_variables())
    if isinstance(value, Mapping):
        return [(str(k), v) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return [(str(i), v) for i, v in enumerate(value)]
    if isinstance(value, _NOT_SEARCHED) or not hasattr(value, "__dict__"):
        return []
    return list(vars(value).items())


def _named_leaves(tree: Any) -> list[tuple[str, Any]]:
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in pairs
        if isinstance(leaf, Variable)
    ]


def _position_entry(name: str, iterator: Any) -> Entry:
    def write(state: Any) -> Any:
        iterator.set_state(state)
        return iterator

    return Entry(name, iterator.get_state, write, None)


def _is_nnx(value: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, (nnx.Pytree, nnx.Variable))


def _require_distinct(entries: Sequence[Entry]) -> None:
    names = [e.key for e in entries]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise CheckpointError(
            explain(
                "a tree to save needs a name of its own for each value",
                got=f"two values named {twice[0]!r}",
                why="a value is found by its path in the tree, joined by '/'",
                fix="rename a key or an attribute, so that no name holds a '/'",
            )
        )
