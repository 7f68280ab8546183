"""The trace level at which Flax lets an object change, and its error's cause.

Flax marks each object with the trace that it was made in, and refuses to change it in
another. A step's objects get new marks while it is traced; an object that distjax did not
find keeps its own, and Flax's error does not say how to fix that.
"""

from __future__ import annotations

from flax import nnx
from flax.nnx import pytreelib, tracers

from distjax import jax_compat
from distjax.errors import TraceLeakError, message
from distjax.objects.captures import MAX_DEPTH
from distjax.typing import PyTree

#: The mark of objects made outside all traces; this module may be imported inside one.
with jax_compat.outside_traces():
    _OUTSIDE = tracers.TraceState()
#: The local names under which Flax's functions hold the object they refuse to change.
_NAMES = ("self", "value")


def is_outside(node: object) -> bool:
    """Returns whether a module or variable was made outside traces and is in none."""
    if isinstance(node, nnx.Variable):
        return any(_is_outside(part) for part in node.__getstate__().values())
    states = [x for x in vars(node).values() if isinstance(x, pytreelib.PytreeState)]
    return any(_is_outside(state.trace_state) for state in states)


def _is_outside(mark: object) -> bool:
    return isinstance(mark, tracers.TraceState) and mark == _OUTSIDE


def explain(error: Exception) -> TraceLeakError | None:
    """Returns an error that explains Flax's refusal to change an object, or None."""
    if "different trace level" not in str(error) or error.__traceback__ is None:
        return None
    traceback = error.__traceback__
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    refused = [traceback.tb_frame.f_locals.get(name) for name in _NAMES]
    for node in refused:
        if isinstance(node, (nnx.Pytree, nnx.Variable)) and is_outside(node):
            return not_found(node)
    return None


def not_found(node: PyTree) -> TraceLeakError:
    """Returns the error for an object that a step uses but distjax did not find."""
    return TraceLeakError(
        message(
            f"an nnx.{type(node).__name__} that a step uses needs to be an argument, or captured "
            "where distjax can see it",
            got="one that was found neither among the arguments nor in what the function refers to",
            why="distjax searches arguments, closures, globals that the code names and attributes "
            f"of your objects, {MAX_DEPTH} deep; what it does not find it cannot write back",
            fix="pass the object: strategy.run(step, args=(model, batch))",
        )
    )
