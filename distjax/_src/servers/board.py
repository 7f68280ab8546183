"""Board: the closures of a strategy, which workers run them, and who keeps them from beginning.

A closure is one call of a step. It is in the queue, running, or over. Workers take the oldest
first; a closure whose worker is lost goes back to the head of the queue. What has begun is run to
its end, by its worker or by another one, so no closure is ever applied in part: an error, a
cancellation and a restore of the servers drop only what has not begun.
"""

# One lock, held for a few lines and never while taking another lock or running user code. Threads
# wait on `waiters` for the board to change, without the lock; they are rung after it is released.
#
# A strategy has one board for its life. A coordinator opens it and closes it; while it is closed,
# `strategy.run` runs its closure on the caller's thread.

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import CancelledError
from typing import Any, Literal, NamedTuple

import jax

from distjax._src.context import ProgramModes, settings_of_this_thread
from distjax._src.interrupts import Waiters, interrupts
from distjax._src.program.functions import FunctionCache
from distjax._src.servers.engine import Engine, Ran, Running, Task, WorkerDied
from distjax._src.servers.per_worker import Argument, DataEnded, PerWorkerSource, draw_each
from distjax._src.servers.plan import StepPlan
from distjax.errors import (
    ClosureError,
    ContextError,
    EndOfDataError,
    ServerLostError,
    message,
    require,
)

# -- closures -----------------------------------------------------------------


#: The state of a closure; the last three are final, but a restore undoes what was done.
State = Literal["queued", "running", "done", "failed", "cancelled"]


class Call(NamedTuple):
    """A step with its flat arguments."""

    plan: StepPlan
    arrays: Sequence[Argument]


class Closure:
    """One call of a step. Its board changes it, under the board's lock.

    Attributes:
      number: counts the calls of `schedule`; assigned by a board.
      name: the name of the step, for error texts.
      state: its state.
      sources: the per-worker data that it has yet to draw from; `call` makes its call of that.
      attempts: the outcomes of failed attempts, in order.
      is_retried: whether it has lost a worker; servers may have pushes of it.
      error: the error that `fetch` raises.
      versions: of the servers; None until it is done.
      is_reported: whether `join` raises its error too.
      modes: sets a thread to the JAX modes in effect where it was scheduled.
    """

    def __init__(
        self,
        name: str,
        call: Call | Callable[[dict[PerWorkerSource, Any]], Call],
        sources: Sequence[PerWorkerSource] = (),
        *,
        is_reported: bool = True,
    ):
        self.number = -1
        self.name = name
        self.state: State = "queued"
        self.sources = tuple(sources)
        self.is_reported = is_reported
        self.modes = ProgramModes.of_this_thread()
        self.attempts: list[str] = []
        self.is_retried = False
        self.error: BaseException | None = None
        self.versions: tuple[int, ...] | None = None
        self._call: Call | Callable[[dict[PerWorkerSource, Any]], Call] | None = call
        self._outcome: tuple[StepPlan, tuple[jax.Array, ...]] | None = None

    def __repr__(self) -> str:
        return f"closure {self.number} ({self.name})"

    @property
    def is_over(self) -> bool:
        """Whether it is done, failed or cancelled."""
        return self.error is not None or self._outcome is not None

    def prepare(self, worker: int) -> PerWorkerSource | None:
        """Draws its elements, once: a second attempt has the same.

        Returns the first source that has no more, or None. If a source has no more, or raises,
        what was drawn from the others is given back.
        """
        make = self._call
        if isinstance(make, Call) or make is None:
            return None
        try:
            drawn = draw_each((source, worker) for source in self.sources)
        except DataEnded as error:
            return error.args[0]
        drawn = dict(zip(self.sources, drawn, strict=True))
        self.sources = ()
        self._call = make(drawn)
        return None

    def as_task(self) -> Task:
        """Returns the next attempt."""
        call = self._call
        assert isinstance(call, Call), "it has been prepared"
        return Task(self.number, call.plan, call.arrays)

    def end(self, state: State, ran: Ran | None, error: BaseException | None) -> None:
        """Records the outcome, and releases the arguments."""
        self.error, call = error, self._call
        self._call, self.sources = None, ()
        self._outcome = self.versions = None  # it had some if it is undone
        if ran is not None and isinstance(call, Call):
            self.versions = ran.versions
            self._outcome = (call.plan, ran.results)
        self.state = state

    def result(self) -> Any:
        """Returns the result of the step, or raises the reason why there is none."""
        if self.error is not None:
            raise self.error
        assert self._outcome is not None
        plan, results = self._outcome
        return plan.rebuild(results)


