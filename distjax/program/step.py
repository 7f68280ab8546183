"""Step: the contract for what a program compiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from distjax.context.contracts import StrategyLike
from distjax.context.frames import Frame
from distjax.typing import PyTree
from distjax.variables.state import TraceState


class Step(Protocol):
    """A user's function, and how it runs inside the trace of a program."""

    @property
    def name(self) -> str:
        """The name of the function."""
        ...

    @property
    def argument_names(self) -> Sequence[str]:
        """The names of its positional arguments."""
        ...

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """The positional arguments whose buffers are donated."""
        ...

    @property
    def ignores_user_mesh(self) -> bool:
        """Whether it runs without the mesh that the user has set (`jax.set_mesh`)."""
        ...

    @property
    def takes_objects(self) -> bool:
        """Whether stateful objects may be among its arguments, or captured by its function."""
        ...

    @property
    def strategy(self) -> StrategyLike | None:
        """The strategy for which such objects are placed; None: the one they are placed for."""
        ...

    @property
    def function(self) -> Callable[..., Any]:
        """The user's function."""
        ...

    def frame(self, state: TraceState) -> Frame:
        """Returns the frame that the function runs in, with variables in `state`."""
        ...

    def emit(self, state: TraceState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the function in the trace of `state`; returns global-view results."""
        ...

    def place(self, tree: PyTree) -> Any:
        """Returns the arguments, with arrays on other devices moved to the program's devices."""
        ...
