"""Variables that are created while a function is traced.

Their initial values are outputs of the trace. When it ends, the values are computed, the
variables get their storage, and the function is traced again.
"""

from __future__ import annotations

from typing import Any, Protocol

from jax import core

from distjax import jax_compat
from distjax.errors import ContextError, TraceLeakError, message
from distjax.typing import DTypeLike, PyTree
from distjax.variables.stored_variable import StoredVariable


class CreatingState(Protocol):
    """What creation needs of the state of a trace; see `TraceState`."""

    trace: core.Trace
    creations: CreationLog | None


class CreationLog:
    """The variables that one trace creates, or that the previous trace created.

    Attributes:
      made: the previous trace's variables by position; a constructor that runs again
        returns the one made at its position.
      outermost: the log that counts constructors across all nested traces.
      values: the variables that this trace creates and their initial values, in its view.
      collected: in the outermost log, the variables that any of these traces created.
      makes_at_once: whether variables get their storage immediately, from concrete
        initial values (merge functions, whose shape trace is thrown away).
      remembered: the variables that were made immediately.
      reused: the names of the previous trace's variables that constructors returned.
    """

    def __init__(
        self,
        made: list[Any] | None = None,
        outermost: CreationLog | None = None,
        makes_at_once: bool = False,
    ):
        self.outermost = outermost or self
        self.made = made or []
        self.makes_at_once = makes_at_once
        self.remembered: list[Any] = []
        self.values: dict[Any, Any] = {}
        self.collected: list[Any] = []
        self.position = 0
        self.reused: tuple[str, ...] = ()

    @staticmethod
    def within(state: CreatingState) -> CreationLog | None:
        """Returns the log for a trace nested in the trace of `state`."""
        around = state.creations
        if around is None or around.makes_at_once:
            return None
        return CreationLog(outermost=around.outermost)

    def take(self, *, shape: tuple[int, ...], dtype: DTypeLike, name: str) -> Any | None:
        """Returns the variable previously made at this position, or None."""
        top = self.outermost
        position, top.position = top.position, top.position + 1
        if not top.made:
            return None
        if position >= len(top.made):
            raise ContextError(_changed_text(name, "one variable more than in the trace before"))
        variable = top.made[position]
        if (variable.shape, variable.dtype, variable.name) != (tuple(shape), dtype, name):
            got = f"{name!r} {dtype}{list(shape)} at the place of {variable!r}"
            raise ContextError(_changed_text(name, got))
        top.reused = (*top.reused, name)
        return variable

    def collect(self, variable: StoredVariable, value: PyTree) -> None:
        """Records a new variable and its initial value in this trace."""
        self.values[variable] = value
        variable.stored.is_being_made = True  # the rest of the trace may use it
        self.outermost.collected.append(variable)

    def take_values(self) -> list[Any]:
        """Returns the initial values and drops them, so no tracer outlives its trace."""
        values = list(self.values.values())
        self.values = dict.fromkeys(self.values)
        return values

    def close(self) -> None:
        """Ends the outermost trace; from now on its variables need a stored value."""
        for variable in self.collected:
            variable.stored.is_being_made = False


def require_no_trace(name: str) -> None:
    """Raises TraceLeakError inside a JAX trace that distjax does not own."""
    if jax_compat.tracing():
        raise TraceLeakError(_leak_text(name))


def require_own_trace(state: CreatingState, name: str) -> None:
    """Raises TraceLeakError unless the trace of `state` can create a variable here."""
    creations = state.creations
    if creations is not None and not creations.makes_at_once:
        if jax_compat.current_trace() is state.trace:
            return
    raise TraceLeakError(_leak_text(name))


def _leak_text(name: str) -> str:
    return message(
        f"variable {name!r} needs to be created outside of inner traces",
        got="a creation from a traced value inside jax.jit, a loop, a branch, grad, vmap or a "
        "merge function, or in a step for parameter servers",
        why="its initial value belongs to the inner trace and would leak out of it",
        fix="create it before, under `with strategy.scope():`, or, except with parameter servers, "
        "at the top of the replica function; in a merge function from a concrete value or a "
        "function: dj.Variable(lambda: jnp.zeros(3))",
    )


def _changed_text(name: str, got: str) -> str:
    return message(
        f"variable {name!r} needs to be created in the same order each time",
        got=got,
        why="a function that creates variables is traced a second time, and each constructor is "
        "handed the variable made at its place",
        fix="create variables outside, or guard them: "
        "`if self.v is None: self.v = dj.Variable(...)`",
    )
