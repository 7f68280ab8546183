"""The errors of distjax, and the one way their texts are built.

Every message has four parts: what was expected in the user's own names, what
came instead, why that is so, and the fix as code. The first line stands alone.
"""

from __future__ import annotations


class ContextError(RuntimeError):
    """A call was made in the wrong context (replica, cross-replica, update)."""


class StrategyMismatchError(RuntimeError):
    """A value, variable or call belongs to another strategy."""


class LocalityError(ValueError):
    """A value lives in another way, or on other devices, than the call needs."""


class AggregationError(ValueError):
    """A variable cannot be written or read so with its aggregation."""


class MergeError(RuntimeError):
    """A ``merge_call`` or a replica-axis collective stands where none can run."""


class DivergenceError(MergeError, LocalityError):
    """A loop or branch whose predicate differs per replica holds a collective.

    It is a wrong place for a collective and a predicate of the wrong locality
    at once, so it can be caught as either.
    """


class UnsupportedError(ContextError, NotImplementedError):
    """The active strategy does not have what the call needs."""


class LocalityWarning(UserWarning):
    """State went into a step equal on every replica and came out different."""


class ReductionWarning(UserWarning):
    """Values of replicas are combined in a way that is probably wrong."""


class CheckError(ValueError):
    """`dj.check` found something in a step.

    Attributes:
      findings: all of it, as `distjax.diagnostics.Finding`.
    """

    def __init__(self, text: str, findings: tuple[object, ...] = ()):
        super().__init__(text)
        self.findings = findings


class RecompilationWarning(UserWarning):
    """The same function is compiled again and again."""


class BatchError(ValueError):
    """A batch cannot be split over the replicas."""


class TraceLeakError(RuntimeError):
    """A variable is read or written where its value would leak out of a trace."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read."""


class ClusterError(RuntimeError):
    """The processes of a job do not agree, or one of them is gone."""


class AgreementError(ClusterError):
    """Processes of a job do different things: a program, a value, a batch, a save."""


class PeerLostError(ClusterError):
    """Another process of the job has ended, or cannot be reached."""


class PreemptedError(ClusterError):
    """The job was told to end, and has saved its state."""


class StuckError(ClusterError):
    """A process does not come to where the others are, or a program does not complete."""


class ClusterWarning(UserWarning):
    """A program of several processes does what it probably does not mean."""


class ServerLostError(RuntimeError):
    """A parameter server is gone, and what was done since its last snapshot with it."""


class ClosureError(RuntimeError):
    """A closure is given up: every worker that ran it was lost.

    Attributes:
      attempts: what happened at each attempt, in order.
    """

    def __init__(self, text: str, attempts: tuple[str, ...] = ()):
        super().__init__(text)
        self.attempts = attempts


class EndOfDataError(IndexError):
    """A closure needs another element of a per-worker dataset, and all workers' data has ended."""


def message(expected: str, *, got: str, why: str, fix: str) -> str:
    """Returns the text of an error in the four parts that every message has.

    Example:
      >>> print(message("f() needs a tuple of arguments", got="an int (5)",
      ...               why="each item is one positional argument", fix="f((5,))"))
      f() needs a tuple of arguments.
        Got: an int (5).
        Why: each item is one positional argument.
        Fix: f((5,))
    """
    return f"{expected}.\n  Got: {got}.\n  Why: {why}.\n  Fix: {fix}"


def as_part(text: str) -> str:
    """Returns a text of another process, which may have parts itself, as a part of a message.

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


def describe_value(value: object) -> str:
    """Returns type, shape and dtype of `value`, never its whole content."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{type(value).__name__} of shape {tuple(shape)} and dtype {dtype}"
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} ({text if len(text) <= 60 else text[:57] + '...'})"