def _cancelled(reason: str) -> CancelledError:
    return CancelledError(
        message(
            "fetch needs a closure that was run",
            got="one that was cancelled",
            why=reason,
            fix="schedule it again",
        )
    )


def _given_up(closure: Closure) -> ClosureError:
    attempts = "; ".join(closure.attempts)
    return ClosureError(
        message(
            f"{closure!r} needs a worker that outlives it",
            got=f"{len(closure.attempts)} workers that did not: {attempts}",
            why="a closure that kills every worker would do so forever",
            fix="look for what it does to them (memory, a signal), then schedule it again",
        ),
        tuple(closure.attempts),
    )


def _end_of_data(closure: Closure) -> EndOfDataError:
    return EndOfDataError(
        message(
            f"{closure!r} needs an element of per-worker data",
            got="data that has ended on every worker",
            why="each element is used once in an iteration",
            fix="iterator = iter(dataset) begins the next one",
        )
    )


def _undone(closures: int) -> ServerLostError:
    return ServerLostError(
        message(
            "fetch needs a closure that the servers have",
            got="one that they do not, since they were restored",
            why=f"they went back to a snapshot of the first {closures} closures",
            fix="schedule it again, from what coordinator.restore() returned on",
        )
    )


# -- pauses -------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Pause:
    """A pause of the thread that makes it; until it is entered, the thread waits."""

    is_restore: bool
    is_entered: bool = False
    thread: int = dataclasses.field(default_factory=threading.get_ident)


# -- workers ------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Worker:
    """A worker of a coordinator, or of a `strategy.run` without one: then without a thread.

    `ended` are the data sources that have no more values for it.
    """

    number: int
    thread: threading.Thread | None = None
    num_closures: int = 0
    num_restarts: int = 0
    is_removed: bool = False
    has_ended: bool = False
    ended: weakref.WeakSet[PerWorkerSource] = dataclasses.field(default_factory=weakref.WeakSet)


