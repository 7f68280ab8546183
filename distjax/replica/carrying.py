"""Carrying objects with state through a program: taken apart, threaded, written back.

Outside, the objects among the arguments and those that the function captured become
arrays. Inside, stand-ins made of these arrays take their places while the function is
traced. What the stand-ins hold at the end is written to the objects when the program
has run; an exception before that leaves them as they were.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from distjax.context import frames
from distjax.placement.per_replica import is_per_replica
from distjax.replica.arguments import Static
from distjax.replica.captures import Captures, substituted
from distjax.replica.layout import Settled
from distjax.replica.run import run_in_trace
from distjax.replica.stateful import Bridge, Slot, StateFound, active_bridge, is_slot
from distjax.variables.lending import storage_lock

#: The keyword under which a program gets what no positional argument carries.
_STATE = "<state>"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Carried:
    """What is static of the objects that one call carries.

    Attributes:
      bridge: the bridge of their library.
      plan: the bridge's own.
      captured: per object that the function captured its number.
      kept: numbers of leaves that come back changed or not, as they are donated.
    """

    bridge: Bridge
    plan: Any
    captured: tuple[int, ...]
    kept: frozenset[int]


class Carrier:
    """The objects with state that one call carries.

    Args:
      bridge: the bridge of their library.
      objects: the objects, each once; those among the arguments come first.
      captured: per object that the function captured its number.
      args: positional arguments.
      kwargs: keyword arguments.
      strategy: the strategy to place them for, or None.
      donated: numbers of the positional arguments that are donated.

    Attributes:
      args, kwargs: the arguments with arrays in the objects' places.
    """

    def __init__(
        self,
        bridge: Bridge,
        objects: Sequence[Any],
        captured: tuple[int, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        strategy: Any,
        donated: Collection[int],
    ):
        self._objects = objects
        self._split = split = bridge.split(objects, strategy)
        leaves: list[list[Any]] = [[] for _ in objects]
        for owner, leaf in zip(split.owners, split.leaves, strict=True):
            leaves[owner].append(leaf)
        indices = {id(o): i for i, o in enumerate(objects)}
        placed: set[int] = set()

        def slot(value: Any) -> Any:
            if not bridge.is_stateful(value):
                return value
            index = indices[id(value)]
            first = index not in placed
            placed.add(index)
            return Slot(index, leaves[index] if first else ())

        is_leaf = _leaf_test(bridge)
        self.args = tuple(jax.tree.map(slot, arg, is_leaf=is_leaf) for arg in args)
        self.kwargs = jax.tree.map(slot, kwargs, is_leaf=is_leaf)
        given = {s.index for i in donated for s in _slots(self.args[i]) if s.leaves}
        kept = frozenset(i for i, owner in enumerate(split.owners) if owner in given)
        rest = [Slot(i, leaves[i]) for i in range(len(objects)) if i not in placed]
        self.kwargs[_STATE] = (Carried(bridge, split.plan, captured, kept), rest)

    def finish(self, returned: tuple[Any, Any, Mapping[int, Any]]) -> Any:
        """Writes what the program returned to the objects; returns the user's results."""
        result, outcome, stored = returned
        self._split.write_back(
            outcome, {i: x.array if isinstance(x, Settled) else x for i, x in stored.items()}
        )
        return _restored(result, [*self._objects, *self._split.members])


def carry(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    strategy: Any,
    donated: Collection[int] = (),
) -> Carrier | None:
    """Takes apart the objects among the arguments of ``fn`` and in what it captured.

    Returns None where there are none.
    """
    bridge = active_bridge()
    if bridge is None:
        return None
    leaves = jax.tree.leaves((args, kwargs), is_leaf=_leaf_test(bridge))
    found = {id(leaf): leaf for leaf in leaves if bridge.is_stateful(leaf)}
    with storage_lock:  # else the stand-ins of another thread's trace may be found
        captures = _captures(bridge, fn, leaves)
    found.update((id(o), o) for o in captures.objects)
    if not found:
        return None
    indices = {key: i for i, key in enumerate(found)}
    captured = tuple(indices[id(o)] for o in captures.objects)
    return Carrier(bridge, list(found.values()), captured, args, kwargs, strategy, donated)


def _captures(bridge: Bridge, fn: Any, leaves: Sequence[Any]) -> Captures:
    captures = Captures(bridge.unwrapped(fn), bridge.is_stateful)
    for leaf in leaves:  # attributes of the user's own objects among the arguments
        value = leaf.value if isinstance(leaf, Static) else leaf
        if not bridge.is_stateful(value) and not is_slot(value):
            captures.search(value)
    return captures


def _leaf_test(bridge: Bridge) -> Callable[[Any], bool]:
    def is_leaf(value: Any) -> bool:
        special = isinstance(value, (Slot, Static)) or is_per_replica(value)
        return special or bridge.is_stateful(value)

    return is_leaf


def _slots(tree: Any) -> list[Slot]:
    return [x for x in jax.tree.leaves(tree, is_leaf=is_slot) if is_slot(x)]


