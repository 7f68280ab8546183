"""The contract of a layout: how a variable's value is stored.

A variable has up to three forms: *stored* (the array that lives between steps),
*global* (what cross-replica code works on: [...], or [R, ...] with a component
per replica), and *local* (what one replica holds of it). A layout says how the
stored and the global form come from each other; its `local_form` does so for the
global and the local one.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
from jax.sharding import Sharding

from distjax.variables.layouts.local_form import LocalForm


class Layout(Protocol):
    """How a variable's value is stored.

    A class of one's own has these members, and nothing asks which class it is. Its
    instances are immutable and compare by what they say: a frozen dataclass.
    ``str(layout)`` is what descriptions of a variable say of where it lives.
    """

    @property
    def kind(self) -> str:
        """The kind of the variable's `Locality`."""
        ...

    @property
    def num_copies(self) -> int:
        """How many copies `update` and `local_results` speak of: R or 1."""
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
        """Whether `from_stored` makes an array of its own.

        False: the stored array is the value. It is handed out as it is, and copied
        if somebody still holds it when a program is about to donate its memory.
        """
        ...

    def to_stored(self, value: jax.Array) -> Any:
        """Returns the stored form of a global value, in a trace or not."""
        ...

    def from_stored(self, stored: jax.Array, shape: tuple[int, ...]) -> Any:
        """Returns the global value of shape `shape` of a stored form, in a trace or not."""
        ...

    def constrain(self, stored: jax.Array) -> Any:
        """Returns a stored form that a program returns, fixed to where it lives.

        In a trace: mostly `jax.lax.with_sharding_constraint(stored, self.sharding)`.
        """
        ...

    def unencoded(self, shape: tuple[int, ...]) -> Layout:
        """Returns the nearest layout that stores a value of `shape` as it is.

        For arrays that code without a layout reads too (those of Flax modules) and
        for reduced values. A layout whose stored form is the value, wherever it
        lives, returns itself; `MirroredLayout(topology)` always does.
        """
        ...