class Board:
    """The closures and workers of a strategy.

    Attributes:
      engine: runs closures.
      waiters: rung when the board changes.
      pauses: those in which no closure begins; changed without the lock.
      drawing: the threads that draw elements: closures wait for these, and they may not wait for
        closures.
      running: the closures in hand, and their workers.
      is_closed: whether no coordinator is open.
      counts: how many closures had each outcome since it was opened.
      num_held: how many closures the servers have of the coordinator.
      iterators_of: the iterators for whose elements each step has been traced.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.waiters = Waiters()
        self.pauses: dict[Pause, None] = {}
        self.drawing: set[int] = set()
        self.queue: collections.deque[Closure] = collections.deque()
        self.running: dict[Closure, Worker] = {}
        self.is_closed = True
        self._lock = threading.Lock()
        self._next_number = 0  # of closures; servers know them by it, so none is used again
        self._errors: list[BaseException] = []
        self._begin_anew(1)

    def _begin_anew(self, queue_size: int) -> None:
        self.workers: dict[int, Worker] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        self.num_held = 0
        #: Those whose results may be asked for: how many closures the servers had before them.
        self._done = weakref.WeakKeyDictionary[Closure, int]()
        self.started = time.monotonic()
        self.iterators_of = FunctionCache(lambda resolve: weakref.WeakSet[object]())
        self._queue_size = queue_size
        self._worker_numbers = itertools.count()
        self._errors.clear()

    def open(self, queue_size: int) -> bool:
        """Opens it for a coordinator; returns False if another one has it."""
        with self._lock:
            if not self.is_closed:
                return False
            self._begin_anew(queue_size)
            self.is_closed = False
        _opened.add(self)
        return True

    # -- the user's side ------------------------------------------------------

    def put(self, closure: Closure, require_open: Callable[[], None] = lambda: None) -> bool:
        """Numbers and queues a closure, once there is room; returns False if no one would run it.

        `require_open` raises if nothing would run it; it is called again after each wait.
        """
        while True:
            # Ctrl-C waits: servers wait for every number that was taken to be over.
            with interrupts.held(), self._lock:
                require_open()
                if self.is_closed:
                    return False
                if self._has_room():
                    self._number(closure)
                    self.queue.append(closure)
                    break
            self.require_going("schedule with a full queue")
            self.waiters.wait_until(self._has_much_room)
            self.raise_error()
        if closure.sources:
            self.end_starved()
        self.waiters.ring()
        return True

    def run_alone(self, closure: Closure) -> bool:
        """Runs a closure on the calling thread, between two pauses; returns False if it is open.

        Ctrl-C waits until that is over: in the middle of a push it would lose the server's values.
        """
        here = Worker(0)
        while True:
            self.waiters.wait_until(lambda: not (self.is_closed and self.pauses))
            with interrupts.held():
                with self._lock:
                    if not self.is_closed:
                        return False
                    if self.pauses:
                        continue
                    self._number(closure)
                    self._begin(closure, here)
                while not closure.is_over:
                    running = self.start(closure, here)
                    if running is not None:
                        self.finish(closure, here, running)
                return True

    def raise_error(self) -> None:
        """Raises the first error, once, after all running closures have ended."""
        if not self._errors:
            return
        self.waiters.wait_until(lambda: not self.running)
        with self._lock:
            errors, self._errors = self._errors, []
        if errors:
            if errors[1:]:
                errors[0].add_note(f"{len(errors) - 1} more closures failed.")
            raise errors[0]

    def is_empty(self) -> bool:
        """Returns whether all closures are over."""
        return not self.queue and not self.running

    def cancel(self, reason: str) -> None:
        """Drops the closures that have not begun."""
        with self._lock:
            dropped = self._drop_queue(_cancelled(reason))
        self._announce(dropped)

    def undo(self, num_held: int, *, is_reported: bool) -> int:
        """Drops the queue, and revokes what was done after the first `num_held` closures.

        No closure is running. Returns a number below which all are over. Every data source is
        open to every worker again.
        """
        error = _undone(num_held)
        with self._lock:
            dropped = self._drop_queue(error)
            self._errors += [error] if is_reported else []
            for closure, position in self._done.items():
                if position >= num_held:
                    closure.end("failed", None, error)
            self.num_held = num_held
            for worker in self.workers.values():
                worker.ended.clear()
        self._announce(dropped)
        return self._next_number

    @contextlib.contextmanager
    def paused(self, *, is_restore: bool = False) -> Generator[None]:
        """A context in which no closure begins, nor any runs; the queue stays.

        Its block and the restores of other threads wait for each other.
        """
        if not is_restore:
            self.require_not_drawing("a pause of the workers")
        pause = Pause(is_restore)
        try:
            with self._lock:
                self.pauses[pause] = None
            while not pause.is_entered:
                self.waiters.wait_until(lambda: self._may_enter(pause))
                with self._lock:
                    pause.is_entered = self._may_enter(pause)
            yield
        finally:
            self.pauses.pop(pause, None)
            self.waiters.ring()

    @contextlib.contextmanager
    def draw(self) -> Generator[None]:
        """A context in which the calling thread draws elements for a closure."""
        thread = threading.get_ident()
        try:
            self.drawing.add(thread)
            yield
        finally:
            self.drawing.discard(thread)
            self.waiters.ring()

    def require_going(self, method: str) -> None:
        """Raises a ContextError if the calling thread keeps closures from running."""
        self.require_not_drawing(method)
        require(
            threading.get_ident() not in [p.thread for p in tuple(self.pauses)],
            f"{method} needs closures to run",
            got="a call in `with coordinator.paused():`, or in a function of `extended.update`",
            why="it waits for a closure, and none runs until that ends",
            fix="call it afterwards; until then read variables: v.value",
            error=ContextError,
        )

    def require_not_drawing(self, method: str) -> None:
        """Raises a ContextError if the calling thread draws an element for a closure."""
        require(
            threading.get_ident() not in self.drawing,
            f"{method} needs to be called outside of per-worker data",
            got="a call in the function or dataset of create_per_worker_dataset",
            why="a worker makes an element there for its closure, and both would wait for each "
            "other forever",
            fix="read variables there: v.value; or make the elements in your own loop: "
            "coordinator.schedule(step, args=(element,))",
            error=ContextError,
        )

    def close(self) -> None:
        """Ends the workers after the closures in hand. Takes no lock: see `Waiters`."""
        self.is_closed = True
        self.waiters.ring()

    # -- the coordinator's workers --------------------------------------------

    def active_workers(self) -> list[Worker]:
        """Returns the workers that take closures."""
        return [w for w in tuple(self.workers.values()) if not w.is_removed]

    def worker_ids(self) -> list[int]:
        """Returns their ids."""
        return [worker.number for worker in self.active_workers()]

    def add_workers(self, count: int) -> list[int]:
        """Starts workers, each a thread; returns their ids.

        The threads hold the board, not the coordinator: when it is dropped, it closes the board,
        and they end.
        """
        settings, ids = settings_of_this_thread(), list[int]()
        for number in itertools.islice(self._worker_numbers, count):
            worker = Worker(number)
            name = f"distjax-worker-{number}"
            args = self, worker, settings
            worker.thread = threading.Thread(target=work, args=args, name=name, daemon=True)
            with interrupts.held():  # a worker without a thread would be waited for
                self.workers[number] = worker
                worker.thread.start()
            ids.append(number)
        return ids

    def remove_workers(self, choose: Callable[[list[int]], Sequence[int]]) -> None:
        """Ends workers after the closures they have in hand, and waits until they have ended."""
        with self._lock:  # or two threads could remove one worker, or all
            workers = [self.workers[number] for number in choose(self.worker_ids())]
            for worker in workers:
                worker.is_removed = True
        self.end_starved()
        self.waiters.wait_until(lambda: all(worker.has_ended for worker in workers))
        for worker in workers:
            del self.workers[worker.number]
            if worker.thread is not None:
                worker.thread.join()

    def wait_for_workers(self, timeout: float | None = None) -> None:
        """Waits until the workers have ended, after the board was closed.

        Those that draw an element by then are not waited for again.
        """
        workers = list(self.workers.values())
        self.waiters.wait_until(lambda: all(w.has_ended for w in workers), timeout)
        for worker in workers:
            if worker.thread is not None and worker.thread.ident in self.drawing:
                self.workers.pop(worker.number, None)

    def describe_workers(self) -> list[dict[str, Any]]:
        """Returns the workers' entries in `stats`."""
        busy = set(self.running.values())
        return [
            {
                "id": worker.number,
                "pid": self.engine.pid_of(worker.number),
                "state": "running" if worker in busy else "idle",
                "closures": worker.num_closures,
                "restarts": worker.num_restarts,
            }
            for worker in self.active_workers()
        ]

    # -- the workers' side ----------------------------------------------------

    def take(self, worker: Worker, *, wait: bool) -> Closure | None:
        """Returns the next closure for a worker; None if there is none or it should end."""
        while True:
            with self._lock:
                closure = self._next_for(worker)
                if closure is not None:
                    self.queue.remove(closure)
                    self._begin(closure, worker)
            if closure is not None or not wait or self.is_to_end(worker):
                self.waiters.ring()
                return closure
            self.waiters.wait_until(lambda: self._next_for(worker) or self.is_to_end(worker))

    def start(self, closure: Closure, worker: Worker) -> Running | None:
        """Starts a closure without waiting for it; returns None if that has come to an end."""
        try:
            with closure.modes():
                with self.draw():
                    ended = closure.prepare(worker.number)
                if ended is None:
                    return self.engine.run(worker.number, closure.as_task())
            self._put_back(closure, worker, ended)
        except WorkerDied as death:
            self._retry(closure, worker, death)
        except BaseException as error:  # e.g. SystemExit: no one must wait forever
            self._fail(closure, error)
        return None

    def finish(self, closure: Closure, worker: Worker, running: Running) -> None:
        """Waits until a closure has been computed and applied."""
        try:
            ran = running.wait()
        except WorkerDied as death:
            self._retry(closure, worker, death)
        except BaseException as error:
            self._fail(closure, error)
        else:
            with self._lock:
                self._end(closure, "done", ran)
                self._done[closure] = self.num_held
                self.num_held += 1
                worker.num_closures += 1
            self._announce([closure])

    def is_to_end(self, worker: Worker) -> bool:
        """Returns whether a worker may take no more."""
        is_known = self.workers.get(worker.number) is worker  # else it is of a former opening
        return self.is_closed or worker.is_removed or not is_known

    # -- inside: the ends of an attempt ---------------------------------------

    def _put_back(self, closure: Closure, worker: Worker, ended: PerWorkerSource) -> None:
        """Returns a closure to the queue: the worker's share of some data has ended."""
        with self._lock:
            worker.ended.add(ended)
            self._put_first(closure)
        self.end_starved()

    def _retry(self, closure: Closure, worker: Worker, death: WorkerDied) -> None:
        """Requeues a closure whose worker was lost; after too many losses, fails it."""
        with self._lock:
            if death.has_begun:
                worker.num_restarts += 1
                reason = str(death) or "no reason"
                closure.attempts.append(f"worker {worker.number} was lost ({reason})")
            is_hopeless = len(closure.attempts) >= self.engine.max_failures
            if not is_hopeless:
                self.counts["retried"] += 1
                closure.is_retried = True
                if worker.thread is not None:  # else `run_alone` tries again
                    self._put_first(closure)
        if is_hopeless:
            self._fail(closure, _given_up(closure))
        self.waiters.ring()

    def _fail(self, closure: Closure, error: BaseException) -> None:
        """Records that a closure failed; a reported one cancels those that have not begun."""
        over = [closure]
        with self._lock:
            self._end(closure, "failed", error=error)
            if closure.is_reported:
                error.add_note(f"It was raised in {closure!r}.")
                self._errors.append(error)
                over += self._drop_queue(_cancelled(f"{closure!r} failed"))
        self._announce(over)

    # -- inside, under the lock -----------------------------------------------

    def _number(self, closure: Closure) -> None:
        closure.number = self._next_number
        self._next_number += 1
        self.counts["scheduled"] += 1

    def _next_for(self, worker: Worker) -> Closure | None:
        """Returns the first closure for which the worker has data."""
        if self.is_to_end(worker) and not self.is_closed:
            return None
        if self.is_closed or self.pauses:  # what has begun is run to its end
            return next((c for c in tuple(self.queue) if c.is_retried), None)
        if not worker.ended:
            return self.queue[0] if self.queue else None
        return next((c for c in tuple(self.queue) if worker.ended.isdisjoint(c.sources)), None)

    def _begin(self, closure: Closure, worker: Worker) -> None:
        self.running[closure] = worker
        closure.state = "running"

    def _put_first(self, closure: Closure) -> None:
        self.running.pop(closure, None)
        closure.state = "queued"
        self.queue.appendleft(closure)

    def _drop_queue(self, error: BaseException) -> list[Closure]:
        """Ends the closures that have not begun, with an error."""
        has_worker = not self.is_closed or any(not w.has_ended for w in self.workers.values())
        kept = [c for c in self.queue if c.is_retried and has_worker]
        dropped = [c for c in self.queue if c not in kept]
        self.queue = collections.deque(kept)
        for closure in dropped:
            self._end(closure, "cancelled", error=error)
        return dropped

    def _end(
        self,
        closure: Closure,
        state: State,
        ran: Ran | None = None,
        error: BaseException | None = None,
    ) -> None:
        self.running.pop(closure, None)
        closure.end(state, ran, error)
        self.counts[state] += 1

    # -- inside, without the lock ---------------------------------------------

    def _announce(self, over: Iterable[Closure]) -> None:
        for closure in over:
            for server in self.engine.servers:
                server.mark_done(closure.number)
        self.waiters.ring()

    def end_starved(self) -> None:
        """Ends closures that wait for data no worker has any more; rings."""
        with self._lock:
            workers = self.active_workers()
            is_starved = lambda c: all(not w.ended.isdisjoint(c.sources) for w in workers)
            starved = [c for c in self.queue if c.sources and is_starved(c)]
            for closure in starved:
                self.queue.remove(closure)
                self._end(closure, "cancelled", error=_end_of_data(closure))
        self._announce(starved)

    def _has_room(self) -> bool:
        return len(self.queue) < self._queue_size and not self._errors

    def _has_much_room(self) -> bool:
        """Requires half of the queue: with less, two threads would alternate at every closure."""
        return len(self.queue) <= self._queue_size // 2 or bool(self._errors) or self.is_closed

    def _may_enter(self, pause: Pause) -> bool:
        if self.running or any(c.is_retried for c in tuple(self.queue)):
            return False
        # A restore changes values: what others read in their pauses must not change meanwhile.
        others = [p for p in tuple(self.pauses) if p.is_entered and p.thread != pause.thread]
        return not any(p.is_restore or pause.is_restore for p in others)


