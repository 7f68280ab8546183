"""The contract of a layout: how a variable's value is stored.

A variable has up to three forms: *stored* (the array that lives between steps),
*global* (what cross-replica code works on: [...], or [R, ...] with a component per
replica) and *local* (what one replica holds). A layout converts between the stored and
the global form, its `local_form` between the global and the local form.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
from jax.sharding import Sharding

from distjax.variables.layouts.local_form import LocalForm


class Layout(Protocol):
    """How a variable's value is stored.

    A custom layout implements these members; nothing checks its class. Instances are
    immutable and compare by value: use a frozen dataclass. ``str(layout)`` is how
    descriptions of a variable say where it lives.
    """

    @property
    def kind(self) -> str:
        """The kind of the variable's `Locality`."""
        ...

    @property
    def num_copies(self) -> int:
        """How many copies `update` and `local_results` see: R or 1."""
        ...

    @property
    def sharding(self) -> Sharding | None:
        """Where the stored array lives; None: JAX's default device."""
        ...

    @property
    def local_form(self) -> LocalForm:
        """What one replica holds: `WHOLE`, `AxisShards(...)`, `Shards(...)`."""
        ...

    @property
    def hands_out_copies(self) -> bool:
        """Whether `from_stored` makes a new array.

        If False, the stored array is the value: it is handed out as it is, and copied if it
        is still referenced when a program is about to donate its memory.
        """
        ...

    def to_stored(self, value: jax.Array) -> Any:
        """Returns the stored form of a global value, inside or outside a trace."""
        ...

    def from_stored(self, stored: jax.Array, shape: tuple[int, ...]) -> Any:
        """Returns the global value of shape `shape`, inside or outside a trace."""
        ...

    def constrain(self, stored: jax.Array) -> Any:
        """Constrains a stored form that a program returns to where it lives.

        Inside a trace; usually `jax.lax.with_sharding_constraint(stored, self.sharding)`.
        """
        ...

    def unencoded(self, shape: tuple[int, ...]) -> Layout:
        """Returns the nearest layout that stores a value of `shape` as it is.

        For arrays that are also read by code without a layout (those of Flax modules), and
        for reduced values. A layout whose stored form is the value itself, wherever it
        lives, returns itself; `MirroredLayout(topology)` is always a valid answer.
        """
        ...
