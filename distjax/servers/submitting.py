"""From a call of a step to its closure on the board."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from distjax.context.thread_settings import settings_of_this_thread
from distjax.errors import message
from distjax.replica.arguments import require_call
from distjax.servers.board import Board, Worker
from distjax.servers.closure import Call, Closure
from distjax.servers.crew import board_of
from distjax.servers.per_worker import PerWorkerIterator, PerWorkerValues
from distjax.servers.remote_value import RemoteValue
from distjax.servers.strategy_contract import ServerStrategy
from distjax.servers.streams import DataEnded, Draw
from distjax.servers.working import finish, start
from distjax.typing import PyTree
from distjax.uninterrupted import UninterruptedCalls

_calls = UninterruptedCalls()  # of the main thread


@dataclasses.dataclass(frozen=True)
class _Cut:
    """Cuts a step for its arguments, once what workers draw is among them."""

    strategy: ServerStrategy
    fn: Callable[..., Any]
    args: Sequence[PyTree]
    kwargs: Mapping[str, PyTree] | None

    def __call__(self, drawn: Mapping[Draw, Any]) -> Call:
        args, kwargs = self.args, self.kwargs
        if drawn:
            own = lambda leaf: drawn[leaf] if _is_drawn(leaf) else leaf
            args, kwargs = jax.tree.map(own, (args, kwargs), is_leaf=_is_drawn)
        plan, arrays = self.strategy.cut_step(self.fn, args, kwargs)
        self.strategy.engine.admit(plan)
        # The caller may fill the same memory again before a worker has read it.
        return Call(plan, [np.array(x) if isinstance(x, np.ndarray) else x for x in arrays])


def cut_call(
    board: Board,
    strategy: ServerStrategy,
    fn: Callable[..., Any],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree] | None,
    *,
    is_reported: bool = True,
) -> Closure:
    """Returns a closure for the board; errors of its trace come here.

    Args:
      board: the strategy's.
      strategy: cuts the step.
      fn: the step.
      args: its positional arguments.
      kwargs: its keyword arguments.
      is_reported: whether an error is for `join` too.

    Raises:
      ValueError: a RemoteValue among the arguments, or no tuple of them.
    """
    args, kwargs = require_call(fn, args, _as_dict(kwargs), "schedule")
    leaves = jax.tree.leaves((args, kwargs))
    _require_no_remote_value(leaves)
    draws = tuple(dict.fromkeys(filter(_is_drawn, leaves)))
    cut = _Cut(strategy, fn, args, kwargs)
    if draws:
        _cut_early(cut, draws, [worker.number for worker in board.active_workers()])
    call = cut if draws else cut({})
    name = getattr(fn, "__name__", type(fn).__name__)
    return Closure(name, call, draws, is_reported=is_reported)


def _as_dict(kwargs: object) -> object:
    return dict(kwargs) if isinstance(kwargs, Mapping) else kwargs


def _is_drawn(leaf: object) -> bool:
    return isinstance(leaf, (PerWorkerIterator, PerWorkerValues))


def _cut_early(cut: _Cut, draws: Sequence[Draw], workers: Sequence[int]) -> None:
    """Traces for the first values that there are, so that errors come out now."""
    for worker in workers:
        try:
            values = {draw: draw.peek(worker) for draw in draws}
        except DataEnded:
            continue
        cut(values)
        return


def run_step(
    strategy: ServerStrategy,
    fn: Callable[..., Any],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree] | None,
) -> Any:
    """Runs a step as one closure, and returns its result: ``strategy.run``.

    By the workers of the open coordinator; without one, here and now. A signal waits until that
    is over: in the midst of a push the server's values would be lost.
    """
    board = board_of(strategy)
    board.require_going("run")
    closure = cut_call(board, strategy, fn, args, kwargs, is_reported=False)
    if board.is_closed and threading.current_thread() is threading.main_thread():
        settings = settings_of_this_thread()
        _calls.complete(lambda: _put_and_run(board, strategy, closure, settings))
    else:
        _put_and_run(board, strategy, closure, contextlib.nullcontext)
    return RemoteValue(closure, board.waiters).get()


def _put_and_run(
    board: Board,
    strategy: ServerStrategy,
    closure: Closure,
    settings: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    """Puts a closure on a board, and runs it where nobody else does."""
    here = Worker(0)
    with settings():
        board.put(closure)
        while board.is_closed and board.claim(closure):
            ran = start(board, strategy.engine, here, closure)
            if ran is not None:
                finish(board, here, closure, ran)


def _require_no_remote_value(leaves: Sequence[object]) -> None:
    found = next((leaf for leaf in leaves if isinstance(leaf, RemoteValue)), None)
    if found is None:
        return
    raise ValueError(
        message(
            "a step needs arguments that are there when it is scheduled",
            got=repr(found),
            why="its closure might come before the one that it waits for",
            fix="coordinator.schedule(step, args=(value.get(),))",
        )
    )
