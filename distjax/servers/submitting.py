"""Turns a call of a step into a closure; runs one for `strategy.run`."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from distjax.context.thread_settings import settings_of_this_thread
from distjax.errors import message
from distjax.placement.host_values import without_alias
from distjax.replica.call_checks import require_call
from distjax.servers.board import Board
from distjax.servers.closure import Call, Closure
from distjax.servers.crew import board_of
from distjax.servers.elements import DataEnded, PerWorkerSource, RemoteArray
from distjax.servers.per_worker import PerWorkerIterator, PerWorkerValues
from distjax.servers.remote_value import RemoteValue
from distjax.servers.strategy_contract import ServerStrategy
from distjax.servers.worker import Worker
from distjax.servers.working import finish, start
from distjax.typing import PyTree
from distjax.uninterrupted import UninterruptedCalls

_calls = UninterruptedCalls()  # for the main thread


def _cut(
    strategy: ServerStrategy,
    fn: Callable[..., Any],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree] | None,
    drawn: Mapping[PerWorkerSource, Any],
) -> Call:
    """Cuts a step for its arguments, with a worker's drawn values filled in.

    The arguments are the closure's own: `_take_over` has made them.
    """
    if drawn:
        own = lambda leaf: drawn[leaf] if _is_source(leaf) else leaf
        args, kwargs = jax.tree.map(own, (args, kwargs), is_leaf=_is_source)
    remote: dict[int, RemoteArray] = {}  # by the id of its stand-in
    stand_ins: list[np.ndarray] = []

    def stand_in(leaf: PyTree) -> Any:
        if not isinstance(leaf, RemoteArray):
            return leaf
        stand_ins.append(leaf.stand_in())
        remote[id(stand_ins[-1])] = leaf.astype(stand_ins[-1].dtype)
        return stand_ins[-1]

    args, kwargs = jax.tree.map(stand_in, (args, kwargs))
    plan, arrays = strategy.cut_step(fn, args, kwargs)
    strategy.engine.admit(plan)
    given = [remote.get(id(x), x) for x in arrays]
    num_found = sum(isinstance(x, RemoteArray) for x in given)
    assert num_found == len(remote), "a step would run on the zeros of a stand-in"
    return Call(plan, given)


def cut_call(
    board: Board,
    strategy: ServerStrategy,
    fn: Callable[..., Any],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree] | None,
    *,
    is_reported: bool = True,
) -> Closure:
    """Returns a closure for the board; errors of its trace are raised here.

    Args:
      board: the strategy's board.
      strategy: cuts the step.
      fn: the step.
      args: its positional arguments.
      kwargs: its keyword arguments.
      is_reported: whether `join` should raise its error too.

    Raises:
      ValueError: a RemoteValue among the arguments, or args that are not a tuple or list.
    """
    given = dict(kwargs) if isinstance(kwargs, Mapping) else kwargs
    args, kwargs = require_call(fn, args, given, "schedule")
    args, kwargs, sources = _take_over(args, kwargs)
    cut = functools.partial(_cut, strategy, fn, args, kwargs)
    if sources:
        _cut_first(board, fn, cut, sources)
    call = cut if sources else cut({})
    name = getattr(fn, "__name__", type(fn).__name__)
    return Closure(name, call, sources, is_reported=is_reported)


def _take_over(
    args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> tuple[tuple[PyTree, ...], dict[str, PyTree], tuple[PerWorkerSource, ...]]:
    """Returns arguments that the caller cannot change before a worker reads them; their sources."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    _require_no_remote_value(leaves)
    found = dict.fromkeys(filter(_is_source, leaves))
    own = {x: x.copy() if isinstance(x, PerWorkerValues) else x for x in found}
    taken = [own[x] if _is_source(x) else without_alias(x) for x in leaves]
    args, kwargs = jax.tree.unflatten(treedef, taken)
    return args, kwargs, tuple(own.values())


def _is_source(leaf: object) -> bool:
    return isinstance(leaf, (PerWorkerIterator, PerWorkerValues))


def _cut_first(
    board: Board,
    fn: Callable[..., Any],
    cut: Callable[[Mapping[PerWorkerSource, Any]], Call],
    sources: Sequence[PerWorkerSource],
) -> None:
    """Traces for the first available values, so that errors are raised now.

    Once for a function and its iterators: the next element may take a while.
    """
    iterators = [source for source in sources if isinstance(source, PerWorkerIterator)]
    seen = board.iterators_of.get(fn)
    if iterators and seen.issuperset(iterators):
        return
    for worker in board.active_workers():
        try:
            with board.pauses.drawing():
                values = {source: source.peek(worker.number) for source in sources}
        except DataEnded:
            continue
        cut(values)
        seen.update(iterators)
        return


def run_step(
    strategy: ServerStrategy,
    fn: Callable[..., Any],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree] | None,
) -> Any:
    """Runs a step as one closure, and returns its result: ``strategy.run``.

    The open coordinator's workers run it; without one, it runs here and now. Signals wait until
    that is over: one in the middle of a push would lose the server's values.
    """
    board = board_of(strategy)
    board.pauses.require_going("run")
    closure = cut_call(board, strategy, fn, args, kwargs, is_reported=False)
    if board.is_closed and closure.sources:
        raise RuntimeError(_no_workers(closure.sources[0]))
    if board.is_closed and threading.current_thread() is threading.main_thread():
        settings = settings_of_this_thread()
        _calls.complete(lambda: _put_and_run(board, strategy, closure, settings))
    else:
        _put_and_run(board, strategy, closure, contextlib.nullcontext)
    return RemoteValue(closure, board.waiters, board.pauses).get()


def _put_and_run(
    board: Board,
    strategy: ServerStrategy,
    closure: Closure,
    settings: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    """Puts a closure on a board, and runs it if nothing else does."""
    here = Worker(0)
    with settings():
        board.put(closure)
        while board.is_closed and board.claim(closure, here):
            ran = start(board, strategy.engine, here, closure)
            if ran is not None:
                finish(board, here, closure, ran)


def _no_workers(source: PerWorkerSource) -> str:
    return message(
        "run needs an open coordinator for per-worker data",
        got=f"{source!r} among the arguments, and no coordinator",
        why="each of its workers has its own values, and without one the step runs here",
        fix="with dj.Coordinator(strategy) as coordinator: coordinator.schedule(step, args=(...,))",
    )


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
