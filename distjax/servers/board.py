"""Board: which closures are queued, which run, the outcomes of the others; and who pauses them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import CancelledError

from distjax.errors import ContextError, message
from distjax.program.functions import FunctionCache
from distjax.servers.closure import Closure, State, cancelled, cut_short, end_of_data, given_up
from distjax.servers.elements import PerWorkerSource
from distjax.servers.engine import Ran, WorkerDied
from distjax.uninterrupted import Waiters


@dataclasses.dataclass(eq=False)
class Worker:
    """A worker of a coordinator.

    Attributes:
      number: its id.
      num_closures: how many it has completed.
      num_restarts: how often it was lost.
      is_removed: whether it may take no more.
      has_ended: whether its thread has ended.
      is_drawing: whether it may be drawing elements for its closure.
      ended: the data sources that have no more values for it.
    """

    number: int
    num_closures: int = 0
    num_restarts: int = 0
    is_removed: bool = False
    has_ended: bool = False
    is_drawing: bool = False
    ended: weakref.WeakSet[PerWorkerSource] = dataclasses.field(default_factory=weakref.WeakSet)


@dataclasses.dataclass
class Numbers:
    """The numbers of closures: the next one."""

    next: int = 0


@dataclasses.dataclass(eq=False)
class Pause:
    """A pause of the thread that makes it.

    Attributes:
      is_restore: whether it is for a restore of the servers.
      is_entered: whether its block runs; until then it waits.
      thread: the thread.
    """

    is_restore: bool
    is_entered: bool = False
    thread: int = dataclasses.field(default_factory=threading.get_ident)


class Pauses:
    """The pauses of a board; true while there is one. It takes no lock.

    It also knows who draws an element: closures wait for it, and it may not wait for them.
    """

    def __init__(self) -> None:
        self._pauses: dict[Pause, None] = {}
        self._drawing: set[int] = set()  # threads

    def __bool__(self) -> bool:
        return bool(self._pauses)

    def begin(self, pause: Pause) -> None:
        """Records a pause."""
        self._pauses[pause] = None

    def end(self, pause: Pause) -> None:
        """Records that a pause is over, if it had begun."""
        self._pauses.pop(pause, None)

    def is_free(self, pause: Pause) -> bool:
        """Returns whether no other thread is in a block that excludes that of a pause.

        A restore changes values: what others read in their pauses must not change meanwhile, unless
        they wait there for a restore of their own, which would wait for this one forever.
        """
        pauses = tuple(self._pauses)
        waiting = {p.thread for p in pauses if p.is_restore and not p.is_entered}
        others = [p for p in pauses if p.is_entered and p.thread not in {pause.thread, *waiting}]
        return not any(p.is_restore or pause.is_restore for p in others)

    @contextlib.contextmanager
    def drawing(self) -> Generator[None]:
        """A context in which the calling thread draws elements for a closure."""
        thread = threading.get_ident()
        try:
            self._drawing.add(thread)
            yield
        finally:
            self._drawing.discard(thread)

    def require_going(self, method: str) -> None:
        """Raises a ContextError if the calling thread keeps closures from running.

        Args:
          method: the caller, which would wait for closures forever.
        """
        self.require_not_drawing(method)
        if threading.get_ident() not in [p.thread for p in tuple(self._pauses)]:
            return
        raise ContextError(
            message(
                f"{method} needs closures to run",
                got="a call in `with coordinator.paused():`, or in a function of `extended.update`",
                why="it waits for a closure, and none runs until that ends",
                fix="call it afterwards; until then read variables: v.value",
            )
        )

    def require_not_drawing(self, method: str) -> None:
        """Raises a ContextError if the calling thread draws an element for a closure.

        Args:
          method: the caller, which would wait for closures, or for the same data.
        """
        if threading.get_ident() not in self._drawing:
            return
        raise ContextError(
            message(
                f"{method} needs to be called outside of per-worker data",
                got="a call in the function or dataset of create_per_worker_dataset",
                why="a worker makes an element there for its closure, and both would wait for each "
                "other forever",
                fix="read variables there: v.value; or make the elements in your own loop: "
                "coordinator.schedule(step, args=(element,))",
            )
        )


# One lock, held for a few lines and never while taking another lock or running user code. Threads
# wait on `waiters` for the board to change, without the lock; they are rung after it is released.
#
# A closure is in the queue, in `running`, or over. Workers take the oldest first; a closure whose
# worker is lost goes back to the head of the queue. Whatever comes first ends it: its result, an
# error, a cancellation, the loss of a server. Later events find it over.


class Board:
    """The closures of a coordinator.

    Args:
      queue_size: how many closures may be queued.
      max_failures: how many workers may be lost in one closure before it fails.
      forget: called with the number of each closure that is over.
      withdraw: has servers reject a closure; returns whether it has changed a value of theirs.
      numbers: of the closures; shared with the other boards of the strategy.
    """

    def __init__(
        self,
        queue_size: int,
        max_failures: int,
        forget: Callable[[int], None],
        withdraw: Callable[[int], bool],
        numbers: Numbers,
    ):
        self.waiters = Waiters()
        self.queue: collections.deque[Closure] = collections.deque()
        self.running: dict[Closure, Worker] = {}
        self.workers: dict[int, Worker] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        self._numbers = numbers
        self.num_held = 0  # the number of closures whose pushes the servers have
        self.is_closed = False
        self.started = time.monotonic()
        self._queue_size = queue_size
        self._max_failures = max_failures
        self._forget, self._withdraw = forget, withdraw
        self._retried: dict[Closure, None] = {}  # queued closures whose workers were lost
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []
        self._done: weakref.WeakSet[Closure] = weakref.WeakSet()  # results may be requested
        self.pauses = Pauses()
        # The iterators for whose elements each step has been traced.
        self.iterators_of = FunctionCache(lambda resolve: weakref.WeakSet[object]())

    # -- the user's side ------------------------------------------------------

    def put(self, closure: Closure, require_open: Callable[[], None] = lambda: None) -> None:
        """Numbers and queues a closure; waits for room.

        Args:
          closure: a new one.
          require_open: raises if nothing would run it; called again after each wait.

        Raises:
          ContextError: it would wait in a pause of the calling thread, which makes no room.
        """
        while True:
            with self._lock:
                require_open()
                if self._has_room():
                    self._queue_new(closure)
                    break
            self.pauses.require_going("schedule with a full queue")
            self.waiters.wait_until(self._has_much_room)
            self.raise_error()
        if closure.sources:
            self.end_starved()
        self.waiters.ring()

    def _queue_new(self, closure: Closure) -> None:
        closure.number = self._numbers.next
        try:
            self._numbers.next += 1
            self.queue.append(closure)
        except BaseException:  # a signal: servers wait for every number that was taken to be over
            if closure not in self.queue and self._numbers.next > closure.number:
                self._forget(closure.number)
            raise
        self.counts["scheduled"] += 1

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
        """Drops the queue; running closures end before their next push."""
        with self._lock:
            dropped = self._drop_queue(reason)
        self._announce(dropped)

    def undo(self, num_held: int, error: BaseException) -> int:
        """Ends all closures, and revokes those after the first `num_held`, with `error`.

        The error is raised once. Returns a number below which all closures are over. None of
        them draws elements any more, and every data source is open to every worker again.
        """
        with self._lock:
            pending = [*self.queue, *self.running]
            self.queue.clear()
            over = [c for c in pending if self._end(c, State.FAILED, error=error)]
            if over:
                self._errors.append(error)
            for closure in self._done:
                if closure.position is not None and closure.position >= num_held:
                    closure.undo(error)
            self.num_held = num_held
            self._numbers.next += 1  # no closure gets this number
            num_over = self._numbers.next
            for worker in self.workers.values():
                worker.ended.clear()
        self._announce(over)
        self.waiters.wait_until(lambda: not any(w.is_drawing for w in self.active_workers()))
        return num_over

    @contextlib.contextmanager
    def paused(self, *, is_restore: bool = False) -> Generator[None]:
        """A context in which no closure begins, nor any runs; the queue stays.

        Its block and the restores of other threads wait for each other.

        Args:
          is_restore: whether it is for a restore, which ends the closures that run itself.
        """
        if not is_restore:
            self.pauses.require_not_drawing("a pause of the workers")
        pause = Pause(is_restore)
        try:
            with self._lock:
                self.pauses.begin(pause)
            while not pause.is_entered:
                self.waiters.wait_until(lambda: self._may_enter(pause))
                with self._lock:
                    pause.is_entered = self._may_enter(pause)
            yield
        finally:
            self.pauses.end(pause)
            self.waiters.ring()

    def close(self) -> None:
        """Ends the workers after the closures in hand. Takes no lock: see `Waiters`."""
        self.is_closed = True
        self.waiters.ring()

    def active_workers(self) -> list[Worker]:
        """Returns the workers that take closures."""
        return [w for w in tuple(self.workers.values()) if not w.is_removed]

    def remove(self, workers: Sequence[Worker]) -> None:
        """Tells workers to end."""
        for worker in workers:
            worker.is_removed = True
        self.end_starved()

    # -- the workers' side ----------------------------------------------------

    def take(self, worker: Worker, *, wait: bool) -> Closure | None:
        """Returns the next closure for a worker; None if there is none or it should end."""
        while True:
            with self._lock:
                closure = self._next_for(worker)
                if closure is not None:
                    self._begin(closure, worker)
                    worker.is_drawing = bool(closure.sources)
            if closure is not None or not wait or self.is_to_end(worker):
                self.waiters.ring()
                return closure
            self.waiters.wait_until(lambda: self._next_for(worker) or self.is_to_end(worker))

    def claim(self, closure: Closure, worker: Worker) -> bool:
        """Takes a certain closure off the queue for a worker; returns False if it is not there.

        Waits until the board is not paused, as workers do.
        """
        while True:
            with self._lock:
                if closure.state is not State.QUEUED:
                    return False
                if self._may_begin(closure):
                    self._begin(closure, worker)
                    break
            self.waiters.wait_until(
                lambda: closure.state is not State.QUEUED or self._may_begin(closure)
            )
        self.waiters.ring()
        return True

    def end_drawing(self, worker: Worker) -> None:
        """Records that a worker no longer draws elements for its closure."""
        if worker.is_drawing:
            worker.is_drawing = False
            self.waiters.ring()

    def put_back(self, closure: Closure, worker: Worker, ended: PerWorkerSource) -> None:
        """Returns a closure to the queue: the worker's share of some data has ended."""
        with self._lock:
            if not closure.is_over:  # or a restore has put the data back meanwhile
                worker.ended.add(ended)
            self._put_first(closure)
        self.end_starved()

    def retry(self, closure: Closure, worker: Worker, death: WorkerDied) -> None:
        """Requeues a closure whose worker was lost; after too many losses, fails it."""
        with self._lock:
            if death.has_begun:
                worker.num_restarts += 1
                reason = str(death) or "no reason"
                closure.attempts.append(f"worker {worker.number} was lost ({reason})")
            reason = closure.stop
            if reason is None and len(closure.attempts) >= self._max_failures:
                reason = given_up(closure)
            if reason is None and not closure.is_over:
                self.counts["retried"] += 1
                self._put_first(closure)
                self._retried[closure] = None
        if reason is not None:
            self.end(closure, reason)
        self.waiters.ring()

    def finish(self, closure: Closure, worker: Worker, ran: Ran) -> None:
        """Records the result of a closure."""
        with self._lock:
            is_done = self._end(closure, State.DONE, ran)
            if is_done:
                closure.position = self.num_held
                self.num_held += 1
                self._done.add(closure)
                worker.num_closures += 1
        self._announce([closure] if is_done else [])

    def end(self, closure: Closure, error: BaseException) -> None:
        """Records that a closure failed or was stopped; a reported one cancels the rest."""
        over: list[Closure] = []
        state = State.FAILED
        if isinstance(error, CancelledError):
            state, error = State.CANCELLED, self._take_back(closure, error)
        with self._lock:
            if self._end(closure, state, error=error):
                over.append(closure)
                if state is State.FAILED and closure.is_reported:
                    error.add_note(f"It was raised in {closure!r}.")
                    self._errors.append(error)
                    over += self._drop_queue(f"{closure!r} failed")
        self._announce(over)

    # -- inside, under the lock -----------------------------------------------

    def _next_for(self, worker: Worker) -> Closure | None:
        """Returns the first closure for which the worker has data."""
        if worker.is_removed:
            return None
        if self.is_closed:  # those that `_drop_queue` has kept are still to be ended
            return next((c for c in tuple(self.queue) if c.stop is not None), None)
        if self.pauses:
            return next(iter(tuple(self._retried)), None)
        if not worker.ended:
            return self.queue[0] if self.queue else None
        return next((c for c in tuple(self.queue) if worker.ended.isdisjoint(c.sources)), None)

    def _may_begin(self, closure: Closure) -> bool:
        """A pause is for those that have not begun: a retried one may be partly applied."""
        return not self.pauses or closure in self._retried

    def _begin(self, closure: Closure, worker: Worker) -> None:
        self.queue.remove(closure)
        self._retried.pop(closure, None)
        self.running[closure] = worker
        closure.state = State.RUNNING

    def _put_first(self, closure: Closure) -> None:
        self.running.pop(closure, None)
        if not closure.is_over:
            closure.state = State.QUEUED
            self.queue.appendleft(closure)

    def _drop_queue(self, reason: str) -> list[Closure]:
        # A worker ends those that have drawn, or whose pushes servers may have, as it takes them.
        has_worker = not self.is_closed and bool(self.active_workers())
        is_begun = lambda c: c.drawn or (c in self._retried and not c.sources)
        kept = [c for c in self.queue if has_worker and is_begun(c)]
        queued, stop = [c for c in self.queue if c not in kept], cancelled(reason)
        self.queue = collections.deque(kept)
        for closure in (*self.running, *kept):
            closure.stop = closure.stop or stop
        return [c for c in queued if self._end(c, State.CANCELLED, error=stop)]

    def _end(
        self,
        closure: Closure,
        state: State,
        ran: Ran | None = None,
        error: BaseException | None = None,
    ) -> bool:
        self.running.pop(closure, None)
        self._retried.pop(closure, None)
        if closure.is_over:
            return False
        closure.end(state, ran, error)
        self.counts[state.value] += 1
        return True

    # -- inside, without the lock ---------------------------------------------

    def _take_back(self, closure: Closure, error: CancelledError) -> CancelledError:
        """Gives back what a stopped closure has drawn, if no server has a push of it.

        Returns the closure's error.
        """
        with self._lock:
            worker = self.running.get(closure)
            if worker is None:  # a restore has ended it, and puts its data back
                return error
            worker.is_drawing = True  # a restore waits
        try:
            if self._withdraw(closure.number):
                return cut_short(closure, error)
            sources = set(closure.drawn)
            closure.give_back()
            with self._lock:
                for each in self.workers.values():
                    each.ended.difference_update(sources)
            return error
        finally:
            self.end_drawing(worker)

    def _announce(self, over: Iterable[Closure]) -> None:
        for closure in over:
            self._forget(closure.number)
        self.waiters.ring()

    def end_starved(self) -> None:
        """Ends closures that wait for data no worker has any more; rings."""
        with self._lock:
            workers = self.active_workers()
            is_starved = lambda c: all(not w.ended.isdisjoint(c.sources) for w in workers)
            starved = [c for c in self.queue if c.sources and is_starved(c)]
            for closure in starved:
                self.queue.remove(closure)
                self._end(closure, State.CANCELLED, error=end_of_data(closure))
        self._announce(starved)

    def _has_room(self) -> bool:
        return len(self.queue) < self._queue_size and not self._errors

    def _has_much_room(self) -> bool:
        """Requires half of the queue: with less, two threads would alternate at every closure."""
        return len(self.queue) <= self._queue_size // 2 or bool(self._errors)

    def _may_enter(self, pause: Pause) -> bool:
        is_quiet = not self.running and not self._retried
        return (is_quiet or pause.is_restore) and self.pauses.is_free(pause)

    def is_to_end(self, worker: Worker) -> bool:
        """Returns whether a worker may take no more."""
        return self.is_closed or worker.is_removed
