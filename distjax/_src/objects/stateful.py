"""Objects with state (Flax modules) in a program: split into arrays, and written back.

Outside the program, the objects among the arguments and those captured by the function become
arrays. While the function is traced, the objects themselves hold traced values. Their final
values are results of the program, and are written to the objects once it has run; an exception
before that leaves them unchanged.

The library of such objects registers with `hooks.object_layers`, and is known here by one
contract, `ObjectLibrary`. It is imported only once its library has been.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax

from distjax._src import hooks
from distjax._src.context import StrategyLike, frames, without_expectations
from distjax._src.objects.plain_objects import watch_inner
from distjax._src.objects.walk import Place, find_captures
from distjax._src.placement import is_per_replica
from distjax._src.replica.arguments import ObjectStateKey, Static, is_one_leaf, nodes_of
from distjax._src.replica.contexts import ReplicaContext
from distjax._src.replica.global_value import AlreadyPlaced
from distjax._src.replica.trace import run_in_trace
from distjax._src.typing import PyTree
from distjax._src.variables.description import VariableDescription
from distjax._src.variables.state import TraceState

# -- the contract -------------------------------------------------------------


class ObjectLibrary(Protocol):
    """A library whose objects change in place."""

    def is_stateful(self, value: object) -> bool:
        """Returns whether `value` is an object that changes in place."""
        ...

    def is_member(self, value: object) -> bool:
        """Returns whether `value` is a variable, which may be part of a larger object."""
        ...

    def with_own_values(self, tree: PyTree) -> PyTree:
        """Returns `tree` with copies of its containers of variables that are values."""
        ...

    def unwrap(self, fn: Callable[..., Any]) -> Any:
        """Returns the function wrapped by a compiling decorator of the library."""
        ...

    def explain(self, error: Exception) -> Exception | None:
        """Returns a clearer error to raise instead of the library's, or None."""
        ...

    def describe(self, strategy: StrategyLike) -> list[VariableDescription]:
        """Returns a description of each variable of objects placed for `strategy`."""
        ...

    def find_baked(self, constants: Sequence[Any]) -> str | None:
        """Describes an object whose array is among `constants`; None if there is none."""
        ...

    def split(
        self, objects: Sequence[Any], strategy: StrategyLike | None, *, is_in_program: bool
    ) -> SplitObjects:
        """Returns the objects of a call split into arrays, after placing them for `strategy`.

        If that `is_in_program`, a trace meets them, whose call has found them.
        """
        ...


class SplitObjects(Protocol):
    """The objects of a call, split into arrays.

    Attributes:
      plan: their static part; hashable.
      leaves: their arrays and PerReplicas, in stored form.
      owners: per leaf, the index of the object in which it was first found.
      members: the parts of the objects that a function may return by themselves: their variables.
    """

    plan: Any
    leaves: list[Any]
    owners: Sequence[int]
    members: Sequence[Any]

    def as_inputs(self, leaves: Sequence[Any], for_replicas: bool) -> list[Any]:
        """Converts stored leaves to the global view, as inputs of `run` or as values."""
        ...

    def holding(
        self, leaves: Sequence[Any], context: ReplicaContext | None
    ) -> contextlib.AbstractContextManager[None]:
        """A context in which the objects hold these values; afterwards they are as before.

        `context` is the replica context; None in the global view.
        """
        ...

    def remaining_members(self) -> Mapping[int, Any]:
        """While they hold traced values: the `members` that they still have, by number."""
        ...

    def collect(self, even_unchanged: frozenset[int]) -> tuple[Any, dict[int, Any]]:
        """While they hold traced values: how they are now, and the changed leaves by number.

        Leaves numbered in `even_unchanged` are returned even if unchanged.
        """
        ...

    def combine_writes(
        self, outcome: Any, finals: Mapping[int, Any], strategy: StrategyLike | None
    ) -> Any:
        """Returns the stored form of the leaves that were written, by number.

        `outcome` and `finals`, in the global view, are from `collect`; without a strategy, whose
        replicas wrote, global-view code did.
        """
        ...

    def before(self, outcome: Any, number: int) -> list[tuple[str, Any]]:
        """Returns the name and the former value of each array of a variable, by number.

        None in the place of the value of one that is new.
        """
        ...

    def write_back(self, outcome: Any, stored: Mapping[int, Any]) -> None:
        """Writes the new values to the objects."""
        ...


