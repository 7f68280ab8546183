"""Which strategy NNX objects were placed for."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from flax import nnx

from distjax.context.contracts import StrategyLike
from distjax.errors import StrategyMismatchError, message
from distjax.strategies.strategy import are_equal
from distjax.typing import PyTree

# Keyed by id, since objects may define equality, and weak, so that they can die.
_strategies: dict[int, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}


def strategy_of(node: PyTree) -> Any:
    """Returns the live strategy that `node` was placed for, or None."""
    entry = _strategies.get(id(node))
    return None if entry is None or entry[0]() is not node else entry[1]()


def common_strategy(objects: Sequence[Any]) -> Any:
    """Returns the strategy that all placed modules in `objects` share, or None."""
    owners = {strategy_of(node) for node in objects if isinstance(node, nnx.Pytree)} - {None}
    return owners.pop() if len(owners) == 1 else None


def objects_placed_for(strategy: StrategyLike) -> list[Any]:
    """Returns the live modules that were placed for `strategy`."""
    entries = [(node(), owner()) for node, owner in list(_strategies.values())]
    return [node for node, owner in entries if node is not None and owner is strategy]


def assign_strategy(objects: Sequence[Any], strategy: StrategyLike, is_known: bool) -> None:
    """Records that all modules in `objects` are placed for `strategy`.

    Those that were placed for an equal strategy, as by a notebook cell that has run again, become
    modules of this one.

    Args:
      objects: NNX objects.
      strategy: the strategy.
      is_known: whether their graph, as it is now, was used under `strategy` before: then the
        records of the objects themselves speak for all modules in them. (Variables have none.)

    Raises:
      StrategyMismatchError: one was placed for a strategy that is not equal; nothing is recorded.
    """
    own = [node for node in objects if isinstance(node, nnx.Pytree)]
    if (is_known or not own) and all(strategy_of(node) is strategy for node in own):
        return
    nodes = [n for _, n in nnx.iter_graph(tuple(objects)) if isinstance(n, nnx.Pytree)]
    for node in (*objects, *nodes):  # the user's own object is named first
        owner = strategy_of(node)
        if owner is not None and owner is not strategy and not are_equal(owner, strategy):
            raise StrategyMismatchError(_text(node, owner, strategy))
    for node in nodes:
        _assign(node, strategy)


def assign_unassigned(nodes: Sequence[Any], strategy: StrategyLike) -> None:
    """Records `strategy` for the modules in `nodes` that have none."""
    for node in nodes:
        if strategy_of(node) is None:
            _assign(node, strategy)


def _assign(node: PyTree, strategy: StrategyLike) -> None:
    key = id(node)
    forget = weakref.ref(node, lambda _: _strategies.pop(key, None))
    _strategies[key] = (forget, weakref.ref(strategy))


def records(nodes: Sequence[Any]) -> dict[int, Any]:
    """Returns the records of modules, to be restored by `put_back`."""
    return {id(node): _strategies.get(id(node)) for node in nodes}


def forget(nodes: Sequence[Any]) -> None:
    """Forgets which strategy modules were placed for."""
    for node in nodes:
        _strategies.pop(id(node), None)


def put_back(records: dict[int, Any]) -> None:
    """Restores records; idempotent."""
    for key, record in records.items():
        if record is None:
            _strategies.pop(key, None)
        else:
            _strategies[key] = record


def _text(node: object, owner: StrategyLike | None, strategy: StrategyLike) -> str:
    other = repr(owner)
    if other == repr(strategy):
        other = "another strategy of this description, with other devices or options"
    return message(
        f"{type(node).__name__} needs to be placed for the strategy that uses it, {strategy!r}",
        got=f"one that was placed for {other}",
        why="Mixing different tf.distribute.Strategy objects: its arrays live where the other "
        "strategy put them",
        fix="use one strategy, or move the object to this one: with strategy.scope(): "
        "dj.flax.place(model)",
    )
