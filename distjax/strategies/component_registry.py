"""Finds the variable that a component array came from.

Arrays have no hash, so entries are keyed by `id`, and removed when their array is collected.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import jax

from distjax.placement.topology import Topology
from distjax.strategies import values
from distjax.typing import PyTree
from distjax.variables.stored_variable import StoredVariable


class ComponentRegistry:
    """Remembers, weakly, which variable a component array came from."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}

    def split(
        self, topology: Topology, variable: StoredVariable, stored: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Returns the components of a variable's stored array, and remembers them."""
        if variable.layout.num_copies == 1:
            parts: tuple[jax.Array, ...] = (stored[0] if variable.policy.stacked else stored,)
        else:
            parts = values.split(topology, stored, variable.policy.stacked)
        self.remember(variable, parts)
        return parts

    def remember(self, variable: StoredVariable, parts: Sequence[Any]) -> None:
        """Records that `parts` are components of `variable`."""
        for part in parts:
            key = id(part)

            def forget(_: object, key: int = key) -> None:
                self._entries.pop(key, None)

            self._entries[key] = (weakref.ref(part, forget), weakref.ref(variable))

    def container_of(self, value: PyTree) -> Any:
        """Returns the variable of a component, or `value` if it is not one."""
        if id(value) not in self._entries:
            return value
        part, variable = self._entries[id(value)]
        container = variable()
        return value if part() is not value or container is None else container
