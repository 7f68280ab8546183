"""Stateful objects (Flax modules) as arguments: the interface of a bridge.

A library whose objects change in place is supported by a bridge, which splits objects into
arrays. The result of the split can put traced values into the objects for the duration of a
trace, and write new arrays to them. The core knows no such library: a bridge is imported only
once its library has been.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax

from distjax.context.contracts import StrategyLike
from distjax.objects.claims import HeldClaims
from distjax.replica.arguments import ObjectStateKey
from distjax.replica.contexts import ReplicaContext
from distjax.typing import PyTree
from distjax.variables.variable_description import VariableDescription

R = TypeVar("R")

#: Library module -> the distjax module with its bridge, as `BRIDGE`.
_BRIDGES = {"flax.nnx": "distjax.flax.bridge"}


class Bridge(Protocol):
    """How the objects of one library go through a compiled program."""

    def is_stateful(self, value: object) -> bool:
        """Returns whether `value` is an object that changes in place."""
        ...

    def is_member(self, value: object) -> bool:
        """Returns whether `value` is a variable, which may be part of a larger object."""
        ...

    def with_own_values(self, tree: PyTree) -> tuple[PyTree, frozenset[int]]:
        """Returns `tree` with copies of its containers of variables that are values.

        Also returns the ids of the variables in the copies, which no other thread has.
        """
        ...

    def unwrap(self, fn: Callable[..., Any]) -> Any:
        """Returns the function wrapped by a compiling decorator of the library."""
        ...

    def flatten(
        self,
        objects: Sequence[Any],
        strategy: StrategyLike | None,
        held: HeldClaims | None,
        own: Container[int],
    ) -> ObjectLeaves:
        """Returns the objects split into arrays, after placing them for `strategy`.

        Args:
          objects: the objects, without duplicates.
          strategy: the strategy, or None.
          held: acquires the claims of the objects; None inside a program, whose call holds them.
          own: the ids of objects that only this call has, which need no claim.
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
    for library, ours in _BRIDGES.items():
        if library in sys.modules:
            return _import_bridge(ours)
    return None


@functools.cache
def _import_bridge(name: str) -> Bridge:
    return importlib.import_module(name).BRIDGE


class StatefulObjectFound(Exception):
    """A trace met stateful objects that its arguments do not contain."""


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
