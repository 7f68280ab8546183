"""Flax's marks of the trace that may change an object, and the cause of its error.

Flax marks each object with the trace that it was made in, and refuses to change it in
another. While a step is traced, distjax gives the step's objects the mark of that trace. An
object that distjax did not find keeps its own, and Flax's error does not say how to fix that.
"""

from __future__ import annotations

import traceback
from types import FrameType

from flax import nnx
from flax.nnx import pytreelib, tracers

from distjax import jax_compat
from distjax.errors import TraceLeakError, message
from distjax.flax.object_types import is_object
from distjax.objects.captures import MAX_DEPTH
from distjax.replica import merge
from distjax.typing import PyTree

#: The mark of objects made outside all traces; this module may be imported inside one.
with jax_compat.outside_traces():
    _OUTSIDE = tracers.TraceState()
#: The local names under which Flax's functions hold the object they refuse to change.
_NAMES = ("self", "value")


def is_outside(node: object) -> bool:
    """Returns whether a module or variable is marked as made outside all traces."""
    return _OUTSIDE in _marks(node)


def _marks(node: object) -> list[tracers.TraceState]:
    """Returns the mark that Flax has given a module or variable."""
    if isinstance(node, nnx.Variable):
        parts = [*node.__getstate__().values()]
    else:
        states = [x for x in vars(node).values() if isinstance(x, pytreelib.PytreeState)]
        parts = [state.trace_state for state in states]
    return [part for part in parts if isinstance(part, tracers.TraceState)]


def explain(error: Exception) -> TraceLeakError | None:
    """Returns an error that explains Flax's refusal to change an object, or None."""
    node = refused_outside(error)
    return None if node is None else not_found(node)


def refused_outside(error: Exception) -> PyTree | None:
    """Returns the object, made outside all traces, that Flax refused to change, or None."""
    return next(filter(is_outside, _refused(error)), None)


def explain_here(error: Exception) -> TraceLeakError | None:
    """Returns an error for a write to the current trace's objects in an inner trace, or None.

    Here distjax did find the object, but the body of a scan, for example, writes to it.
    """
    here = tracers.TraceState()
    node = next((node for node in _refused(error) if here in _marks(node)), None)
    if node is None:
        return None
    modules = {frame.f_globals.get("__name__") for frame in _frames(error)}
    return (_in_merge if merge.__name__ in modules else _in_inner_trace)(node)


def _refused(error: Exception) -> list[PyTree]:
    """Returns the object that Flax refused to change; empty if `error` is about something else."""
    frames = _frames(error)
    if "different trace level" not in str(error) or not frames:
        return []
    held = [frames[-1].f_locals.get(name) for name in _NAMES]
    return [node for node in held if is_object(node)]


def _frames(error: Exception) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _in_merge(node: PyTree) -> TraceLeakError:
    return TraceLeakError(
        message(
            f"an nnx.{type(node).__name__} needs to be changed in the trace that it belongs to",
            got="a write in a merge function",
            why="a merge function is traced apart from the step, and only what it returns and the "
            "dj.Variables that it writes come back to the step",
            fix="reduce in the merge function, return the result, and change the object after "
            "merge_call: optimizer.update(model, ctx.merge_call(reduce_grads, args=(grads,)))",
        )
    )


def _in_inner_trace(node: PyTree) -> TraceLeakError:
    return TraceLeakError(
        message(
            f"an nnx.{type(node).__name__} needs to be changed in the trace that it belongs to",
            got="a write in the body of a scan, a branch or another function that JAX traces by "
            "itself",
            why="the body is traced once, apart from the step, and JAX knows nothing of the "
            "object: what it writes is neither a carry nor a result",
            fix="nnx.scan, nnx.cond or nnx.jit with the object as an argument; or graphdef, state "
            "= nnx.split(model) before, nnx.merge(graphdef, state, copy=True) in the body, its "
            "nnx.state as a carry or result, and nnx.update(model, state) after",
        )
    )


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
