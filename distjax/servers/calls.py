"""A call of a step: how it becomes a closure, and its result, which may not be available yet."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from distjax import jax_compat
from distjax.context import frames
from distjax.context.thread_settings import settings_of_this_thread
from distjax.errors import ContextError, message
from distjax.placement.transfer import without_alias
from distjax.replica.arguments import require_call
from distjax.servers.board import Board, Pauses, Worker
from distjax.servers.closure import Call, Closure
from distjax.servers.elements import DataEnded, PerWorkerSource, RemoteArray
from distjax.servers.engine import ServerStrategy
from distjax.servers.per_worker import PerWorkerIterator, PerWorkerValues, refuse_pickle
from distjax.servers.worker_threads import board_of, finish, start
from distjax.typing import PyTree
from distjax.uninterrupted import UninterruptedCalls, Waiters


class RemoteValue:
    """The result of a closure, once a worker has run it.

    Source: tf.distribute.experimental.coordinator.RemoteValue.

    Args:
      closure: the closure.
      waiters: rung when it is over.
      pauses: those in which it does not run.
    """

    def __init__(self, closure: Closure, waiters: Waiters, pauses: Pauses):
        self._closure = closure
        self._waiters = waiters
        self._pauses = pauses

    @property
    def version(self) -> tuple[int, ...]:
        """The version of each server: after its push, else as pulled.

        Waits as `get` does.
        """
        self._wait("version", None)
        if self._closure.versions is None:
            self._closure.result()  # raises
        assert self._closure.versions is not None
        return self._closure.versions

    def done(self) -> bool:
        """Returns whether `fetch` would return without waiting."""
        return self._closure.is_over

    def get(self) -> Any:
        """Waits as `fetch` does; returns the result as arrays on the worker's device."""
        self._wait("get", None)
        return self._closure.result()

    def fetch(self, timeout: float | None = None) -> Any:
        """Returns the step's result as numpy arrays.

        Args:
          timeout: maximum wait in seconds.

        Context: not in a replica function.

        Raises:
          ContextError: in a replica function; if it is not done, in ``with coordinator.paused()``
            or per-worker data.
          TimeoutError: it is not available by then.
          CancelledError: of `concurrent.futures`: the closure was cancelled.
          EndOfDataError: no worker has an element for it.
          ServerLostError: its pushes were lost with a server.
          Exception: the error of the closure.
        """
        self._wait("fetch", timeout)
        return to_numpy(self._closure.result())

    def _wait(self, method: str, timeout: float | None) -> None:
        require_outside_of_steps(method)
        if not self.done():
            self._pauses.require_going(method)
        if not self._waiters.wait_until(lambda: self._closure.is_over, timeout):
            raise TimeoutError(
                message(
                    f"{method} needs {self._closure!r} to end within {timeout} s",
                    got=f"one that is {self._closure.state.value}",
                    why="its worker has not got that far yet",
                    fix="wait longer; coordinator.stats() says what workers do",
                )
            )

    def __repr__(self) -> str:
        return f"RemoteValue({self._closure!r}, {self._closure.state.value})"

    def __reduce__(self) -> NoReturn:
        refuse_pickle(self, "pickle what it stands for: value.fetch()")


def require_outside_of_steps(method: str) -> None:
    """Raises a ContextError in a replica function.

    Args:
      method: the method that may not be called there.
    """
    if not frames.current().is_replica:
        return
    raise ContextError(
        message(
            f"{method} needs to be called outside of a replica function",
            got=f"a call in {frames.current().name}",
            why="a step is traced, and then runs at workers, which have no coordinator",
            fix="call it in the code that schedules the step; give the step values as arguments: "
            "args=(value.get(),)",
        )
    )


def to_numpy(tree: PyTree) -> Any:
    """Returns a tree with JAX arrays converted to numpy; PRNG keys stay as they are."""
    return jax.tree.map(_leaf_to_numpy, tree)


def _leaf_to_numpy(leaf: object) -> Any:
    if isinstance(leaf, jax.Array) and not jax_compat.is_key_dtype(leaf.dtype):
        return np.asarray(leaf)
    return leaf


# -- from a call to a closure -------------------------------------------------


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
    args, kwargs, sources = _take_over(board, args, kwargs)
    cut = functools.partial(_cut, strategy, fn, args, kwargs)
    if sources:
        _cut_first(board, fn, cut, sources)
    call = cut if sources else cut({})
    name = getattr(fn, "__name__", type(fn).__name__)
    return Closure(name, call, sources, is_reported=is_reported)


def _take_over(
    board: Board, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> tuple[tuple[PyTree, ...], dict[str, PyTree], tuple[PerWorkerSource, ...]]:
    """Returns arguments that the caller cannot change before a worker reads them; their sources."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    _require_no_remote_value(leaves)
    found = dict.fromkeys(filter(_is_source, leaves))
    if found and board.is_closed:
        raise RuntimeError(_no_workers(next(iter(found))))
    workers = [worker.number for worker in board.active_workers()]
    own = {x: x.copy_for(workers) if isinstance(x, PerWorkerValues) else x for x in found}
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
