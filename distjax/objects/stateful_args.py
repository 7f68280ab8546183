"""Stateful objects in a program: split to arrays, threaded through, written back.

Outside the program, the objects among the arguments and those captured by the function become
arrays. While the function is traced, the objects themselves hold traced values. Their final
values are results of the program, and are written to the objects once it has run; an exception
before that leaves them unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any

import jax

from distjax.context import frames
from distjax.context.contracts import StrategyLike
from distjax.objects.plain_objects import checking_outer_state
from distjax.objects.stateful import (
    Bridge,
    ObjectKeywords,
    ObjectLeaves,
    Placeholder,
    ResultTree,
    StaticPart,
    TracedCall,
    TracedObjects,
    active_bridge,
    is_placeholder,
    take_apart,
)
from distjax.objects.walk import Place, find_captures
from distjax.placement.per_replica import is_per_replica
from distjax.replica.arguments import Static, is_one_leaf
from distjax.replica.contexts import ReplicaContext
from distjax.replica.global_value import AlreadyPlaced
from distjax.replica.run import run_in_trace
from distjax.typing import PyTree
from distjax.variables.state import TraceState

# The objects of this thread's current program call. A trace finds them here, because the static
# part of a call must not keep them alive.
_this_thread = threading.local()
#: Held from reading the state of objects until the new state is written: if two threads did so at
#: once, both would read the same state, and one of their steps would be lost.
one_at_a_time = threading.RLock()


class StatefulArgs:
    """The stateful objects that one call takes or captures.

    Args:
      bridge: the bridge of their library.
      objects: the objects, without duplicates; those among the arguments come first.
      split: the objects, split into arrays.
      captured: for each reference to an object in the function, the index of that object and
        the place of the reference.
      args: positional arguments.
      kwargs: keyword arguments.
      donated: indices of the positional arguments that are donated.

    Attributes:
      args, kwargs: the arguments with placeholders for the objects.
    """

    def __init__(
        self,
        bridge: Bridge,
        objects: Sequence[Any],
        split: ObjectLeaves,
        captured: tuple[tuple[int, Place], ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        donated: Collection[int],
    ):
        self._bridge, self._objects, self._split = bridge, objects, split
        leaves: list[list[Any]] = [[] for _ in objects]
        for owner, leaf in zip(split.owners, split.leaves, strict=True):
            leaves[owner].append(leaf)
        indices = {id(o): i for i, o in enumerate(objects)}
        placed: set[int] = set()

        def placeholder(value: PyTree) -> Any:
            if not bridge.is_stateful(value):
                return value
            index = indices[id(value)]
            first = index not in placed
            placed.add(index)
            return Placeholder(index, leaves[index] if first else ())

        is_leaf = _leaf_test(bridge)
        self.args = tuple(jax.tree.map(placeholder, arg, is_leaf=is_leaf) for arg in args)
        kwargs = jax.tree.map(placeholder, kwargs, is_leaf=is_leaf) if kwargs else {}
        given = {s.index for i in donated for s in _placeholders(self.args[i]) if s.leaves}
        kept = frozenset(i for i, owner in enumerate(split.owners) if owner in given)
        rest = [Placeholder(i, leaves[i]) for i in range(len(objects)) if i not in placed]
        self.kwargs = ObjectKeywords(kwargs, rest, StaticPart(split.plan, captured, kept))

    def call(self, program: Callable[..., Any]) -> Any:
        """Returns ``program(args, kwargs, finish)``; traces made during the call find `self`."""
        outer = getattr(_this_thread, "call", None)
        try:
            _this_thread.call = self
            return program(self.args, self.kwargs, self.finish)
        finally:
            _this_thread.call = outer

    def finish(
        self, returned: tuple[ResultTree, TracedCall, Mapping[int, Any]]
    ) -> Callable[[], Any]:
        """Writes the program's results back to the objects; returns what builds the user's.

        That runs the user's code, the classes in the results: it may raise, and changes nothing.
        """
        tree, traced, stored = returned
        arrays = {i: x.array if isinstance(x, AlreadyPlaced) else x for i, x in stored.items()}
        self._split.write_back(traced.outcome, arrays)
        if not traced.returns_objects:
            return tree.build
        objects = [*self._objects, *self._split.members]
        return lambda: _put_objects(tree.build(), objects)

    # -- inside a program ---------------------------------------------------------

    def emit_run(
        self,
        strategy: StrategyLike,
        fn: Callable[..., Any],
        args: tuple[PyTree, ...],
        keywords: ObjectKeywords,
        state: TraceState,
    ) -> tuple[ResultTree, TracedCall, Any]:
        """Emits ``fn`` on every replica; returns what `finish` takes."""
        args, keywords = self._with_inputs(args, keywords, True)

        # Captured objects come last, so that errors number arguments as the user does.
        def on_replica(*args: PyTree, **kwargs: PyTree) -> Any:
            given = ObjectKeywords(kwargs, args[-1], keywords.static)
            return self._trace(fn, args[:-1], given, frames.current().replica_context)

        functools.update_wrapper(on_replica, fn, updated=())
        result, traced, finals = run_in_trace(
            strategy,
            on_replica,
            (*args, keywords.captured),
            keywords.kwargs,
            state,
            returns_object_state=True,
        )
        stored = self._split.combine_writes(traced.outcome, finals, strategy)
        return take_apart(result), traced, stored

    def emit_call(
        self, fn: Callable[..., Any], args: tuple[PyTree, ...], keywords: ObjectKeywords
    ) -> tuple[ResultTree, TracedCall, Any]:
        """Calls ``fn`` in the global view; returns what `finish` takes."""
        args, keywords = self._with_inputs(args, keywords, False)
        result, traced, finals = self._trace(fn, args, keywords, None)
        stored = self._split.combine_writes(traced.outcome, finals, None)
        return take_apart(result), traced, stored

    def _with_inputs(
        self, args: tuple[PyTree, ...], keywords: ObjectKeywords, for_replicas: bool
    ) -> Any:
        """Returns the arguments with the leaves of all placeholders converted at once."""
        placeholders = [s for s in _in_order((args, keywords)) if s.leaves]
        leaves = [leaf for s in placeholders for leaf in s.leaves]
        converted = iter(self._split.as_inputs(leaves, for_replicas))
        new = {
            s.index: Placeholder(s.index, [next(converted) for _ in s.leaves]) for s in placeholders
        }

        def exchange(value: PyTree) -> Any:
            return new[value.index] if is_placeholder(value) and value.leaves else value

        return jax.tree.map(exchange, (args, keywords), is_leaf=_is_placeholder_or_value)

    def _trace(
        self,
        fn: Callable[..., Any],
        args: tuple[PyTree, ...],
        keywords: ObjectKeywords,
        context: ReplicaContext | None,
    ) -> tuple[Any, TracedCall, dict[int, Any]]:
        """Calls ``fn`` while its objects hold the placeholders' leaves."""
        leaves = [leaf for s in _in_order((args, keywords)) for leaf in s.leaves]
        args, kwargs = _put_objects((args, keywords.kwargs), self._objects)
        fn = self._bridge.unwrap(fn)

        def body(traced: TracedObjects) -> tuple[Any, TracedCall, dict[int, Any]]:
            result, returns_objects = self._replace_objects(fn(*args, **kwargs), traced)
            outcome, finals = traced.collect(keywords.static.kept)
            return result, TracedCall(outcome, returns_objects), finals

        return self._split.unflatten(leaves, context, body)

    def _replace_objects(self, result: PyTree, traced: TracedObjects) -> tuple[Any, bool]:
        """Returns results with placeholders for objects and variables, and whether it has any."""
        count = len(self._objects)
        indices = {id(v): count + i for i, v in traced.remaining_members().items()}
        indices.update((id(o), i) for i, o in enumerate(self._objects))

        placeholders: list[Placeholder] = []

        def placeholder(value: PyTree) -> Any:
            if id(value) not in indices:
                return value
            placeholders.append(Placeholder(indices[id(value)], ()))
            return placeholders[-1]

        is_leaf = lambda x: id(x) in indices or is_per_replica(x)
        return jax.tree.map(placeholder, result, is_leaf=is_leaf), bool(placeholders)


