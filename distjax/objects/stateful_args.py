"""Objects with state through a program: taken apart, threaded, written back.

Outside, the objects among the arguments and those that the function captured become
arrays. Inside, traced objects made of these arrays take their places while the function is
traced. What these hold at the end is written to the objects when the program
has run; an exception before that leaves them as they were.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from distjax.context import frames
from distjax.objects.captures import Captures, substitute
from distjax.objects.stateful import Bridge, Placeholder, StateFound, active_bridge, is_placeholder
from distjax.placement.per_replica import is_per_replica
from distjax.replica.arguments import Static
from distjax.replica.output_layout import AlreadyPlaced
from distjax.replica.run import run_in_trace
from distjax.variables.donation import storage_lock

#: The keyword under which a program gets what no positional argument holds.
_STATE = "<state>"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StaticPart:
    """What is static of the objects that one call takes or captures.

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


class StatefulArgs:
    """The objects with state that one call takes or captures.

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

        def placeholder(value: Any) -> Any:
            if not bridge.is_stateful(value):
                return value
            index = indices[id(value)]
            first = index not in placed
            placed.add(index)
            return Placeholder(index, leaves[index] if first else ())

        is_leaf = _leaf_test(bridge)
        self.args = tuple(jax.tree.map(placeholder, arg, is_leaf=is_leaf) for arg in args)
        self.kwargs = jax.tree.map(placeholder, kwargs, is_leaf=is_leaf)
        given = {s.index for i in donated for s in _placeholders(self.args[i]) if s.leaves}
        kept = frozenset(i for i, owner in enumerate(split.owners) if owner in given)
        rest = [Placeholder(i, leaves[i]) for i in range(len(objects)) if i not in placed]
        self.kwargs[_STATE] = (StaticPart(bridge, split.plan, captured, kept), rest)

    def finish(self, returned: tuple[Any, Any, Mapping[int, Any]]) -> Any:
        """Writes what the program returned to the objects; returns the user's results."""
        result, outcome, stored = returned
        self._split.write_back(
            outcome, {i: x.array if isinstance(x, AlreadyPlaced) else x for i, x in stored.items()}
        )
        return _put_objects(result, [*self._objects, *self._split.members])


def extract_objects(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    strategy: Any,
    donated: Collection[int] = (),
) -> StatefulArgs | None:
    """Takes apart the objects among the arguments of ``fn`` and in what it captured.

    Returns None where there are none.
    """
    bridge = active_bridge()
    if bridge is None:
        return None
    leaves = jax.tree.leaves((args, kwargs), is_leaf=_leaf_test(bridge))
    found = {id(leaf): leaf for leaf in leaves if bridge.is_stateful(leaf)}
    with storage_lock:  # else the traced objects of another thread's trace may be found
        captures = _captures(bridge, fn, leaves)
    found.update((id(o), o) for o in captures.objects)
    if not found:
        return None
    indices = {key: i for i, key in enumerate(found)}
    captured = tuple(indices[id(o)] for o in captures.objects)
    return StatefulArgs(bridge, list(found.values()), captured, args, kwargs, strategy, donated)


def _captures(bridge: Bridge, fn: Any, leaves: Sequence[Any]) -> Captures:
    captures = Captures(bridge.unwrap(fn), bridge.is_stateful)
    for leaf in leaves:  # attributes of the user's own objects among the arguments
        value = leaf.value if isinstance(leaf, Static) else leaf
        if not bridge.is_stateful(value) and not is_placeholder(value):
            captures.search(value)
    return captures


def _leaf_test(bridge: Bridge) -> Callable[[Any], bool]:
    def is_leaf(value: Any) -> bool:
        special = isinstance(value, (Placeholder, Static)) or is_per_replica(value)
        return special or bridge.is_stateful(value)

    return is_leaf


def _placeholders(tree: Any) -> list[Placeholder]:
    return [x for x in jax.tree.leaves(tree, is_leaf=is_placeholder) if is_placeholder(x)]


def _put_objects(tree: Any, objects: Sequence[Any]) -> Any:
    return jax.tree.map(
        lambda x: objects[x.index] if is_placeholder(x) else x, tree, is_leaf=is_placeholder
    )


# -- inside of a program ------------------------------------------------------


