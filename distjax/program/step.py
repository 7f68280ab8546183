"""Step: what a program compiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from distjax.context.frames import Frame
from distjax.objects.claims import HeldClaims
from distjax.objects.stateful_args import StatefulArgs
from distjax.typing import PyTree
from distjax.variables.state import TraceState


class Step(Protocol):
    """A function of the user, and how it is run inside the trace of a program."""

    @property
    def name(self) -> str:
        """The user's name of the function."""
        ...

    @property
    def argument_names(self) -> Sequence[str]:
        """The user's names of its positional arguments."""
        ...

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """The positional arguments whose buffers are donated."""
        ...

    @property
    def ignores_user_mesh(self) -> bool:
        """Whether it runs without the mesh that the user has set (`jax.set_mesh`)."""
        ...

    def frame(self, state: TraceState) -> Frame:
        """Returns the frame that the function runs in, with variables in `state`."""
        ...

    def emit(self, state: TraceState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the function into the trace of `state`; returns its results in the global view."""
        ...

    def place(self, tree: PyTree) -> Any:
        """Returns arguments with arrays from elsewhere moved to the program's devices."""
        ...

    def take_objects(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], held: HeldClaims | None
    ) -> StatefulArgs | None:
        """Returns the objects with state that a call takes or the function captured.

        Args:
          args: positional arguments.
          kwargs: keyword arguments.
          held: takes the claims of the objects; None where the call has them.
        """
        ...
