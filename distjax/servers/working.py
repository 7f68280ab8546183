"""The loop of a worker's thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from distjax.servers.board import Board
from distjax.servers.closure import Closure
from distjax.servers.engine import Engine, Running, WorkerDied
from distjax.servers.outcomes import explain
from distjax.servers.worker import Worker


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