def run_here(
    strategy: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], state: Any
) -> Any:
    """Emits ``fn`` on every replica into the trace of `state`, with its objects."""
    stateful = extract_objects(fn, args, kwargs, strategy)
    if stateful is None:
        return run_in_trace(strategy, fn, args, kwargs, state)
    return stateful.finish(emit_run(strategy, fn, stateful.args, stateful.kwargs, state))


def emit_run(
    strategy: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], state: Any
) -> Any:
    """Emits ``fn`` on every replica; objects are arrays among the arguments.

    Returns the results; where there are objects (results, what is static of
    the objects' end, new stored values).
    """
    if _STATE not in kwargs:
        _require_no_state(fn, args, kwargs)
        return run_in_trace(strategy, fn, args, kwargs, state)
    static: StaticPart = kwargs[_STATE][0]
    bridge, plan = static.bridge, static.plan
    args, kwargs = _with_leaves(args, kwargs, lambda leaves: bridge.as_arguments(plan, leaves))

    def on_replica(*args: Any, **kwargs: Any) -> Any:
        return _call(fn, static, args, kwargs, frames.current().replica_context)

    functools.update_wrapper(on_replica, fn, updated=())
    result, outcome, finals = run_in_trace(strategy, on_replica, args, kwargs, state)
    return result, outcome, bridge.combine_writes(plan, outcome, finals, strategy)


def emit_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls ``fn`` in the global view, as `emit_run` does in the replica view."""
    if _STATE not in kwargs:
        _require_no_state(fn, args, kwargs)
        return fn(*args, **kwargs)
    static: StaticPart = kwargs[_STATE][0]
    bridge, plan = static.bridge, static.plan
    args, kwargs = _with_leaves(args, kwargs, lambda leaves: bridge.as_values(plan, leaves))
    result, outcome, finals = _call(fn, static, args, kwargs, None)
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
    """Returns the arguments with all leaves of the placeholders in them converted together."""
    placeholders = sorted(
        (s for s in _placeholders((args, kwargs)) if s.leaves), key=lambda s: s.index
    )
    converted = iter(convert([leaf for s in placeholders for leaf in s.leaves]))
    new = {s.index: Placeholder(s.index, [next(converted) for _ in s.leaves]) for s in placeholders}

    def exchange(value: Any) -> Any:
        return new[value.index] if is_placeholder(value) and value.leaves else value

    return jax.tree.map(exchange, (args, kwargs), is_leaf=_is_placeholder_or_value)


def _is_placeholder_or_value(value: Any) -> bool:
    return isinstance(value, (Placeholder, Static)) or is_per_replica(value)


def _call(
    fn: Callable[..., Any], static: StaticPart, args: tuple[Any, ...], kwargs: Any, context: Any
) -> tuple[Any, Any, dict[int, Any]]:
    """Calls ``fn`` with traced objects in the places of its objects."""
    bridge = static.bridge
    placeholders = sorted(_placeholders((args, kwargs)), key=lambda s: s.index)
    traced = bridge.merge(static.plan, [leaf for s in placeholders for leaf in s.leaves], context)
    kwargs = {k: v for k, v in kwargs.items() if k != _STATE}
    fn = bridge.unwrap(fn)
    leaves = jax.tree.leaves((args, kwargs), is_leaf=_is_placeholder_or_value)
    args, kwargs = _put_objects((args, kwargs), traced.objects)
    with storage_lock:  # one thread at a time has its traced objects in the user's places
        captures = _captures(bridge, fn, leaves)
        found = zip(captures.objects, static.captured, strict=True)
        replacements = {id(o): traced.objects[i] for o, i in found}
        with captures.replace(replacements):
            result = substitute(fn, replacements)(*args, **kwargs)
    members = traced.remaining_members().items()
    indices = {id(member): len(traced.objects) + i for i, member in members}
    indices.update((id(o), i) for i, o in enumerate(traced.objects))

    def placeholder(value: Any) -> Any:
        return Placeholder(indices[id(value)], ()) if id(value) in indices else value

    result = jax.tree.map(
        placeholder, result, is_leaf=lambda x: id(x) in indices or is_per_replica(x)
    )
    outcome, finals = traced.leave(static.kept)
    return result, outcome, finals
