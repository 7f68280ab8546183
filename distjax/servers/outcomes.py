"""The errors that `fetch` raises for closures without a result."""

from __future__ import annotations

from concurrent.futures import CancelledError

from distjax.errors import ClosureError, EndOfDataError, ServerLostError, message
from distjax.servers.closure import Closure


def cancelled(reason: str) -> CancelledError:
    """Returns the error of a closure that was never run, or was stopped."""
    return CancelledError(
        message(
            "fetch needs a closure that was run",
            got="one that was cancelled",
            why=reason,
            fix="schedule it again",
        )
    )


def cut_short(closure: Closure, error: CancelledError) -> CancelledError:
    """Returns the error of a closure that was stopped, by `error`, between two of its pushes."""
    cut = CancelledError(
        message(
            f"fetch needs {closure!r} to be run to its end",
            got="one that was stopped when a server had applied a push of it",
            why="other pushes of it are not made, and the elements that it drew are used up",
            fix="coordinator.restore() goes back to a snapshot, which has whole closures only",
        )
    )
    cut.__cause__ = error
    return cut


def given_up(closure: Closure) -> ClosureError:
    """Returns the error of a closure that lost too many workers."""
    attempts = "; ".join(closure.attempts)
    return ClosureError(
        message(
            f"{closure!r} needs a worker that outlives it",
            got=f"{len(closure.attempts)} workers that did not: {attempts}",
            why="a closure that kills every worker would do so forever",
            fix="look for what it does to them (memory, a signal), then schedule it again",
        ),
        tuple(closure.attempts),
    )


def end_of_data(closure: Closure) -> EndOfDataError:
    """Returns the error of a closure for which no worker has an element."""
    return EndOfDataError(
        message(
            f"{closure!r} needs an element of per-worker data",
            got="data that has ended on every worker",
            why="each element is used once in an iteration",
            fix="iterator = iter(dataset) begins the next one",
        )
    )


def undone(closures: int) -> ServerLostError:
    """Returns the error of a closure that a restore has undone."""
    return ServerLostError(
        message(
            "fetch needs a closure that the servers have",
            got="one that they do not, since they were restored",
            why=f"they went back to a snapshot of the first {closures} closures",
            fix="schedule it again, from what coordinator.restore() returned on",
        )
    )


def explain(closure: Closure, error: BaseException) -> BaseException:
    """Returns the error of a closure, which names an argument that was deleted too early."""
    found = closure.deleted_argument() if "deleted" in str(error) else None
    if found is None:
        return error
    name, array = found
    explained = RuntimeError(
        message(
            f"{closure.name} needs argument {name} to hold an array that is there when it runs",
            got=f"an array of {array.dtype}{list(array.shape)} that was donated or deleted. "
            "Array has been deleted",
            why="a worker reads it after schedule has returned, and JAX arrays are not copied",
            fix="donate it when the closure is over: value.fetch(); or schedule a copy: "
            "args=(jnp.copy(x),)",
        )
    )
    explained.__cause__ = error
    return explained