def active_bridge() -> ObjectLibrary | None:
    """Returns what takes the objects of an imported library into programs, or None."""
    for library, ours in hooks.object_layers.items():
        if library in sys.modules:
            return _import_bridge(ours)
    return None


def is_stateful(value: object) -> bool:
    """Returns whether a value is an object with state of an imported library."""
    bridge = active_bridge()
    return bridge is not None and bridge.is_stateful(value)


@functools.cache
def _import_bridge(name: str) -> ObjectLibrary:
    return importlib.import_module(name).LAYER


# -- how a call with objects enters and leaves a program ------------------------


class Placeholder:
    """Stands for an object among arguments: a pytree node of its arrays."""

    __slots__ = ("index", "leaves")

    def __init__(self, index: int, leaves: Sequence[Any]):
        self.index, self.leaves = index, leaves


jax.tree_util.register_pytree_with_keys(
    Placeholder,
    lambda s: ([(ObjectStateKey(i), leaf) for i, leaf in enumerate(s.leaves)], s.index),
    lambda index, leaves: Placeholder(index, tuple(leaves)),
    lambda s: (tuple(s.leaves), s.index),
)


def is_placeholder(value: object) -> bool:
    """Returns whether `value` stands for an object; for use as ``is_leaf=``."""
    return isinstance(value, Placeholder)


class ResultTree:
    """The user's results, taken apart: the classes in them are called after the write-back.

    They are the user's code, which may raise, and the objects have to be written whole by then.
    """

    __slots__ = ("has_objects", "leaves", "paths", "treedef")

    def __init__(
        self,
        leaves: Sequence[Any],
        paths: tuple[str, ...],
        treedef: jax.tree_util.PyTreeDef,
        has_objects: bool,
    ):
        self.leaves, self.paths, self.treedef = leaves, paths, treedef
        self.has_objects = has_objects

    def build(self) -> Any:
        """Returns the results."""
        return self.treedef.unflatten(self.leaves)

    def flatten(self) -> tuple[Sequence[Any], Any]:
        """Returns the leaves, and the rest of a tree."""
        return self.leaves, (self.paths, self.treedef, self.has_objects)

    def flatten_with_keys(self) -> tuple[Sequence[Any], Any]:
        """Returns the leaves with their paths, and the rest of a tree."""
        keys = map(_UserPath, self.paths)
        return list(zip(keys, self.leaves, strict=True)), self.flatten()[1]


@dataclasses.dataclass(frozen=True)
class _UserPath:
    """A path in the user's results, as one key."""

    text: str

    def __str__(self) -> str:
        return self.text


jax.tree_util.register_pytree_with_keys(
    ResultTree,
    ResultTree.flatten_with_keys,
    lambda form, leaves: ResultTree(tuple(leaves), *form),
    ResultTree.flatten,
)


