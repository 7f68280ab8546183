"""Stateful objects (Flax modules) as arguments: the interface of a bridge.

A library whose objects change in place is supported by a bridge, which splits objects into
arrays. The result of the split can put traced values into the objects for the duration of a
trace, and write new arrays to them. The core knows no such library: a bridge is imported only
once its library has been.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax

from distjax import hooks
from distjax.context.contracts import StrategyLike
from distjax.objects.walk import Place
from distjax.replica.arguments import ObjectStateKey, is_one_leaf
from distjax.replica.contexts import ReplicaContext
from distjax.typing import PyTree
from distjax.variables.description import VariableDescription

R = TypeVar("R")


class Bridge(Protocol):
    """How the objects of one library go through a compiled program."""

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

    def flatten(
        self,
        objects: Sequence[Any],
        strategy: StrategyLike | None,
        *,
        is_in_program: bool,
    ) -> ObjectLeaves:
        """Returns the objects split into arrays, after placing them for `strategy`.

        Args:
          objects: the objects, without duplicates.
          strategy: the strategy, or None.
          is_in_program: whether a trace meets them, whose call has found them.
        """
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


class ObjectLeaves(Protocol):
    """Objects split into arrays.

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

    def unflatten(
        self,
        leaves: Sequence[Any],
        context: ReplicaContext | None,
        body: Callable[[TracedObjects], R],
    ) -> R:
        """Returns `body()`, called while the objects hold traced values.

        Afterwards, even on error, the objects are restored to their previous values.

        Args:
          leaves: the values that the objects hold meanwhile.
          context: the replica context; None in the global view.
          body: receives the objects in their traced state.
        """
        ...

    def combine_writes(
        self, outcome: Any, finals: Mapping[int, Any], strategy: StrategyLike | None
    ) -> Any:
        """Returns the stored form of the leaves that were written, by number.

        Args:
          outcome: from `TracedObjects.collect`.
          finals: the leaves from `collect`, in the global view.
          strategy: the strategy whose replicas wrote; None if global-view code did.
        """
        ...

    def write_back(self, outcome: Any, stored: Mapping[int, Any]) -> None:
        """Writes the new values to the objects; can be retried if a signal interrupts it."""
        ...


class TracedObjects(Protocol):
    """Objects while they hold traced values."""

    def remaining_members(self) -> Mapping[int, Any]:
        """Returns the `ObjectLeaves.members` that the objects still have, by number."""
        ...

    def collect(self, even_unchanged: frozenset[int]) -> tuple[Any, dict[int, Any]]:
        """Returns the static part of the final state, and the changed leaves by number.

        Leaves numbered in `even_unchanged` are returned even if unchanged.
        """
        ...


def active_bridge() -> Bridge | None:
    """Returns the bridge of an imported library, or None."""
    for library, ours in hooks.object_layers.items():
        if library in sys.modules:
            return _import_bridge(ours)
    return None


@functools.cache
def _import_bridge(name: str) -> Bridge:
    return importlib.import_module(name).LAYER


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


# -- program form -------------------------------------------------------------
# How a call with stateful objects enters and leaves a program.


@dataclasses.dataclass(frozen=True)
class StaticPart:
    """The static part of the objects that one call takes or captures.

    Attributes:
      plan: from the bridge.
      captured: for each reference to an object in the function, the index of that object and
        the place of the reference.
      kept: indices of leaves that are returned even if unchanged, because they are donated.
    """

    plan: Any
    captured: tuple[tuple[int, Place], ...]
    kept: frozenset[int]


@dataclasses.dataclass(frozen=True, eq=False)
class TracedCall:
    """The static part of what a call with objects returns.

    Attributes:
      outcome: from `TracedObjects.collect`.
      returns_objects: whether placeholders of objects are among the user's results.
    """

    outcome: Any
    returns_objects: bool


class ResultTree:
    """The user's results, taken apart: the classes in them are called after the write-back.

    They are the user's code, which may raise, and the objects have to be written whole by then.

    Args:
      paths: of the leaves.
      leaves: the leaves.
      treedef: the user's tree.
    """

    __slots__ = ("leaves", "paths", "treedef")

    def __init__(
        self, paths: Sequence[str], leaves: Sequence[Any], treedef: jax.tree_util.PyTreeDef
    ):
        self.paths, self.leaves, self.treedef = paths, leaves, treedef

    def build(self) -> Any:
        """Returns the results."""
        return self.treedef.unflatten(self.leaves)


def take_apart(results: PyTree) -> ResultTree:
    """Returns the results of a step as a tree that is built without the user's code."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(results, is_leaf=is_one_leaf)
    paths = [jax.tree_util.keystr(path) for path, _ in pairs]
    return ResultTree(paths, [leaf for _, leaf in pairs], treedef)


@dataclasses.dataclass(frozen=True)
class _UserPath:
    """A path in the user's results, as one key."""

    text: str

    def __str__(self) -> str:
        return self.text


jax.tree_util.register_pytree_with_keys(
    ResultTree,
    lambda t: (
        [(_UserPath(path), leaf) for path, leaf in zip(t.paths, t.leaves, strict=True)],
        (tuple(t.paths), t.treedef),
    ),
    lambda aux, leaves: ResultTree(aux[0], tuple(leaves), aux[1]),
    lambda t: (t.leaves, (tuple(t.paths), t.treedef)),
)


@dataclasses.dataclass(frozen=True)
class ObjectKeywords:
    """The keyword arguments of a call with objects, plus what is in no argument.

    Attributes:
      kwargs: the user's keyword arguments.
      captured: the leaves of objects that are only captured by the function.
      static: the static part of the objects.
    """

    kwargs: dict[str, Any]
    captured: list[Placeholder]
    static: StaticPart


def _flatten_keywords(node: ObjectKeywords) -> tuple[Any, Any]:
    names = sorted(node.kwargs)
    values = [(jax.tree_util.DictKey(name), node.kwargs[name]) for name in names]
    captured = (jax.tree_util.DictKey("captured objects"), node.captured)
    return (*values, captured), (node.static, tuple(names))


def _unflatten_keywords(
    aux: tuple[StaticPart, tuple[str, ...]], children: Iterable[PyTree]
) -> ObjectKeywords:
    *values, captured = children
    return ObjectKeywords(dict(zip(aux[1], values, strict=True)), captured, aux[0])


jax.tree_util.register_pytree_with_keys(ObjectKeywords, _flatten_keywords, _unflatten_keywords)
