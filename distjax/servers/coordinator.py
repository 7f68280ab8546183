"""Coordinator: schedules steps on the workers of a parameter server strategy."""

from __future__ import annotations

import dataclasses
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import jax

from distjax.data.options import InputContext
from distjax.errors import describe_value, message
from distjax.servers.calls import RemoteValue, cut_call, require_outside_of_steps, to_numpy
from distjax.servers.closure import undone
from distjax.servers.elements import Position
from distjax.servers.engine import ServerStrategy
from distjax.servers.per_worker import (
    PerWorkerDataset,
    PerWorkerIterator,
    refuse_pickle,
    require_source,
)
from distjax.servers.server import ServerSnapshot, add_totals
from distjax.servers.worker_threads import WorkerThreads, require_positive
from distjax.tracebacks import keep_user_lines
from distjax.typing import PyTree
from distjax.user_lines import user_stacklevel


@dataclasses.dataclass(frozen=True, eq=False)
class Snapshot:
    """Values and versions of all servers, at a moment when no closure was running.

    Attributes:
      closures: how many closures it contains.
      servers: the state of each server.
      positions: the positions of iterators over per-worker data, as long as they are alive.
      strategy: the strategy of the servers, as long as it is alive.
    """

    closures: int
    servers: Sequence[ServerSnapshot]
    positions: weakref.WeakKeyDictionary[PerWorkerIterator, list[Position]]
    strategy: weakref.ref[ServerStrategy]

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions of the servers."""
        return tuple(server.version for server in self.servers)

    def __repr__(self) -> str:
        return f"Snapshot(closures={self.closures}, versions={self.versions})"


_QUEUED_PER_WORKER = 4
_SECONDS_IF_RAISED = 5.0  # for closures in hand: a worker without data must not hide the error


class Coordinator:
    """Schedules steps on workers, which run asynchronously and in any order.

    Each closure (a call of `schedule`) is applied exactly once at each server, however many
    workers are lost and however often it is tried. Errors are raised by the next `schedule`,
    `join` or `done` (the first one, once) and drop the queue.

    Args:
      strategy: a `ParameterServerStrategy` without another open coordinator.
      queue_size: how many closures may wait before `schedule` blocks; None: 4 per worker.

    Raises:
      TypeError: another kind of strategy.
      ValueError: a strategy with an open coordinator; a queue size that is not positive.

    Example:
      >>> strategy = dj.ParameterServerStrategy(workers=2)
      >>> with strategy.scope():
      ...     total = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)
      >>> with dj.Coordinator(strategy) as coordinator:
      ...     for x in range(5):
      ...         _ = coordinator.schedule(lambda x: total.assign_add(x), args=(float(x),))
      ...     coordinator.join()
      >>> float(total.value)
      10.0

    Source: tf.distribute.coordinator.ClusterCoordinator.
    """

    def __init__(self, strategy: ServerStrategy, *, queue_size: int | None = None):
        require_outside_of_steps("Coordinator")
        require_servers(strategy)
        if queue_size is None:
            queue_size = _QUEUED_PER_WORKER * strategy.num_workers
        require_positive(queue_size, "Coordinator", "queue_size", "dj.Coordinator(strategy)")
        self._strategy = strategy
        self._workers = WorkerThreads(strategy, queue_size)
        self._board = self._workers.board
        self._before = add_totals(s.report().totals for s in strategy.engine.servers)
        self._snapshot: Snapshot | None = None
        self._iterators: weakref.WeakSet[PerWorkerIterator] = weakref.WeakSet()
        self._workers.add(strategy.num_workers)
        self._closing = weakref.finalize(self, self._board.close)

    # -- running steps --------------------------------------------------------

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
    ) -> RemoteValue:
        """Schedules ``fn(*args, **kwargs)`` on a worker; returns its future result.

        The first call traces and cuts ``fn``, so errors of the trace are raised here. Blocks
        while the queue is full.

        Args:
          fn: a replica function, as for ``strategy.run``.
          args: its positional arguments. An iterator over a per-worker dataset stands for the
            worker's next element, `PerWorkerValues` for the worker's value.
          kwargs: its keyword arguments.
        Context: not in a replica function. Numpy arrays, dicts and lists are copied here.

        Raises:
          ContextError: in a replica function or per-worker data; in ``with coordinator.paused()``,
            a full queue.
          RuntimeError: the coordinator is closed.
          ValueError: a `RemoteValue` among the arguments.
          Exception: the error of an earlier closure; this one is then not queued.
        """
        self._require_ready("schedule")
        self._board.raise_error()
        try:
            closure = cut_call(self._board, self._strategy, fn, args, kwargs)
        except Exception as error:
            keep_user_lines(error)
            raise
        self._board.put(closure, lambda: self._require_ready("schedule"))
        return RemoteValue(closure, self._board.waiters, self._board.pauses)

    def join(self, timeout: float | None = None) -> None:
        """Waits until all closures are over.

        Args:
          timeout: maximum wait in seconds.

        Raises:
          TimeoutError: some are not over by then.
          ContextError: in ``with coordinator.paused()``, a replica function or per-worker data.
          Exception: the error of a closure.
        """
        self._require_ready("join")
        self._board.pauses.require_going("join")
        if not self._board.waiters.wait_until(self._board.is_empty, timeout):
            raise TimeoutError(
                message(
                    f"join needs all closures to end within {timeout} s",
                    got=f"{len(self._board.queue)} in the queue and "
                    f"{len(self._board.running)} running",
                    why="the workers have not got that far yet",
                    fix="wait longer; coordinator.stats() says what workers do",
                )
            )
        self._board.raise_error()

    def done(self) -> bool:
        """Returns whether all closures are over; raises as `join` does."""
        self._require_ready("done")
        self._board.raise_error()
        return self._board.is_empty()

    def fetch(self, nest: PyTree) -> Any:
        """Waits, and returns a tree with its RemoteValues replaced by numpy results."""
        is_remote = lambda leaf: isinstance(leaf, RemoteValue)
        return jax.tree.map(
            lambda leaf: leaf.fetch() if is_remote(leaf) else to_numpy(leaf),
            nest,
            is_leaf=is_remote,
        )

    def cancel(self) -> None:
        """Drops the queue; running closures end before their next push."""
        self._require_ready("cancel", waits=False)
        self._board.cancel("coordinator.cancel() was called before it had run")

    def close(self) -> None:
        """Drops the queue, waits for the closures in hand and ends the threads."""
        require_outside_of_steps("close")
        self._board.pauses.require_not_drawing("close")
        self._end(None)

    def _end(self, timeout: float | None) -> None:
        """Closes, and warns of workers that have not ended within `timeout` seconds."""
        if self._closing.alive:
            self._board.cancel("the coordinator was closed before it had run")
        self._closing.detach()
        self._board.close()  # again, if a signal ended the first call before it
        left = self._workers.wait(timeout)
        if left:
            warnings.warn(_not_ended(left, timeout), RuntimeWarning, user_stacklevel())

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        timeout = _SECONDS_IF_RAISED
        try:
            if kind is None and self._closing.alive:
                self.join()
            timeout = None if kind is None else timeout
        finally:
            self._end(timeout)

    # -- data -----------------------------------------------------------------

    def create_per_worker_dataset(
        self,
        fn_or_dataset: Callable[[InputContext], Iterable[Any]] | Iterable[Any],
        *,
        at: str = "worker",
    ) -> PerWorkerDataset:
        """Returns a dataset from which each worker draws elements for its closures.

        A worker whose data has ended takes no more closures that need it. When the data of all
        workers has ended, such closures raise `EndOfDataError` from `fetch`, and `join` returns.

        Args:
          fn_or_dataset: a function of an `InputContext` (pipeline number and count), called
            for each worker present when an iteration begins; or a dataset, whose elements
            go to whichever worker asks next.
          at: where the function is called. "worker": where the worker is (in its process, on
            `RayEngine`: it is pickled, and must give the same elements each time), when it needs
            its first element; "coordinator": here, when the iteration begins. A dataset is
            always read here.

        Raises:
          TypeError, ValueError: invalid arguments.
        """
        self._require_ready("create_per_worker_dataset", waits=False)
        require_source(fn_or_dataset, at)
        strategy = self._strategy
        open_data = strategy.engine.open_data if at == "worker" else None
        num_replicas = strategy.num_replicas_in_sync
        return PerWorkerDataset(
            fn_or_dataset, self._workers.ids, num_replicas, open_data, self._iterators
        )

    # -- workers --------------------------------------------------------------

    def add_workers(self, n: int = 1) -> list[int]:
        """Starts more workers; returns their ids."""
        self._require_ready("add_workers", waits=False)
        require_positive(n, "add_workers", "n", "coordinator.add_workers(2)")
        return self._workers.add(n)

    def remove_workers(self, ids_or_n: int | Iterable[int]) -> None:
        """Ends workers after the closures they have in hand, and waits until they have ended.

        The rest of their shares of per-worker data is not drawn: the next ``iter(dataset)``
        shares the data among the workers present then.

        Args:
          ids_or_n: which workers, or how many, the latest first.

        Raises:
          ValueError: an unknown id, or no worker would be left.
        """
        self._require_ready("remove_workers")
        self._workers.remove(ids_or_n)

    # -- snapshots ------------------------------------------------------------

    @contextmanager
    def paused(self) -> Generator[None]:
        """A context in which no closure runs, so that variables read there are consistent.

        Running closures finish first; the queue is kept, and continues afterwards. A restore in
        another thread waits until the block has ended.

        Example:
          >>> strategy = dj.ParameterServerStrategy(workers=2)
          >>> with strategy.scope():
          ...     w, count = dj.Variable(1.0), dj.Variable(0)
          >>> with dj.Coordinator(strategy) as coordinator, coordinator.paused():
          ...     values = w.value, count.value
        """
        self._require_ready("paused")
        with self._board.paused():
            yield

    def snapshot(self) -> Snapshot:
        """Returns a copy of the state of all servers, between two closures: see `paused`.

        Includes the positions of iterators over per-worker datasets.

        Raises:
          ServerLostError: a server is lost.
        """
        self._require_ready("snapshot")
        with self._board.paused():
            servers = [server.snapshot() for server in self._strategy.engine.servers]
            iterators = tuple(self._iterators)  # another thread may begin an iteration meanwhile
            positions = weakref.WeakKeyDictionary((it, it.positions()) for it in iterators)
            strategy = weakref.ref(self._strategy)
            self._snapshot = Snapshot(self._board.num_held, servers, positions, strategy)
        return self._snapshot

    def restore(self, snapshot: Snapshot | None = None) -> int:
        """Restores all servers to a snapshot; returns how many closures it contains.

        The results of closures that it does not contain, including queued and running ones, become
        a `ServerLostError`. If any was not over, the next `join` raises it, once.

        Args:
          snapshot: the snapshot; None: the latest.

        Raises:
          RuntimeError: there is no snapshot.
          TypeError, ValueError: something else, or a snapshot of another strategy.
        """
        self._require_ready("restore")
        if snapshot is not None:
            require_snapshot(snapshot, self._strategy)
        snapshot = snapshot or self._snapshot
        if snapshot is None:
            raise RuntimeError(
                message(
                    "restore needs a snapshot",
                    got="none, and none was taken",
                    why="servers go back to what they had when it was taken",
                    fix="snapshot = coordinator.snapshot(), now and then",
                )
            )
        with self._board.paused(is_restore=True):
            num_over = self._board.undo(snapshot.closures, undone(snapshot.closures))
            # From here on, servers reject pushes for any closure from before that.
            for server, saved in zip(self._strategy.engine.servers, snapshot.servers, strict=True):
                server.restore(saved, num_over)
            for iterator, positions in snapshot.positions.items():
                iterator.restore(positions)
        self._snapshot = snapshot
        return snapshot.closures

    # -- statistics -----------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Returns statistics, as a dict of numbers.

        closures: how many are scheduled (in total), running, done, failed, cancelled, retried;
        queue; versions: of the servers; staleness: a histogram of the pushes by others between
        a pull and its push; bytes_pulled, bytes_pushed; pushes_per_second; workers; servers.
        """
        board, engine = self._board, self._strategy.engine
        counts = board.counts
        names = ("scheduled", "done", "failed", "cancelled", "retried")
        servers = [(server, server.report()) for server in engine.servers]
        totals = add_totals(report.totals for _, report in servers)
        staleness = totals.staleness - self._before.staleness
        return {
            "closures": {name: counts[name] for name in names} | {"running": len(board.running)},
            "queue": len(board.queue),
            "versions": [report.version for _, report in servers],
            "staleness": dict(sorted(staleness.items())),
            "bytes_pulled": totals.bytes_pulled - self._before.bytes_pulled,
            "bytes_pushed": totals.bytes_pushed - self._before.bytes_pushed,
            "pushes_per_second": staleness.total() / (time.monotonic() - board.started),
            "workers": self._workers.describe_workers(),
            "servers": [
                {"id": s.number, "pid": s.pid, "version": report.version, "bytes": report.nbytes}
                for s, report in servers
            ],
        }

    def __repr__(self) -> str:
        return f"Coordinator({self._strategy!r})"

    def __reduce__(self) -> NoReturn:
        refuse_pickle(
            self, "coordinator = dj.Coordinator(strategy) there, of a strategy of its own"
        )

    def _require_ready(self, method: str, *, waits: bool = True) -> None:
        """Raises unless a method, which may wait for workers, can be called here and now."""
        require_outside_of_steps(method)
        if waits:
            self._board.pauses.require_not_drawing(method)
        if self._closing.alive:
            return
        raise RuntimeError(
            message(
                f"{method} needs an open coordinator",
                got="one that was closed",
                why="its workers have ended",
                fix="coordinator = dj.Coordinator(strategy) opens another",
            )
        )


