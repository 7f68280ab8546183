"""Closure: one call of a step, from `schedule` to its result."""

from __future__ import annotations

import concurrent.futures
import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from distjax.context.thread_settings import modes_of_this_thread
from distjax.servers.engine import Ran, Task
from distjax.servers.plan import Plan
from distjax.servers.streams import DataEnded, Draw


class State(enum.Enum):
    """Where a closure is; the last three do not change any more, but for a restore."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Call(NamedTuple):
    """A step with its flat arguments."""

    plan: Plan
    arrays: Sequence[jax.Array | np.ndarray]


class Closure:
    """One call of a step. Its board changes it, under the board's lock.

    Attributes:
      number: counts the calls of `schedule`; a board gives it.
      state: where it is.
      attempts: what became of the attempts that failed, in order.
      stop: raised in place of the next push; None: it goes on.
      error: what `fetch` raises.
      versions: of the servers; None until it is done.
      position: how many closures the servers had before it.
      is_reported: whether an error of its is raised by `join` too.
      modes: gives a thread the modes of JAX that there were where it was scheduled.

    Args:
      name: the step's.
      call: the step and its arguments; or how to make them once a worker draws elements.
      draws: what is to be drawn of per-worker data.
      is_reported: see above.
    """

    def __init__(
        self,
        name: str,
        call: Call | Callable[[dict[Draw, Any]], Call],
        draws: Sequence[Draw] = (),
        *,
        is_reported: bool = True,
    ):
        self.number = -1
        self.name = name
        self.state = State.QUEUED
        self.draws = tuple(draws)
        self.is_reported = is_reported
        self.modes = modes_of_this_thread()
        self.attempts: list[str] = []
        self.stop: BaseException | None = None
        self.error: BaseException | None = None
        self.versions: tuple[int, ...] | None = None
        self.position: int | None = None
        self._call: Call | Callable[[dict[Draw, Any]], Call] | None = call
        self._outcome: tuple[Plan, tuple[jax.Array, ...]] | None = None

    def __repr__(self) -> str:
        return f"closure {self.number} ({self.name})"

    @property
    def is_over(self) -> bool:
        """Whether it is done, failed or cancelled."""
        return self.error is not None or self._outcome is not None

    def prepare(self, worker: int) -> Draw | None:
        """Draws its elements, the first time: a second attempt has the same.

        Returns what has no more for the worker, then nothing was drawn; None: all is there.
        """
        if isinstance(self._call, Call) or self._call is None:
            return None
        drawn: dict[Draw, Any] = {}
        for draw in self.draws:
            try:
                drawn[draw] = draw.draw(worker)
            except DataEnded:
                for earlier, value in drawn.items():
                    earlier.give_back(worker, value)
                return draw
        self.draws = ()
        self._call = self._call(drawn)
        return None

    def as_task(self) -> Task:
        """Returns the next attempt."""
        call = self._call
        if not isinstance(call, Call):  # it was cancelled, or lost in a restore, meanwhile
            raise concurrent.futures.CancelledError
        attempt = len(self.attempts) + 1
        return Task(self.number, attempt, call.plan, call.arrays, self._require_wanted)

    def _require_wanted(self) -> None:
        reason = self.stop or self.error
        if reason is not None:
            raise reason

    def end(self, state: State, ran: Ran | None, error: BaseException | None) -> None:
        """Notes the outcome, and lets go of the arguments."""
        call, self._call = self._call, None
        self.draws = ()
        if ran is not None and isinstance(call, Call):
            self.versions = ran.versions
            self._outcome = (call.plan, ran.results)
        self.error = error
        self.state = state

    def undo(self, error: BaseException) -> None:
        """Takes the result back: the servers do not have its pushes any more."""
        self.error, self._outcome, self.state = error, None, State.FAILED

    def result(self) -> Any:
        """Returns what the step returned, or raises why there is nothing."""
        if self.error is not None:
            raise self.error
        assert self._outcome is not None
        plan, results = self._outcome
        return plan.rebuild(results)
