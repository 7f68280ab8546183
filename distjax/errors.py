"""The errors of distjax, the one function that builds their messages, and common checks.

Every message has four parts: what was expected, with the user's names; what was there instead;
why that is wrong; and the fix, as code. The first line makes sense on its own.
"""

from __future__ import annotations

from typing import TypeGuard

import jax
import numpy as np
from jax.core import Tracer


class Error(Exception):
    """The base of distjax's own errors. Its text is given in the four parts of `message`, or whole.

    An argument of a wrong type or value is a plain TypeError or ValueError.
    """

    def __init__(self, text: str = "", *, got: str | None = None, why: str = "", fix: str = ""):
        super().__init__(text if got is None else message(text, got=got, why=why, fix=fix))


class ContextError(Error, RuntimeError):
    """A call was made in the wrong context (replica, cross-replica, update)."""


class StrategyMismatchError(Error, RuntimeError):
    """A value, variable or call belongs to another strategy."""


class LocalityError(Error, ValueError):
    """A value has the wrong locality, or lives on the wrong devices, for the call."""


class AggregationError(Error, ValueError):
    """A variable's aggregation does not allow this read or write."""


class MergeError(Error, RuntimeError):
    """A ``merge_call`` or replica-axis collective is used where it cannot run."""


class DivergenceError(MergeError, LocalityError):
    """A collective is inside a loop or branch whose predicate differs per replica.

    That is both a misplaced collective and a predicate of the wrong locality, so it can
    be caught as either.
    """


class UnsupportedError(ContextError, NotImplementedError):
    """The active strategy does not support the call."""


class LocalityWarning(UserWarning):
    """State that was equal on every replica going into a step differs coming out."""


class ReductionWarning(UserWarning):
    """Replicas' values are combined in a way that is probably wrong."""


class CheckError(Error, ValueError):
    """`dj.check` found problems in a step.

    Attributes:
      findings: every finding, as `distjax.diagnostics.Finding`.
    """

    def __init__(self, text: str, findings: tuple[object, ...] = ()):
        super().__init__(text)
        self.findings = findings


class RecompilationWarning(UserWarning):
    """The same function keeps being recompiled."""


class BatchError(Error, ValueError):
    """A batch cannot be split over the replicas."""


class TraceLeakError(Error, RuntimeError):
    """A variable or an attribute is read or written where its value would leak out of a trace."""


class CheckpointError(Error, RuntimeError):
    """A checkpoint cannot be written or read."""


class ClusterError(Error, RuntimeError):
    """The processes of a job disagree, or one of them is gone."""


class AgreementError(ClusterError):
    """The processes of a job diverge: in a program, a value, a batch or a save."""


class PeerLostError(ClusterError):
    """Another process of the job has exited or is unreachable."""


class PreemptedError(ClusterError):
    """The job was told to stop, and has saved its state: raised by `dj.launch.Job`."""


class StuckError(ClusterError):
    """A process does not reach the point where the others wait, or a program hangs."""


class ClusterWarning(UserWarning):
    """A multi-process program does something that is probably unintended."""


class ServerLostError(Error, RuntimeError):
    """A parameter server is gone, along with all updates since its last snapshot."""


class ClosureError(Error, RuntimeError):
    """A closure failed: every worker that ran it was lost, or its error cannot be pickled.

    Attributes:
      attempts: what happened at each attempt, in order.
    """

    def __init__(self, text: str, attempts: tuple[str, ...] = ()):
        super().__init__(text)
        self.attempts = attempts


class EndOfDataError(Error, IndexError):
    """A closure needs another dataset element, but every worker's data has ended."""


def message(expected: str, *, got: str, why: str, fix: str) -> str:
    """Returns an error message in the standard four parts.

    Example:
      >>> print(message("f() needs a tuple of arguments", got="an int (5)",
      ...               why="each item is one positional argument", fix="f((5,))"))
      f() needs a tuple of arguments.
        Got: an int (5).
        Why: each item is one positional argument.
        Fix: f((5,))
    """
    return f"{expected}.\n  Got: {got}.\n  Why: {why}.\n  Fix: {fix}"


def require(
    is_so: object,
    expected: str,
    *,
    got: str,
    why: str,
    fix: str,
    error: type[Exception] = ValueError,
) -> None:
    """Raises an error with the message of these parts unless `is_so`.

    Example:
      >>> require(5 > 4, "f() needs 5", got="4", why="it is more", fix="f(5)")
    """
    if not is_so:
        raise error(message(expected, got=got, why=why, fix=fix))


def as_part(text: str) -> str:
    """Returns another process's text, possibly multi-part, as one part of a message.

    Example:
      >>> inner = message("f() needs x", got="y", why="z", fix="f(x)")
      >>> print(message("a job needs all", got=as_part(inner), why="it is one", fix="look there"))
      a job needs all.
        Got: f() needs x.
            Got: y.
            Why: z.
            Fix: f(x).
        Why: it is one.
        Fix: look there
    """
    return text.strip().removesuffix(".").replace("\n", "\n    ")


def describe_error(error: BaseException) -> str:
    """Returns the type of an error and the first line of its text, as one part of a message.

    Example:
      >>> describe_error(ValueError(message("f() needs x", got="y", why="z", fix="f(x)")))
      'ValueError: f() needs x'
    """
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0].removesuffix('.')}"


def describe_value(value: object) -> str:
    """Returns the type, shape and dtype of `value`, never its full contents.

    Example:
      >>> describe_value(jnp.ones((4, 2))), describe_value(np.ones(4)), describe_value(4)
      ('jax.Array float32[4, 2]', 'ndarray of shape (4,) and dtype float64', 'int (4)')
    """
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(value, jax.Array):
        kind = "traced" if isinstance(value, Tracer) else "jax.Array"
        return f"{kind} {dtype}{list(value.shape)}"
    if shape is not None and dtype is not None:
        return f"{type(value).__name__} of shape {tuple(shape)} and dtype {dtype}"
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} ({text if len(text) <= 60 else text[:57] + '...'})"


# -- integers that users pass -----------------------------------------------------


def is_int(value: object) -> TypeGuard[int]:
    """Returns whether `value` is a Python or NumPy integer, excluding bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def require_int(
    what: str,
    value: object,
    at_least: int,
    *,
    why: str,
    fix: str,
    error: type[ValueError] = ValueError,
) -> int:
    """Returns `value` as a Python int.

    Args:
      what: the user's name for it, as in "take: num_steps".
      value: what the user gave.
      at_least: the smallest int that is allowed.
      why: the third part of the error's message.
      fix: the fourth part.
      error: the class of the error.

    Raises:
      ValueError: it is not an int, or less than `at_least`.
    """
    if is_int(value) and value >= at_least:
        return int(value)
    expected = f"{what} needs an int of {at_least} or more"
    raise error(message(expected, got=describe_value(value), why=why, fix=fix))
