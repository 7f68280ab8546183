"""RayWorkers: the processes of workers; one that dies is replaced at once."""

# Closures are sent to a worker while it has another one in hand. Of those that a process had when
# it died, the first may have killed it; the others had not begun, and the death does not count
# against them.

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distjax.errors import ClusterError
from distjax.servers.engine import WorkerDied
from distjax.servers.on_ray.startup import (
    ProcessInfo,
    cannot_start,
    ends_of,
    require_devices,
    require_same_versions,
)

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from distjax.servers.on_ray.worker_actor import WorkerActor

_LOOK_SECONDS = 0.1  # how often a wait for a process checks whether it is still wanted


class RayProcess:
    """One process of a worker.

    Args:
      actor: the process.
      num_failures: how many of the worker's processes, in a row, have ended during startup.

    Attributes:
      in_hand: the attempts sent to it that have not ended, in order.
      info: its description of itself; None while it starts.
      error: why it cannot be used.
      is_dead: whether it is known to have died.
    """

    def __init__(self, actor: ActorHandle[WorkerActor], num_failures: int):
        self.actor = actor
        self.num_failures = num_failures
        self.in_hand: list[object] = []
        self.info: ProcessInfo | None = None
        self.error: Exception | None = None
        self.is_dead = False
        self.answer: Any = actor.describe_process.remote()


class RayWorkers:
    """The processes of the workers, at most one for each.

    Args:
      make: creates a process.
      max_failures: how many may end in a row during startup.
      num_devices: how many devices each needs.
    """

    def __init__(
        self, make: Callable[[], ActorHandle[WorkerActor]], max_failures: int, num_devices: int = 1
    ):
        self._make, self._max_failures = make, max_failures
        self._num_devices = num_devices
        self._processes: dict[int, RayProcess] = {}
        self._lock = threading.Lock()

    def begin(self, worker: int) -> RayProcess:
        """Returns the process of a worker, which may still be starting."""
        with self._lock:
            if worker not in self._processes:
                self._processes[worker] = RayProcess(self._make(), 0)
            return self._processes[worker]

    def prepare(self, worker: int, is_wanted: Callable[[], bool]) -> bool:
        """Returns whether a worker has a process; waits for it while it is wanted."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        while True:
            process = self.begin(worker)
            if process.info is not None or process.error is not None:
                return True
            try:
                info: ProcessInfo = ray.get(process.answer, timeout=_LOOK_SECONDS)
                require_same_versions(f"worker {worker}", info)
                require_devices(f"worker {worker}", info, self._num_devices)
                process.info = info
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
          ClusterError: it is unusable, or several in a row ended during startup.
        """
        self.prepare(worker, lambda: True)
        process = self.begin(worker)
        if process.error is not None:
            self.end(worker)  # the next closure makes another attempt
            raise process.error
        return process

    def pid_of(self, worker: int) -> int | None:
        """Returns the pid of a worker's process, or None if it has none yet."""
        process = self._processes.get(worker)
        return None if process is None or process.info is None else process.info.pid

    def end(self, worker: int) -> None:
        """Ends the process of a worker."""
        import ray

        with self._lock:
            process = self._processes.pop(worker, None)
        if process is not None and ray.is_initialized():
            ray.kill(process.actor)

    def replace_dead(
        self, worker: int, process: RayProcess, attempt: object, error: Exception
    ) -> WorkerDied:
        """Replaces a process that died; returns the error for an attempt it had in hand."""
        import ray

        with self._lock:
            if not process.is_dead:
                process.is_dead = True
                if self._processes.get(worker) is process:
                    ray.kill(process.actor)  # in case it is only unreachable
                    self._processes[worker] = RayProcess(self._make(), 0)
        return WorkerDied(ends_of(error), has_begun=process.in_hand[:1] == [attempt])

    def _fail_to_start(self, worker: int, process: RayProcess, error: Exception) -> None:
        count = process.num_failures + 1
        with self._lock:
            if self._processes.get(worker) is not process:  # another thread has replaced it
                return
            if count < self._max_failures:
                self._processes[worker] = RayProcess(self._make(), count)
                return
        process.error = ClusterError(cannot_start(f"worker {worker}", error))

    def actors(self) -> list[ActorHandle[WorkerActor]]:
        """Returns the current processes."""
        return [process.actor for process in tuple(self._processes.values())]

    @property
    def platforms(self) -> set[str]:
        """The JAX platforms of the processes, as far as known."""
        infos = [process.info for process in tuple(self._processes.values())]
        return {info.platform for info in infos if info is not None}
