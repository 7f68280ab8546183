"""Crew: the threads of a coordinator's workers, and the board of each strategy."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import itertools
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from distjax.context.thread_settings import settings_of_this_thread
from distjax.errors import ServerLostError, message
from distjax.servers.board import Board
from distjax.servers.engine import Engine
from distjax.servers.options import require_positive
from distjax.servers.strategy_contract import ServerStrategy
from distjax.servers.worker import Worker
from distjax.servers.working import work

_EXIT_SECONDS = 60.0  # for running computations; one that hangs must not block the exit


@dataclasses.dataclass
class _Record:
    """The state kept for a strategy; numbers of closures are never reused."""

    numbers: Iterator[int]
    board: Board


_records: weakref.WeakKeyDictionary[ServerStrategy, _Record] = weakref.WeakKeyDictionary()
_opening = threading.Lock()  # held while a record is made or replaced
_crews: weakref.WeakSet[Crew] = weakref.WeakSet()


def board_of(strategy: ServerStrategy) -> Board:
    """Returns the board of the open coordinator, or a closed one without workers."""
    with _opening:
        if strategy not in _records:
            numbers = itertools.count()
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


def _make_board(engine: Engine, queue_size: int, numbers: Iterator[int]) -> Board:
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


class Crew:
    """Workers, each a thread that takes closures from one board.

    The threads hold the board and the engine, not the crew's owner: when the owner is dropped,
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
        _crews.add(self)

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


def end_all(pid: int) -> None:
    """Ends all threads: calling JAX during interpreter shutdown would crash it.

    Args:
      pid: the process of the threads; a forked child has none.
    """
    live = list(_crews) if os.getpid() == pid else []
    for crew in live:
        crew.board.close()
    for crew in live:
        crew.wait(_EXIT_SECONDS)


atexit.register(end_all, os.getpid())