def take_apart(results: PyTree) -> ResultTree:
    """Returns the results of a step as a tree that is built without the user's code."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(results, is_leaf=is_one_leaf)
    paths = tuple(jax.tree_util.keystr(path) for path, _ in pairs)
    has_objects = any(kind is Placeholder for kind, _ in nodes_of(treedef))
    return ResultTree([leaf for _, leaf in pairs], paths, treedef, has_objects)


@dataclasses.dataclass(frozen=True)
class ObjectKeywords:
    """The keyword arguments of a call with objects, plus what is in no argument.

    Attributes:
      captured: the leaves of objects that are only captured by the function.
      plan: the static part of the objects.
      places: for each reference to an object in the function, the index of that object and the
        place of the reference.
      kept: indices of leaves that are returned even if unchanged, because they are donated.
    """

    kwargs: dict[str, Any]
    captured: list[Placeholder]
    plan: Any
    places: tuple[tuple[int, Place], ...]
    kept: frozenset[int]


def _flatten_keywords(node: ObjectKeywords) -> tuple[Any, Any]:
    names = sorted(node.kwargs)
    values = [(jax.tree_util.DictKey(name), node.kwargs[name]) for name in names]
    captured = (jax.tree_util.DictKey("captured objects"), node.captured)
    return (*values, captured), (tuple(names), node.plan, node.places, node.kept)


def _unflatten_keywords(aux: tuple[Any, ...], children: Iterable[PyTree]) -> ObjectKeywords:
    *values, captured = children
    return ObjectKeywords(dict(zip(aux[0], values, strict=True)), captured, *aux[1:])


jax.tree_util.register_pytree_with_keys(ObjectKeywords, _flatten_keywords, _unflatten_keywords)


# -- one call -------------------------------------------------------------------

# The objects of this thread's current program call. A trace finds them here, because the static
# part of a call must not keep them alive.
_this_thread = threading.local()
#: Held from reading the state of objects until the new state is written: if two threads did so at
#: once, both would read the same state, and one of their steps would be lost.
one_at_a_time = threading.RLock()


class StatefulArgs:
    """The stateful objects that one call takes or captures, those among the arguments first.

    In `args` and `kwargs` placeholders stand for them. `captured` has, for each reference to an
    object in the function, the index of that object and the place of the reference.
    """

    def __init__(
        self,
        bridge: ObjectLibrary,
        objects: Sequence[Any],
        split: SplitObjects,
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
        self._outcome: tuple[Any, tuple[int, ...]] = None, ()
        self.args = tuple(jax.tree.map(placeholder, arg, is_leaf=is_leaf) for arg in args)
        kwargs = jax.tree.map(placeholder, kwargs, is_leaf=is_leaf) if kwargs else {}
        given = {s.index for i in donated for s in _placeholders(self.args[i]) if s.leaves}
        kept = frozenset(i for i, owner in enumerate(split.owners) if owner in given)
        rest = [Placeholder(i, leaves[i]) for i in range(len(objects)) if i not in placed]
        self.kwargs = ObjectKeywords(kwargs, rest, split.plan, captured, kept)

    def call(self, program: Callable[..., Any]) -> Any:
        """Returns ``program(args, kwargs, finish)``; traces made during the call find `self`."""
        outer = getattr(_this_thread, "call", None)
        try:
            _this_thread.call = self
            return program(self.args, self.kwargs, self.finish)
        finally:
            _this_thread.call = outer

    def finish(self, returned: tuple[ResultTree, PyTree, Mapping[int, Any]]) -> Callable[[], Any]:
        """Writes the program's results back to the objects; returns what builds the user's.

        That runs the user's code, the classes in the results: it may raise, and changes nothing.
        """
        tree, outcome, stored = returned
        self._split.write_back(outcome, stored)
        if not tree.has_objects:
            return tree.build
        objects = [*self._objects, *self._split.members]
        return lambda: _put_objects(tree.build(), objects)

    def changes(self) -> dict[str, tuple[str, Any]]:
        """After a trace: path in what `emit_run` returned -> name and former value of an array."""
        outcome, stored = self._outcome
        if outcome is None:
            return {}
        return {
            f"[2][{i}][{k}]": pair
            for i in stored
            for k, pair in enumerate(self._split.before(outcome, i))
        }

    # -- inside a program ---------------------------------------------------------

    def emit_run(
        self,
        strategy: StrategyLike,
        fn: Callable[..., Any],
        args: tuple[PyTree, ...],
        keywords: PyTree,
        state: TraceState,
    ) -> tuple[ResultTree, Any, Any]:
        """Emits ``fn`` on every replica; returns what `finish` takes."""
        args, keywords = self._with_inputs(args, keywords, True)

        # Captured objects come last, so that errors number arguments as the user does.
        def on_replica(*args: PyTree, **kwargs: PyTree) -> Any:
            given = dataclasses.replace(keywords, kwargs=kwargs, captured=args[-1])
            return self._trace(fn, args[:-1], given, frames.current().replica_context)

        functools.update_wrapper(on_replica, fn, updated=())
        result, outcome, finals = run_in_trace(
            strategy,
            on_replica,
            (*args, keywords.captured),
            keywords.kwargs,
            state,
            returns_object_state=True,
        )
        stored = self._split.combine_writes(outcome, finals, strategy)
        self._outcome = outcome, tuple(stored)
        return take_apart(result), outcome, stored

    def emit_call(
        self,
        fn: Callable[..., Any],
        args: tuple[PyTree, ...],
        keywords: PyTree,
        state: TraceState,
    ) -> tuple[ResultTree, Any, Any]:
        """Calls ``fn`` in the global view; returns what `finish` takes."""
        args, own = without_expectations(args, keywords.kwargs, state.expectations)
        keywords = dataclasses.replace(keywords, kwargs=own)
        args, keywords = self._with_inputs(args, keywords, False)
        result, outcome, finals = self._trace(fn, args, keywords, None)
        stored = self._split.combine_writes(outcome, finals, None)
        self._outcome = outcome, tuple(stored)
        return take_apart(result), outcome, stored

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
    ) -> tuple[Any, Any, dict[int, Any]]:
        """Calls ``fn`` while its objects hold the placeholders' leaves."""
        leaves = [leaf for s in _in_order((args, keywords)) for leaf in s.leaves]
        args, kwargs = _put_objects((args, keywords.kwargs), self._objects)
        fn = self._bridge.unwrap(fn)
        with self._split.holding(leaves, context):
            result = self._replace_objects(fn(*args, **kwargs))
            outcome, finals = self._split.collect(keywords.kept)
            self._outcome = outcome, tuple(finals)
            return result, outcome, finals

    def _replace_objects(self, result: PyTree) -> Any:
        """Returns results with placeholders for objects and their variables."""
        count = len(self._objects)
        indices = {id(v): count + i for i, v in self._split.remaining_members().items()}
        indices.update((id(o), i) for i, o in enumerate(self._objects))
        exchange = lambda x: Placeholder(indices[id(x)], ()) if id(x) in indices else x
        is_leaf = lambda x: id(x) in indices or is_per_replica(x)
        return jax.tree.map(exchange, result, is_leaf=is_leaf)


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
        flat = bridge.split(objects, strategy, is_in_program=is_in_program)
        return StatefulArgs(bridge, objects, flat, captured, args, kwargs, donated)

    return split


