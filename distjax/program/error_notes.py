"""Hints for JAX errors caused by how a step uses distjax."""

from __future__ import annotations

import re

from distjax.context.contracts import StrategyLike
from distjax.errors import LocalityError, message
from distjax.replica.trace import add_value_note


def explain_devices(error: Exception, name: str) -> Exception:
    """Returns the error to raise instead of a JAX error in a program of `dj.jit`."""
    if not isinstance(error, ValueError) or "incompatible devices" not in str(error):
        return error
    return LocalityError(
        message(
            f"{name} needs all its variables, and all strategies that it runs, on one set of "
            "devices",
            got=str(error).splitlines()[0].removesuffix("."),
            why="dj.jit makes one program, which runs on one set of devices; it moves arguments, "
            "but not variables",
            fix="a dj.jit for each strategy, and np.asarray(v.value) of a variable of the other as "
            "an argument",
        )
    )


def add_argument_note(error: Exception) -> None:
    """Adds a note to an error whose cause is that an argument is traced, or is a struct."""
    add_value_note(error)
    is_struct = isinstance(error, (TypeError, AttributeError)) and "ShapeDtypeStruct" in str(error)
    if is_struct and _STRUCT_NOTE not in getattr(error, "__notes__", ()):
        error.add_note(_STRUCT_NOTE)


_STRUCT_NOTE = (
    "A jax.ShapeDtypeStruct stands for an array where a step is lowered, explained or checked; "
    "a call treats it as a Python object, such as the result shape of a jax.pure_callback.\n"
    "  Fix: step.lower(struct).compile(); an array where the step is called"
)


def add_cause_note(error: Exception, strategy: StrategyLike, axis_name: str | None = None) -> None:
    """Adds a note to a JAX error with what distjax knows about its cause.

    Args:
      error: the error.
      strategy: the strategy that ran.
      axis_name: the name of the replica axis in this call, if it differs.
    """
    add_argument_note(error)
    text = str(error)
    axis = re.search(r"unbound axis name: (\w+)", text)
    if isinstance(error, NameError) and axis is not None:
        name = axis_name or strategy.extended.public_axis_name
        error.add_note(
            f"The replica axis of {strategy!r} {f'is named {name!r}' if name else 'has no name'}.\n"
            f"  Fix: dj.MirroredStrategy(axis_name={axis[1]!r}), dj.pmap(fn, {axis[1]!r}), or "
            "dj.get_replica_context().all_reduce('mean', x)"
        )
    elif isinstance(error, TypeError) and "is not a valid JAX array type" in text:
        error.add_note(
            "An array of strings or of Python objects is used in a computation: devices have no "
            "such arrays.\n"
            "  Fix: leave it out of the batch; or numbers in its place: "
            "np.unique(names, return_inverse=True)[1]"
        )
    elif isinstance(error, ValueError) and text.startswith("Triggering __jax_array__()"):
        error.add_note(
            "A distjax.Variable stands where JAX wants an array.\n"
            "  Fix: v.value in place of v, and jax.grad of a function of values"
        )
