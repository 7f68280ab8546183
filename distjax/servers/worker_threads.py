"""The threads of a coordinator's workers: the loop of each, and the board that they take from."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from distjax.context.thread_settings import settings_of_this_thread
from distjax.errors import ServerLostError, message
from distjax.integers import require_int
from distjax.servers.board import Board, Numbers, Worker
from distjax.servers.closure import Closure, explain
from distjax.servers.engine import Engine, Running, ServerStrategy, WorkerDied

# -- the loop of a worker -----------------------------------------------------


def work(
    board: Board,
    engine: Engine,
    worker: Worker,
    settings: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    """Takes closures and runs them, until the board is closed or the worker removed.

    A closure is finished after the next one has been started, so its programs overlap with
    the pull of the next; at most two are in progress.
    """
    before: tuple[Closure, Running] | None = None
    is_wanted = lambda: before is None and not board.is_to_end(worker)
    try:
        with settings():
            while True:
                is_there = _prepare(engine, worker, is_wanted)
                closure = board.take(worker, wait=before is None) if is_there else None
                if closure is None and before is None:
                    return
                ran = None if closure is None else start(board, engine, worker, closure)
                if before is not None:
                    finish(board, worker, *before)
                before = (closure, ran) if closure is not None and ran is not None else None
                del closure, ran  # else a result would live until the next closure arrives
    finally:
        try:
            engine.end_worker(worker.number)
        finally:  # else whoever waits for the worker would wait forever
            worker.has_ended = True
            if board.is_closed:  # no one is left to take what is queued
                board.cancel("its coordinator was closed, or dropped, before it had run")
            board.waiters.ring()


def _prepare(engine: Engine, worker: Worker, is_wanted: Callable[[], bool]) -> bool:
    """Returns whether a worker is to take a closure."""
    try:
        return engine.prepare(worker.number, is_wanted)
    except Exception:  # `run` raises it too; there it is a closure's, and reaches the user
        return True


def start(board: Board, engine: Engine, worker: Worker, closure: Closure) -> Running | None:
    """Starts a closure without waiting for it; returns None if its outcome is on the board."""
    try:
        with closure.modes():
            try:
                with board.pauses.drawing():
                    ended = closure.prepare(worker.number)
            finally:
                board.end_drawing(worker)
            if ended is None:
                return engine.run(worker.number, closure.as_task())
        board.put_back(closure, worker, ended)
    except WorkerDied as death:
        board.retry(closure, worker, death)
    except BaseException as error:  # e.g. SystemExit: no one must wait forever
        board.end(closure, explain(closure, error))
    return None


def finish(board: Board, worker: Worker, closure: Closure, running: Running) -> None:
    """Waits until a closure has been computed and applied."""
    try:
        ran = running.wait()
    except WorkerDied as death:
        board.retry(closure, worker, death)
    except BaseException as error:
        board.end(closure, explain(closure, error))
    else:
        board.finish(closure, worker, ran)


# -- the threads, and the board of each strategy ------------------------------


_EXIT_SECONDS = 60.0  # for running computations; one that hangs must not block the exit


@dataclasses.dataclass
class _Record:
    """The state kept for a strategy; numbers of closures are never reused."""

    numbers: Numbers
    board: Board


_records: weakref.WeakKeyDictionary[ServerStrategy, _Record] = weakref.WeakKeyDictionary()
_opening = threading.Lock()  # held while a record is made or replaced
_alive: weakref.WeakSet[WorkerThreads] = weakref.WeakSet()


def board_of(strategy: ServerStrategy) -> Board:
    """Returns the board of the open coordinator, or a closed one without workers."""
    with _opening:
        if strategy not in _records:
            numbers = Numbers()
            _records[strategy] = _Record(numbers, _make_board(strategy.engine, 1, numbers))
            _records[strategy].board.close()
        return _records[strategy].board


def _open_board(strategy: ServerStrategy, queue_size: int) -> Board:
    before = board_of(strategy)
    with _opening:
        record = _records[strategy]
        if record.board is not before or not before.is_closed:
            raise ValueError(
                message(
                    "Coordinator needs a strategy that has no other",
                    got=f"{strategy!r}, which has one that is open",
                    why="two would share its workers' turns and its servers' order",
                    fix="use that one, or close it first: coordinator.close()",
                )
            )
        record.board = _make_board(strategy.engine, queue_size, record.numbers)
        return record.board


def _make_board(engine: Engine, queue_size: int, numbers: Numbers) -> Board:
    def forget(closure: int) -> None:
        for server in engine.servers:
            server.mark_done(closure)

    def withdraw(closure: int) -> bool:
        has_changed = False
        for server in engine.servers:
            with contextlib.suppress(ServerLostError):  # what it had applied is lost too
                has_changed |= server.withdraw(closure)
        return has_changed

    return Board(queue_size, engine.max_failures, forget, withdraw, numbers)


class WorkerThreads:
    """Workers, each a thread that takes closures from one board.

    The threads hold the board and the engine, not their owner: when it is dropped,
    it closes the board and they end.

    Args:
      strategy: the workers' strategy; its board is opened.
      queue_size: the queue size of the board.

    Raises:
      ValueError: the strategy's board is already open.
    """

    def __init__(self, strategy: ServerStrategy, queue_size: int):
        self.board = _open_board(strategy, queue_size)
        self._engine = strategy.engine
        self._settings = settings_of_this_thread()
        self._numbers = itertools.count()
        self._threads: dict[int, threading.Thread] = {}
        self._choosing = threading.Lock()  # or two threads could remove one worker, or all
        _alive.add(self)

    def ids(self) -> list[int]:
        """Returns the ids of the current workers."""
        return [worker.number for worker in self.board.active_workers()]

    def add(self, count: int) -> list[int]:
        """Starts workers; returns their ids."""
        ids = list(itertools.islice(self._numbers, count))
        for number in ids:
            worker = Worker(number)
            thread = threading.Thread(
                target=work,
                args=(self.board, self._engine, worker, self._settings),
                name=f"distjax-worker-{number}",
                daemon=True,
            )
            thread.start()  # first: a worker left without a thread by a signal would be waited for
            self._threads[number] = thread
            self.board.workers[number] = worker
        return ids

    def describe_workers(self) -> list[dict[str, Any]]:
        """Returns the workers' entries in `stats`."""
        busy = set(self.board.running.values())
        return [
            {
                "id": worker.number,
                "pid": self._engine.pid_of(worker.number),
                "state": "running" if worker in busy else "idle",
                "closures": worker.num_closures,
                "restarts": worker.num_restarts,
            }
            for worker in self.board.active_workers()
        ]

    def remove(self, ids_or_n: int | Iterable[int]) -> None:
        """Ends workers after the closures they have in hand, and waits until they have ended.

        Args:
          ids_or_n: which workers, or how many, the latest first.

        Raises:
          ValueError: an unknown id, or no worker would be left.
        """
        with self._choosing:
            workers = [self.board.workers[number] for number in self._choose(ids_or_n)]
            self.board.remove(workers)
        self.board.waiters.wait_until(lambda: all(worker.has_ended for worker in workers))
        for worker in workers:
            del self.board.workers[worker.number]
            self._threads.pop(worker.number).join()

    def _choose(self, ids_or_n: int | Iterable[int]) -> list[int]:
        known = self.ids()
        if isinstance(ids_or_n, Iterable):
            ids = list(dict.fromkeys(ids_or_n))
        else:
            require_positive(ids_or_n, "remove_workers", "n", "coordinator.remove_workers(1)")
            ids = known[-ids_or_n:]
        if set(ids) < set(known):
            return ids
        raise ValueError(
            message(
                "remove_workers needs the ids of existing workers, and one worker to remain",
                got=f"{ids_or_n!r}, of the workers {known}",
                why="something has to run what is scheduled",
                fix=f"coordinator.remove_workers([{known[-1]}]), if there are others; "
                "coordinator.close() ends all",
            )
        )

    def wait(self, timeout: float | None = None) -> list[str]:
        """Waits until the threads have ended, after the board was closed.

        Returns, for each worker that has not ended by then, what it is doing. One that is drawing
        an element is not waited for again.
        """
        workers = list(self.board.workers.values())
        self.board.waiters.wait_until(lambda: all(w.has_ended for w in workers), timeout)
        running = {worker: closure for closure, worker in self.board.running.copy().items()}
        found: list[str] = []
        for worker in (w for w in workers if not w.has_ended):
            does = "draws an element for" if worker.is_drawing else "has in hand"
            found.append(f"worker {worker.number}, which {does} {running.get(worker, 'nothing')!s}")
            if worker.is_drawing:
                self.board.workers.pop(worker.number, None)
        return found


def require_positive(value: object, method: str, name: str, fix: str) -> None:
    """Raises a ValueError unless `value` is an int of 1 or more.

    Args:
      value: the argument.
      method: whose argument it is.
      name: the argument's name.
      fix: a call that is right.
    """
    why = "it is a number of workers or closures"
    require_int(f"{method}: {name}", value, 1, why=why, fix=fix)


def end_all(pid: int) -> None:
    """Ends all threads: calling JAX during interpreter shutdown would crash it.

    Args:
      pid: the process of the threads; a forked child has none.
    """
    live = list(_alive) if os.getpid() == pid else []
    for threads in live:
        threads.board.close()
    for threads in live:
        threads.wait(_EXIT_SECONDS)


atexit.register(end_all, os.getpid())
