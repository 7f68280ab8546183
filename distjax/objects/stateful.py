"""Objects with state of their own (Flax modules) as arguments: what a bridge offers.

A library whose objects change in place is bridged by one object that takes them
apart into arrays, puts them together in a trace, and writes the arrays back. The
core knows no such library: a bridge is imported when its library has been.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from distjax.variables.variable_description import VariableDescription

#: Module of a library -> module of ours that has its bridge, as `BRIDGE`.
_BRIDGES = {"flax.nnx": "distjax.flax.bridge"}


class Bridge(Protocol):
    """How the objects of one library go through a compiled program."""

    def is_stateful(self, value: object) -> bool:
        """Returns whether `value` is an object that changes in place."""
        ...

    def unwrap(self, fn: Any) -> Any:
        """Returns the function inside a compiling decorator of the library."""
        ...

    def split(self, objects: Sequence[Any], strategy: Any) -> ObjectLeaves:
        """Takes objects apart, outside of the program; places them for `strategy` first."""
        ...

    def as_arguments(self, plan: Any, leaves: Sequence[Any]) -> list[Any]:
        """Returns stored leaves as what `run` takes, in the global view."""
        ...

    def as_values(self, plan: Any, leaves: Sequence[Any]) -> list[Any]:
        """Returns stored leaves as global values, in the global view."""
        ...

    def merge(self, plan: Any, leaves: Sequence[Any], context: Any) -> TracedObjects:
        """Puts the objects together, in a replica (`context`) or the global view (None)."""
        ...

    def combine_writes(
        self, plan: Any, outcome: Any, finals: Mapping[int, Any], strategy: Any
    ) -> dict[int, Any]:
        """Returns what is stored of what the replicas wrote, by the rule of each."""
        ...

    def store(self, plan: Any, outcome: Any, finals: Mapping[int, Any]) -> dict[int, Any]:
        """Returns what is stored of what code in the global view wrote."""
        ...

    def describe(self, strategy: Any) -> list[VariableDescription]:
        """Returns a description of each variable of the objects placed for `strategy`."""
        ...

    def find_baked(self, constants: Sequence[Any]) -> str | None:
        """Returns a description of an object whose array is among `constants`, or None."""
        ...


class ObjectLeaves(Protocol):
    """Objects taken apart, outside of the program.

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

    def write_back(self, outcome: Any, stored: Mapping[int, Any]) -> None:
        """Gives the objects their new values."""
        ...


class TracedObjects(Protocol):
    """Objects put together inside a trace.

    Attributes:
      objects: traced copies of the user's objects, in their order.
    """

    objects: Sequence[Any]

    def remaining_members(self) -> Mapping[int, Any]:
        """Returns the `ObjectLeaves.members` that the objects still have, traced, by number."""
        ...

    def leave(self, keep_all: frozenset[int]) -> tuple[Any, dict[int, Any]]:
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
