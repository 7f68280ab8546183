"""RayWorkers: the processes of workers; one that dies is made anew at once."""

# Closures are sent to a worker while it has another one in hand. Of those that a process had when
# it died, the first may have killed it; the others had not begun, and are nobody's failure.

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distjax.errors import ClusterError
from distjax.servers.engine import WorkerDied
from distjax.servers.on_ray.hello import Hello, cannot_start, ends_of, require_same_versions

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from distjax.servers.on_ray.actors import WorkerActor

_LOOK_SECONDS = 0.1  # how often somebody who waits for a process looks whether that is wanted


class RayProcess:
    """One process of a worker.

    Args:
      actor: the process.
      num_failures: how many processes of the worker have ended in a row before they had begun.

    Attributes:
      in_hand: the attempts that it was sent and has not ended, in order.
      hello: what it has said of itself; None: it is starting.
      error: why it cannot be used.
      is_dead: whether it is known to have died.
    """

    def __init__(self, actor: ActorHandle[WorkerActor], num_failures: int):
        self.actor = actor
        self.num_failures = num_failures
        self.in_hand: list[object] = []
        self.hello: Hello | None = None
        self.error: Exception | None = None
        self.is_dead = False
        self.greeting: Any = actor.hello.remote()


class RayWorkers:
    """The processes of the workers, each with at most one.

    Args:
      make: makes a process.
      max_failures: so many may end in a row while they start.
    """

    def __init__(self, make: Callable[[], ActorHandle[WorkerActor]], max_failures: int):
        self._make, self._max_failures = make, max_failures
        self._processes: dict[int, RayProcess] = {}
        self._lock = threading.Lock()

    def begin(self, worker: int) -> RayProcess:
        """Returns the process of a worker, which may be starting."""
        with self._lock:
            if worker not in self._processes:
                self._processes[worker] = RayProcess(self._make(), 0)
            return self._processes[worker]

    def prepare(self, worker: int, is_wanted: Callable[[], bool]) -> bool:
        """Returns whether a worker has a process; waits for it while that is wanted."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        while True:
            process = self.begin(worker)
            if process.hello is not None or process.error is not None:
                return True
            try:
                hello: Hello = ray.get(process.greeting, timeout=_LOOK_SECONDS)
                require_same_versions(f"worker {worker}", hello)
                process.hello = hello
            except GetTimeoutError:
                if not is_wanted():
                    return False
            except RayActorError as error:
                self._fail_to_start(worker, process, error)
            except Exception as error:
                process.error = error

    def find(self, worker: int) -> RayProcess:
        """Returns the process of a worker, ready to be used.

        Raises:
          RuntimeError: it is of no use, or several have died as they started.
        """
        self.prepare(worker, lambda: True)
        process = self.begin(worker)
        if process.error is not None:
            self.end(worker)  # the next closure is another try
            raise process.error
        return process

    def pid_of(self, worker: int) -> int | None:
        """Returns the process that a worker is in; None: in none yet."""
        process = self._processes.get(worker)
        return None if process is None or process.hello is None else process.hello.pid

    def end(self, worker: int) -> None:
        """Ends the process of a worker."""
        import ray

        with self._lock:
            process = self._processes.pop(worker, None)
        if process is not None and ray.is_initialized():
            ray.kill(process.actor)

    def bury(
        self, worker: int, process: RayProcess, attempt: object, error: Exception
    ) -> WorkerDied:
        """Returns what to raise for an attempt whose process has died; makes a new process."""
        import ray

        with self._lock:
            if not process.is_dead:
                process.is_dead = True
                if self._processes.get(worker) is process:
                    ray.kill(process.actor)  # where it is only out of reach
                    self._processes[worker] = RayProcess(self._make(), 0)
        return WorkerDied(ends_of(error), has_begun=process.in_hand[:1] == [attempt])

    def _fail_to_start(self, worker: int, process: RayProcess, error: Exception) -> None:
        count = process.num_failures + 1
        if count < self._max_failures:
            with self._lock:
                self._processes[worker] = RayProcess(self._make(), count)
            return
        process.error = ClusterError(cannot_start(f"worker {worker}", error))

    def actors(self) -> list[ActorHandle[WorkerActor]]:
        """Returns the processes that there are."""
        return [process.actor for process in tuple(self._processes.values())]

    @property
    def platforms(self) -> set[str]:
        """What JAX runs on in them, as far as that is known."""
        hellos = [process.hello for process in tuple(self._processes.values())]
        return {hello.platform for hello in hellos if hello is not None}
