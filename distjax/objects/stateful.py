"""Objects with state of their own (Flax modules) as arguments: what a bridge offers.

A library whose objects change in place is bridged by one object that takes them
apart into arrays; what they are taken apart into puts traced values into them for the
time of a trace, and writes new arrays to them. The core knows no such library: a
bridge is imported when its library has been.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax

from distjax.context.contracts import StrategyLike
from distjax.objects.claims import HeldClaims
from distjax.replica.replica_context import ReplicaContext
from distjax.variables.variable_description import VariableDescription

R = TypeVar("R")

#: Module of a library -> module of ours that has its bridge, as `BRIDGE`.
_BRIDGES = {"flax.nnx": "distjax.flax.bridge"}


class Bridge(Protocol):
    """How the objects of one library go through a compiled program."""

    def is_stateful(self, value: object) -> bool:
        """Returns whether `value` is an object that changes in place."""
        ...

    def unwrap(self, fn: Callable[..., Any]) -> Any:
        """Returns the function inside a compiling decorator of the library."""
        ...

    def take_apart(
        self, objects: Sequence[Any], strategy: StrategyLike | None, held: HeldClaims | None
    ) -> ObjectLeaves:
        """Returns objects taken apart, placed for `strategy` first.

        Args:
          objects: the objects, each once.
          strategy: the strategy, or None.
          held: takes the claims of the objects; None inside a program, whose call has them.
        """
        ...

    def explain(self, error: Exception) -> Exception | None:
        """Returns what to raise for an error of the library that hides its cause, or None."""
        ...

    def describe(self, strategy: StrategyLike) -> list[VariableDescription]:
        """Returns a description of each variable of the objects placed for `strategy`."""
        ...

    def find_baked(self, constants: Sequence[Any]) -> str | None:
        """Returns a description of an object whose array is among `constants`, or None."""
        ...


class ObjectLeaves(Protocol):
    """Objects taken apart.

    Attributes:
      plan: what is static of them; hashable.
      leaves: their arrays and PerReplica, as stored.
      owners: per leaf the number of the object that it was first found in.
      members: what of the objects a function may return by itself: their variables.
    """

    plan: Any
    leaves: list[Any]
    owners: Sequence[int]
    members: Sequence[Any]

    def as_inputs(self, leaves: Sequence[Any], for_replicas: bool) -> list[Any]:
        """Returns stored leaves in the global view, as what `run` takes or as values."""
        ...

    def put_together(
        self,
        leaves: Sequence[Any],
        context: ReplicaContext | None,
        body: Callable[[TracedObjects], R],
    ) -> R:
        """Returns `body()`, called while the objects hold values of a trace.

        After it they are as they were before, even where it raised.

        Args:
          leaves: what they hold.
          context: the replica context; None in the global view.
          body: is handed the objects as they are meanwhile.
        """
        ...

    def combine_writes(
        self, outcome: Any, finals: Mapping[int, Any], strategy: StrategyLike | None
    ) -> Any:
        """Returns what is stored of what was written, by number.

        Args:
          outcome: of `TracedObjects.collect`.
          finals: of it, in the global view.
          strategy: the strategy whose replicas wrote; None: code in the global view did.
        """
        ...

    def write_back(self, outcome: Any, stored: Mapping[int, Any]) -> None:
        """Gives the objects their new values; may be called again where a signal raised in it."""
        ...


class TracedObjects(Protocol):
    """Objects while they hold the values of a trace."""

    def remaining_members(self) -> Mapping[int, Any]:
        """Returns the `ObjectLeaves.members` that the objects still have, by number."""
        ...

    def collect(self, keep_all: frozenset[int]) -> tuple[Any, dict[int, Any]]:
        """Returns what is static of the end, and the leaves that changed, by number.

        Those numbered in `keep_all` are returned even if they did not change.
        """
        ...


def active_bridge() -> Bridge | None:
    """Returns the bridge of a library that is imported; None while there is none."""
    for library, ours in _BRIDGES.items():
        if library in sys.modules:
            return _import_bridge(ours)
    return None


@functools.cache
def _import_bridge(name: str) -> Bridge:
    return importlib.import_module(name).BRIDGE


class StateFound(Exception):
    """A trace met objects with state that its arguments do not hold."""


class Placeholder:
    """The place of an object among arguments: its arrays, as a pytree node."""

    __slots__ = ("index", "leaves")

    def __init__(self, index: int, leaves: Sequence[Any]):
        self.index, self.leaves = index, leaves


jax.tree_util.register_pytree_node(
    Placeholder,
    lambda s: (tuple(s.leaves), s.index),
    lambda index, leaves: Placeholder(index, leaves),
)


def is_placeholder(value: object) -> bool:
    """Returns whether `value` is the place of an object (for ``is_leaf=``)."""
    return isinstance(value, Placeholder)