def _not_ended(left: Sequence[str], timeout: float | None) -> str:
    return message(
        f"a coordinator whose block raises needs its workers to end within {timeout:g} s",
        got="; ".join(left),
        why="the error of the block is raised now, and their threads end when they get that far",
        fix="let the data end when the block does, or bound its waits: queue.get(timeout=60)",
    )


# -- its arguments ------------------------------------------------------------


def require_servers(strategy: object) -> None:
    """Raises a TypeError unless it is a strategy that has parameter servers."""
    # A `dj.compat` adapter has all names of the strategy it wraps, and would get another board.
    if isinstance(strategy, ServerStrategy) and hasattr(type(strategy), "cut_step"):
        return
    raise TypeError(
        message(
            "Coordinator needs a ParameterServerStrategy",
            got=describe_value(strategy),
            why="it schedules steps on workers that have parameter servers",
            fix="dj.Coordinator(dj.ParameterServerStrategy(workers=4)); for a dj.compat adapter of "
            "one: dj.Coordinator(strategy.wrapped)",
        )
    )


def require_snapshot(snapshot: object, strategy: ServerStrategy) -> None:
    """Raises a TypeError or ValueError unless it is a snapshot of the servers of `strategy`."""
    is_snapshot = isinstance(snapshot, Snapshot)
    if is_snapshot and snapshot.strategy() is strategy:
        return
    raise (ValueError if is_snapshot else TypeError)(
        message(
            f"restore needs a snapshot of the servers of {strategy!r}",
            got=f"one of another strategy: {snapshot!r}"
            if is_snapshot
            else describe_value(snapshot),
            why="servers go back to the values that they themselves had",
            fix="snapshot = coordinator.snapshot(); dj.checkpoint takes values from one strategy "
            "to another",
        )
    )
