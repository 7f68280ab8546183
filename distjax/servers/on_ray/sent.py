"""Sent: an attempt at a closure, in progress in a worker's Ray process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from distjax.context.thread_settings import ProgramModes
from distjax.servers.elements import Argument, Place, RemoteArray
from distjax.servers.engine import Ran, Task
from distjax.servers.on_ray.failures import Failed
from distjax.servers.on_ray.orders import Done, Order, Outcome, ServerGone, Stopped, Unknown
from distjax.servers.on_ray.server import RayServer
from distjax.servers.on_ray.wire import OnWire, from_wire, to_wire
from distjax.servers.on_ray.workers import RayProcess, RayWorkers
from distjax.servers.plan import Plan
from distjax.servers.server_contract import lost_error

_LOOK_SECONDS = 0.1  # how often to check whether a running attempt is still wanted


def _as_sent(array: Argument) -> OnWire | Place:
    return array.place if isinstance(array, RemoteArray) else to_wire([array])[0]


class Host(Protocol):
    """The engine, as its attempts see it."""

    @property
    def servers(self) -> Sequence[RayServer]:
        """The servers, by number."""
        ...

    @property
    def workers(self) -> RayWorkers:
        """The processes of the workers."""
        ...

    @property
    def epoch(self) -> int:
        """A number that changes when a server is replaced."""
        ...

    def number_of(self, plan: Plan) -> int:
        """Returns the number of an admitted plan."""
        ...

    def send_plan(self, process: RayProcess, task: Task) -> None:
        """Sends a worker a plan, its data sources, and the current servers."""
        ...


class Sent:
    """An attempt that was sent to a worker, in one call or in several.

    Args:
      host: the engine.
      worker: the worker's number.
      process: the worker's process.
      task: the task to run.
    """

    def __init__(self, host: Host, worker: int, process: RayProcess, task: Task):
        self._host, self._worker, self._process, self._task = host, worker, process, task
        self._order = Order(
            host.number_of(task.plan),
            host.epoch,
            task.closure,
            task.attempt,
            list(map(_as_sent, task.arrays)),
            ProgramModes.of_this_thread(),
        )
        self._call: tuple[str, tuple[int, ...]] = ("run", ())
        self._answer: Any = None
        self._is_stopped = False

    def send(self, method: str, *args: int) -> None:
        """Calls a method of the worker with the order."""
        self._call = method, args
        self._answer = getattr(self._process.actor, method).remote(self._order, *args)
        if self not in self._process.in_hand:
            self._process.in_hand.append(self)

    def ask(self, method: str, *args: int) -> Outcome:
        """Calls a method of the worker, and returns its outcome.

        Raises:
          WorkerDied: the worker died.
        """
        self.send(method, *args)
        return self._outcome()

    def wait(self) -> Ran:
        """Waits for the attempt's outcome; raises as `Engine.run` does."""
        return self.conclude(self._outcome())

    def conclude(self, outcome: Outcome) -> Ran:
        """Returns, or raises, the outcome of an attempt."""
        self.let_go()
        servers = self._host.servers
        if isinstance(outcome, ServerGone):
            if self._order.epoch == self._host.epoch:
                servers[outcome.server].is_lost = True
            raise lost_error(outcome.server)
        if isinstance(outcome, Failed):
            error = outcome.error
            if isinstance(error, Stopped):
                self._task.require_wanted()
            raise error
        assert isinstance(outcome, Done), "all stages have been asked for"
        versions = outcome.versions
        return Ran(
            tuple(from_wire(outcome.results)),
            tuple(versions[s.number] if s.number in versions else s.version for s in servers),
        )

    def let_go(self) -> None:
        """Removes the attempt from those the worker has in hand."""
        if self in self._process.in_hand:
            self._process.in_hand.remove(self)

    def _outcome(self) -> Outcome:
        from ray.exceptions import RayError, RayTaskError

        try:
            while isinstance(outcome := self._get(), Unknown):
                self._host.send_plan(self._process, self._task)
                self._order = dataclasses.replace(self._order, epoch=self._host.epoch)
                method, args = self._call
                self.send(method, *args)
            return outcome
        except RayTaskError as error:
            self.let_go()
            raise error.cause from None
        except RayError as error:
            raise self._host.workers.replace_dead(
                self._worker, self._process, self, error
            ) from error
        except BaseException:  # such as that of a source of data, which the process cannot make
            self.let_go()
            raise

    def _get(self) -> Outcome:
        """Returns the worker's answer; tells it to stop if that is no longer wanted."""
        import ray
        from ray.exceptions import GetTimeoutError

        while True:
            try:
                return ray.get(self._answer, timeout=_LOOK_SECONDS)
            except GetTimeoutError:
                self._stop_unwanted()

    def _stop_unwanted(self) -> None:
        if self._is_stopped:
            return
        try:
            self._task.require_wanted()
        except BaseException:
            self._is_stopped = True
            self._process.actor.stop.remote(self._task.closure)