def _restored(tree: Any, objects: Sequence[Any]) -> Any:
    return jax.tree.map(lambda x: objects[x.index] if is_slot(x) else x, tree, is_leaf=is_slot)


# -- inside of a program ------------------------------------------------------


def run_here(
    strategy: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], state: Any
) -> Any:
    """Emits ``fn`` on every replica into the trace of `state`, with the objects it carries."""
    carrier = carry(fn, args, kwargs, strategy)
    if carrier is None:
        return run_in_trace(strategy, fn, args, kwargs, state)
    return carrier.finish(emit_run(strategy, fn, carrier.args, carrier.kwargs, state))


def emit_run(
    strategy: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], state: Any
) -> Any:
    """Emits ``fn`` on every replica; carried objects are arrays among the arguments.

    Returns the results; where objects are carried (results, what is static of
    the objects' end, new stored values).
    """
    if _STATE not in kwargs:
        _require_no_state(fn, args, kwargs)
        return run_in_trace(strategy, fn, args, kwargs, state)
    carried: Carried = kwargs[_STATE][0]
    bridge, plan = carried.bridge, carried.plan
    args, kwargs = _with_leaves(args, kwargs, lambda leaves: bridge.as_arguments(plan, leaves))

    def on_replica(*args: Any, **kwargs: Any) -> Any:
        return _call(fn, carried, args, kwargs, frames.current().replica_context)

    functools.update_wrapper(on_replica, fn, updated=())
    result, outcome, finals = run_in_trace(strategy, on_replica, args, kwargs, state)
    return result, outcome, bridge.settle(plan, outcome, finals, strategy)


def emit_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls ``fn`` in the global view, as `emit_run` does in the replica view."""
    if _STATE not in kwargs:
        _require_no_state(fn, args, kwargs)
        return fn(*args, **kwargs)
    carried: Carried = kwargs[_STATE][0]
    bridge, plan = carried.bridge, carried.plan
    args, kwargs = _with_leaves(args, kwargs, lambda leaves: bridge.as_values(plan, leaves))
    result, outcome, finals = _call(fn, carried, args, kwargs, None)
    return result, outcome, bridge.store(plan, outcome, finals)


def _require_no_state(fn: Any, args: Any, kwargs: Any) -> None:
    bridge = active_bridge()
    if bridge is None:
        return
    leaves = jax.tree.leaves((args, kwargs), is_leaf=_leaf_test(bridge))
    if any(map(bridge.is_stateful, leaves)) or _captures(bridge, fn, leaves).objects:
        raise StateFound


def _with_leaves(
    args: tuple[Any, ...], kwargs: dict[str, Any], convert: Callable[[list[Any]], list[Any]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with all leaves of the slots in them converted together."""
    slots = sorted((s for s in _slots((args, kwargs)) if s.leaves), key=lambda s: s.index)
    converted = iter(convert([leaf for s in slots for leaf in s.leaves]))
    new = {s.index: Slot(s.index, [next(converted) for _ in s.leaves]) for s in slots}

    def exchange(value: Any) -> Any:
        return new[value.index] if is_slot(value) and value.leaves else value

    return jax.tree.map(exchange, (args, kwargs), is_leaf=_is_slot_or_value)


def _is_slot_or_value(value: Any) -> bool:
    return isinstance(value, (Slot, Static)) or is_per_replica(value)


def _call(
    fn: Callable[..., Any], carried: Carried, args: tuple[Any, ...], kwargs: Any, context: Any
) -> tuple[Any, Any, dict[int, Any]]:
    """Calls ``fn`` with stand-ins in the places of the objects that it carries."""
    bridge = carried.bridge
    slots = sorted(_slots((args, kwargs)), key=lambda s: s.index)
    held = bridge.merge(carried.plan, [leaf for s in slots for leaf in s.leaves], context)
    kwargs = {k: v for k, v in kwargs.items() if k != _STATE}
    fn = bridge.unwrapped(fn)
    leaves = jax.tree.leaves((args, kwargs), is_leaf=_is_slot_or_value)
    args, kwargs = _restored((args, kwargs), held.objects)
    with storage_lock:  # one thread at a time has its stand-ins in the user's places
        captures = _captures(bridge, fn, leaves)
        found = zip(captures.objects, carried.captured, strict=True)
        stand_ins = {id(o): held.objects[i] for o, i in found}
        with captures.replaced(stand_ins):
            result = substituted(fn, stand_ins)(*args, **kwargs)
    members = held.members_left().items()
    indices = {id(member): len(held.objects) + i for i, member in members}
    indices.update((id(o), i) for i, o in enumerate(held.objects))

    def slot(value: Any) -> Any:
        return Slot(indices[id(value)], ()) if id(value) in indices else value

    result = jax.tree.map(slot, result, is_leaf=lambda x: id(x) in indices or is_per_replica(x))
    outcome, finals = held.leave(carried.kept)
    return result, outcome, finals