def has_objects(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a call takes or captures stateful objects."""
    bridge = active_bridge()
    return bridge is not None and any(_find_objects(bridge, fn, _leaves(bridge, args, kwargs)))


def _leaves(bridge: ObjectLibrary, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return jax.tree.leaves((args, kwargs), is_leaf=_leaf_test(bridge))


def _find_objects(
    bridge: ObjectLibrary, fn: Callable[..., Any], leaves: Sequence[Any]
) -> tuple[list[Any], list[tuple[Any, Place]]]:
    """Returns the objects among the leaves of arguments, and those that the function captured."""
    values = [leaf.value if isinstance(leaf, Static) else leaf for leaf in leaves]
    given = [leaf for leaf in leaves if bridge.is_stateful(leaf)]
    others = [x for x in values if not (bridge.is_stateful(x) or is_placeholder(x))]
    return given, find_captures([bridge.unwrap(fn), *others], bridge.is_stateful)


def _leaf_test(bridge: ObjectLibrary) -> Callable[[Any], bool]:
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
    with explaining_errors(), watch_inner(fn, is_stateful):
        if stateful is None:
            return run_in_trace(strategy, fn, args, kwargs, state)
        result, outcome, stored = stateful.call(
            lambda args, kwargs, _: stateful.emit_run(strategy, fn, args, kwargs, state)
        )
        bare = lambda x: x.array if isinstance(x, AlreadyPlaced) else x
        stored = jax.tree.map(bare, stored, is_leaf=is_per_replica)
        return stateful.finish((result, outcome, stored))()


def call_of(kwargs: dict[str, PyTree] | ObjectKeywords) -> StatefulArgs | None:
    """Returns the call that is being traced with these keyword arguments, if it has objects."""
    return _this_thread.call if isinstance(kwargs, ObjectKeywords) else None


def written_names() -> dict[str, str]:
    """After a trace in a call with objects: path in what was returned -> the array's name."""
    call = getattr(_this_thread, "call", None)
    return {} if call is None else {path: name for path, (name, _) in call.changes().items()}


@contextlib.contextmanager
def explaining_errors() -> Generator[None]:
    """A context for a trace: an error that the library explains is replaced by its clearer one."""
    try:
        yield
    except Exception as error:
        bridge = active_bridge()
        explained = None if bridge is None else bridge.explain(error)
        if explained is None:
            raise
        raise explained from error
