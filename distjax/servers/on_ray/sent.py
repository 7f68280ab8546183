"""Sent: an attempt at a closure that a worker of Ray's has been sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from distjax.context.thread_settings import ProgramModes
from distjax.servers.engine import Ran, Task
from distjax.servers.on_ray.server import RayServer
from distjax.servers.on_ray.wire import from_wire, to_wire
from distjax.servers.on_ray.workers import RayProcess, RayWorkers
from distjax.servers.plan import Plan
from distjax.servers.server_contract import lost_error

if TYPE_CHECKING:
    from distjax.servers.on_ray.actors import Outcome

_LOOK_SECONDS = 0.1  # how often an attempt under way is looked at: is it wanted still?


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
        """A number that changes when a server is made anew."""
        ...

    def number_of(self, plan: Plan) -> int:
        """Returns the number of a plan that was admitted."""
        ...

    def teach(self, process: RayProcess, plan: Plan) -> None:
        """Sends a worker a plan, and the servers that there are now."""
        ...


class Sent:
    """An attempt that a worker has been sent, in one call or in several.

    Args:
      host: the engine.
      worker: who runs it.
      process: of the worker.
      task: what is run.
    """

    def __init__(self, host: Host, worker: int, process: RayProcess, task: Task):
        from distjax.servers.on_ray.actors import Order

        self._host, self._worker, self._process, self._task = host, worker, process, task
        self._order = Order(
            host.number_of(task.plan),
            host.epoch,
            task.closure,
            task.attempt,
            to_wire(task.arrays),
            ProgramModes.of_this_thread(),
        )
        self._call: tuple[str, tuple[int, ...]] = ("run", ())
        self._answer: Any = None
        self._is_stopped = False
        process.in_hand.append(self)

    def send(self, method: str, *args: int) -> None:
        """Calls a method of the worker with the order."""
        self._call = method, args
        self._answer = getattr(self._process.actor, method).remote(self._order, *args)

    def ask(self, method: str, *args: int) -> Outcome:
        """Calls a method of the worker, and returns what comes of it.

        Raises:
          WorkerDied: the worker has.
        """
        self.send(method, *args)
        return self._outcome()

    def wait(self) -> Ran:
        """Waits until the attempt has come to something; raises as `Engine.run`."""
        return self.conclude(self._outcome())

    def conclude(self, outcome: Outcome) -> Ran:
        """Returns, or raises, what an attempt has come to."""
        from distjax.servers.on_ray.actors import Done, Failed, ServerGone, Stopped

        self.let_go()
        servers = self._host.servers
        if isinstance(outcome, ServerGone):
            if self._order.epoch == self._host.epoch:
                servers[outcome.server].is_lost = True
            raise lost_error(outcome.server)
        if isinstance(outcome, Failed):
            if isinstance(outcome.error, Stopped):
                self._task.require_wanted()
            raise outcome.error
        assert isinstance(outcome, Done), "all stages have been asked for"
        versions = outcome.versions
        return Ran(
            tuple(from_wire(outcome.results)),
            tuple(versions[s.number] if s.number in versions else s.version for s in servers),
        )

    def let_go(self) -> None:
        """Takes the attempt out of the worker's hand."""
        if self in self._process.in_hand:
            self._process.in_hand.remove(self)

    def _outcome(self) -> Outcome:
        from ray.exceptions import RayError, RayTaskError

        from distjax.servers.on_ray.actors import Unknown

        try:
            while isinstance(outcome := self._get(), Unknown):
                self._host.teach(self._process, self._task.plan)
                self._order = dataclasses.replace(self._order, epoch=self._host.epoch)
                method, args = self._call
                self.send(method, *args)
            return outcome
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            raise self._host.workers.bury(self._worker, self._process, self, error) from error

    def _get(self) -> Outcome:
        """Returns what the worker answers; has it stop where that is not wanted any more."""
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