def find_objects(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    strategy: StrategyLike | None,
    donated: Collection[int],
    *,
    is_in_program: bool = False,
) -> Callable[[], StatefulArgs] | None:
    """Finds the objects among the arguments of ``fn`` and those that it captured.

    Returns None if there are none, else what splits them; outside a program, that is to be called
    with `one_at_a_time` held. A call without objects waits for nobody.
    """
    bridge = active_bridge()
    if bridge is None:
        return None
    leaves = _leaves(bridge, args, kwargs)
    if any(map(bridge.is_member, leaves)):
        args, kwargs = bridge.with_own_values((args, kwargs))
        leaves = _leaves(bridge, args, kwargs)
    given, captures = _find_objects(bridge, fn, leaves)
    found = {id(o): o for o in (*given, *(o for o, _ in captures))}
    if not found:
        return None

    def split() -> StatefulArgs:
        indices = {key: i for i, key in enumerate(found)}
        captured = tuple((indices[id(o)], place) for o, place in captures)
        objects = list(found.values())
        flat = bridge.flatten(objects, strategy, is_in_program=is_in_program)
        return StatefulArgs(bridge, objects, flat, captured, args, kwargs, donated)

    return split


def has_objects(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a call takes or captures stateful objects."""
    bridge = active_bridge()
    return bridge is not None and any(_find_objects(bridge, fn, _leaves(bridge, args, kwargs)))


def _leaves(bridge: Bridge, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return jax.tree.leaves((args, kwargs), is_leaf=_leaf_test(bridge))


def _find_objects(
    bridge: Bridge, fn: Callable[..., Any], leaves: Sequence[Any]
) -> tuple[list[Any], list[tuple[Any, Place]]]:
    """Returns the objects among the leaves of arguments, and those that the function captured."""
    values = [leaf.value if isinstance(leaf, Static) else leaf for leaf in leaves]
    given = [leaf for leaf in leaves if bridge.is_stateful(leaf)]
    others = [x for x in values if not (bridge.is_stateful(x) or is_placeholder(x))]
    return given, find_captures([bridge.unwrap(fn), *others], bridge.is_stateful)


def _leaf_test(bridge: Bridge) -> Callable[[Any], bool]:
    def is_leaf(value: object) -> bool:
        return _is_placeholder_or_value(value) or bridge.is_stateful(value)

    return is_leaf


def _is_placeholder_or_value(value: object) -> bool:
    return is_placeholder(value) or is_one_leaf(value)


def _placeholders(tree: PyTree) -> list[Placeholder]:
    return [x for x in jax.tree.leaves(tree, is_leaf=is_placeholder) if is_placeholder(x)]


def _in_order(tree: PyTree) -> list[Placeholder]:
    return sorted(_placeholders(tree), key=lambda s: s.index)


def _put_objects(tree: PyTree, objects: Sequence[Any]) -> Any:
    return jax.tree.map(
        lambda x: objects[x.index] if is_placeholder(x) else x, tree, is_leaf=is_placeholder
    )


# -- emission -----------------------------------------------------------------


def run_here(
    strategy: StrategyLike,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: TraceState,
) -> Any:
    """Emits ``fn`` on every replica into the trace of `state`, with its objects."""
    split = find_objects(fn, args, kwargs, strategy, (), is_in_program=True)
    stateful = None if split is None else split()
    with _checking_trace(fn, is_whole_program=False):
        if stateful is None:
            return run_in_trace(strategy, fn, args, kwargs, state)
        call = stateful.args, stateful.kwargs
        return stateful.finish(stateful.emit_run(strategy, fn, *call, state))()


def emit_run(
    strategy: StrategyLike,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, PyTree] | ObjectKeywords,
    state: TraceState,
) -> Any:
    """Emits ``fn`` on every replica; objects are passed as arrays in the arguments.

    Returns the results; if there are objects, (results, static part of the objects' final
    state, new stored values).
    """
    with _checking_trace(fn):
        if isinstance(kwargs, ObjectKeywords):
            return _this_thread.call.emit_run(strategy, fn, args, kwargs, state)
        return run_in_trace(strategy, fn, args, kwargs, state)


def emit_call(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, PyTree] | ObjectKeywords
) -> Any:
    """Calls ``fn`` in the global view; otherwise like `emit_run`."""
    with _checking_trace(fn):
        if isinstance(kwargs, ObjectKeywords):
            return _this_thread.call.emit_call(fn, args, kwargs)
        return fn(*args, **kwargs)


@contextlib.contextmanager
def _checking_trace(fn: Callable[..., Any], *, is_whole_program: bool = True) -> Generator[None]:
    """A context for the trace of ``fn``: see `checking_outer_state`.

    An error that the bridge explains is replaced by its clearer one.
    """
    try:
        with checking_outer_state(fn, is_whole_program=is_whole_program):
            yield
    except Exception as error:
        bridge = active_bridge()
        explained = None if bridge is None else bridge.explain(error)
        if explained is None:
            raise
        raise explained from error