# -- the loop of a worker's thread --------------------------------------------


def work(
    board: Board,
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
                is_there = _prepare(board.engine, worker, is_wanted)
                closure = board.take(worker, wait=before is None) if is_there else None
                if closure is None and before is None:
                    return
                running = None if closure is None else board.start(closure, worker)
                if before is not None:
                    board.finish(before[0], worker, before[1])
                before = None if closure is None or running is None else (closure, running)
                del closure, running  # else a result would live until the next closure arrives
    finally:
        try:
            board.engine.end_worker(worker.number)
        finally:  # else whoever waits for the worker would wait forever
            worker.has_ended = True
            if board.is_closed:  # what is queued, nobody takes; the last one leaves nothing
                board.cancel("its coordinator was closed, or dropped, before it had run")
            board.waiters.ring()


def _prepare(engine: Engine, worker: Worker, is_wanted: Callable[[], bool]) -> bool:
    """Returns whether a worker is to take a closure."""
    try:
        return engine.prepare(worker.number, is_wanted)
    except Exception:  # `run` raises it too; there it is a closure's, and reaches the user
        return True


_EXIT_SECONDS = 60.0  # for running computations; one that hangs must not block the exit
_opened: weakref.WeakSet[Board] = weakref.WeakSet()


def end_all(pid: int) -> None:
    """Ends all threads: calling JAX during interpreter shutdown would crash it."""
    boards = list(_opened) if os.getpid() == pid else []  # a forked child has none of the threads
    for board in boards:
        board.close()
    for board in boards:
        board.wait_for_workers(_EXIT_SECONDS)


atexit.register(end_all, os.getpid())
