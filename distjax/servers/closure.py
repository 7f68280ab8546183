"""Closure: one call of a step, from `schedule` to its result, or to the error of `fetch`."""

from __future__ import annotations

import concurrent.futures
import enum
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any, NamedTuple

import jax

from distjax.context.thread_settings import modes_of_this_thread
from distjax.errors import ClosureError, EndOfDataError, ServerLostError, message
from distjax.servers.elements import Argument, DataEnded, PerWorkerSource
from distjax.servers.engine import Ran, Task
from distjax.servers.plan import StepPlan


class State(enum.Enum):
    """The state of a closure; the last three are final, except for a restore."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Call(NamedTuple):
    """A step with its flat arguments."""

    plan: StepPlan
    arrays: Sequence[Argument]


class Closure:
    """One call of a step. Its board changes it, under the board's lock.

    Attributes:
      number: counts the calls of `schedule`; assigned by a board.
      name: the name of the step, for error texts.
      state: its state.
      sources: the per-worker data that it has yet to draw from.
      attempts: the outcomes of failed attempts, in order.
      drawn: its elements, until it is over.
      stop: the error to raise instead of the next push; None: it continues.
      error: the error that `fetch` raises.
      versions: of the servers; None until it is done.
      position: how many closures the servers had before it.
      is_reported: whether `join` raises its error too.
      modes: sets a thread to the JAX modes in effect where it was scheduled.

    Args:
      name: the step's name.
      call: the step and its arguments; or a function that makes them from drawn elements.
      sources: the per-worker data to draw from.
      is_reported: see above.
    """

    def __init__(
        self,
        name: str,
        call: Call | Callable[[dict[PerWorkerSource, Any]], Call],
        sources: Sequence[PerWorkerSource] = (),
        *,
        is_reported: bool = True,
    ):
        self.number = -1
        self.name = name
        self.state = State.QUEUED
        self.sources = tuple(sources)
        self.is_reported = is_reported
        self.modes = modes_of_this_thread()
        self.attempts: list[str] = []
        self.drawn: dict[PerWorkerSource, Any] = {}
        self._drawn_by = -1
        self.stop: BaseException | None = None
        self.error: BaseException | None = None
        self.versions: tuple[int, ...] | None = None
        self.position: int | None = None
        self._call: Call | Callable[[dict[PerWorkerSource, Any]], Call] | None = call
        self._outcome: tuple[StepPlan, tuple[jax.Array, ...]] | None = None

    def __repr__(self) -> str:
        return f"closure {self.number} ({self.name})"

    @property
    def is_over(self) -> bool:
        """Whether it is done, failed or cancelled."""
        return self.error is not None or self._outcome is not None

    def prepare(self, worker: int) -> PerWorkerSource | None:
        """Draws its elements, once: a second attempt has the same.

        Returns the first source that has no more for the worker, or None. If a source has no more,
        or raises, what was drawn from the others is given back.
        """
        if isinstance(self._call, Call) or self._call is None:
            return None
        self._drawn_by = worker
        for source in self.sources:
            try:
                self.drawn[source] = source.draw(worker)
            except BaseException as error:
                self.give_back()
                if isinstance(error, DataEnded):
                    return source
                raise
        self.sources = ()
        self._call = self._call(self.drawn)
        return None

    def give_back(self) -> None:
        """Makes what it has drawn the next elements of their sources again."""
        for source, value in self.drawn.items():
            source.give_back(self._drawn_by, value)
        self.drawn = {}

    def as_task(self) -> Task:
        """Returns the next attempt; raises if the closure should not begin it."""
        self._require_wanted()
        call = self._call
        if not isinstance(call, Call):  # cancelled, or lost in a restore, in the meantime
            raise concurrent.futures.CancelledError
        attempt = len(self.attempts) + 1
        return Task(self.number, attempt, call.plan, call.arrays, self._require_wanted)

    def _require_wanted(self) -> None:
        reason = self.stop or self.error
        if reason is not None:
            raise reason

    def deleted_argument(self) -> tuple[str, jax.Array] | None:
        """Returns the name and the array of an argument that was deleted since `schedule`."""
        call = self._call
        if not isinstance(call, Call):
            return None
        for number, array in enumerate(call.arrays):
            if isinstance(array, jax.Array) and array.is_deleted():
                names = call.plan.argument_names
                return names[number] if names else str(number), array
        return None

    def end(self, state: State, ran: Ran | None, error: BaseException | None) -> None:
        """Records the outcome, and releases the arguments."""
        call, self._call = self._call, None
        self.sources = ()
        self.drawn = {}
        if ran is not None and isinstance(call, Call):
            self.versions = ran.versions
            self._outcome = (call.plan, ran.results)
        self.error = error
        self.state = state

    def undo(self, error: BaseException) -> None:
        """Revokes the result: the servers no longer have its pushes."""
        self.error, self._outcome, self.versions = error, None, None
        self.state = State.FAILED

    def result(self) -> Any:
        """Returns the result of the step, or raises the reason why there is none."""
        if self.error is not None:
            raise self.error
        assert self._outcome is not None
        plan, results = self._outcome
        return plan.rebuild(results)


# -- the errors of closures without a result ----------------------------------


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
