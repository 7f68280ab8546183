"""DistributedIterator: yields elements on the devices, one after the other.

The reader makes elements, here or on a background thread. What the thread has prepared waits in a
queue, and goes back to the reader, `ahead` of all else, when the loop asks for another number of
steps. Calls take turns by one lock. The position is the reader's, behind what was delivered last:
elements that wait do not count.

Ctrl-C waits only while elements change places, which takes microseconds; it ends every wait. What
a call has taken when it raises may be lost; the position never counts what is still to come.
"""

from __future__ import annotations

import atexit
import collections
import dataclasses
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, Protocol

from distjax._src import hooks, jax_compat
from distjax._src.context import frames, settings_of_this_thread
from distjax._src.data.elements import HostTree
from distjax._src.data.input_layout import Block, InputLayout, Steps
from distjax._src.data.options import InputOptions, Partial
from distjax._src.data.reader import Position, Reader, require_position_of
from distjax._src.interrupts import Waiters, interrupts
from distjax.errors import ContextError, message, require_int

#: The prefix of the threads' names.
THREAD_NAME = "distjax-prefetch"

_EXIT_SECONDS = 5.0  # how long the program's exit waits for sources that hang

_thread_numbers = itertools.count()
_live: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


class Together(Protocol):
    """The processes that read one dataset together, and compare what they read.

    They do where the loop takes elements, not on the threads that read ahead, each of which is at
    a position of its own.
    """

    @property
    def process(self) -> list[int] | None:
        """This process's number and how many there are, if each reads data of its own."""
        ...

    def waiting(self) -> AbstractContextManager[None]:
        """Returns a context in which this process waits for its data."""
        ...

    def reset(self) -> None:
        """Forgets what was read: the iterator goes to another position."""
        ...

    def describe(self, block: Block) -> Any:
        """Returns what is compared of elements, on the thread that has read them."""
        ...

    def agree(self, block: Block | None, own: object, steps: int | None) -> HostTree | None:
        """Returns elements to take in place of this process's own; None: these.

        `own` is what `describe` returned; or with what this process's data has ended, if `block` is
        None. StopIteration: other processes have no more data, and all stop there.
        """
        ...


def _together_of(layout: InputLayout, partial: Partial) -> Together | None:
    """Returns the processes that read with this one; None: it reads alone."""
    joined = (join(layout, partial) for join in hooks.readers)
    return next((together for together in joined if together is not None), None)


class DistributedIterator:
    """Iterates over the elements of a `DistributedDataset`, once.

    `next(iterator)` and `iterator.get_next()` return one element, `take` several steps at once;
    they can be mixed. The background thread starts with the first call and stops at the end of the
    data, on `close`, or when the iterator is dropped. Several threads may share one iterator: each
    element goes to one of them.

    Source: tf.distribute.DistributedIterator; tf.distribute.StrategyExtended, an iterator with
      locality T (TF 1.12, 1.13).
    """

    def __init__(self, reader: Reader, layout: InputLayout, options: InputOptions):
        self._reader, self._layout = reader, layout
        self._num_ahead = options.prefetch
        self._together = _together_of(layout, options.partial)
        self._prefetcher: Prefetcher | None = None
        self._lock = threading.RLock()  # `close` must not wait for it: the source may call it

    def __iter__(self) -> DistributedIterator:
        return self

    def __repr__(self) -> str:
        delivered, num_replicas = self._reader.position.delivered, self._layout.num_replicas
        return f"DistributedIterator(delivered={delivered}, num_replicas={num_replicas})"

    @property
    def is_closed(self) -> bool:
        """Whether it gives no more elements."""
        return self._reader.is_closed

    def __reduce__(self) -> NoReturn:  # of copies too, which would read one source in turn
        raise TypeError(
            message(
                "an iterator over a dataset needs to stay one object",
                got="copy.copy, copy.deepcopy or pickle of it",
                why="its source is read once, and each element goes to one loop",
                fix="iter(dataset) for another loop; to go on from here: "
                "iterator.set_state(former.get_state())",
            )
        )

    def __next__(self) -> Any:
        return self._give(None, "next(iterator)")

    def get_next(self) -> Any:
        """Returns the next element: ``next(iterator)``.

        Locality: T out; a bare array if R is 1. Context: not in a replica function
          or any other traced one. Errors of the source propagate with their
          traceback.

        Raises:
          StopIteration: the data has ended.
          ContextError: in a traced function.
        """
        return self._give(None, "next(iterator)")

    def take(self, num_steps: int) -> Steps:
        """Returns up to `num_steps` elements, stacked and moved in one transfer.

        Returns fewer before the end of the data, an error of the source, or an
        element of another shape; call again for the rest. With prefetch, the next
        `num_steps` are moved while these are in use.

        Args:
          num_steps: K, 1 or more.

        Locality: T out, arrays [K, R, B, ...]. Context: as for `get_next`.

        Raises:
          StopIteration: the data has ended.
          ValueError: num_steps < 1.

        Example:
          >>> strategy = dj.VirtualStrategy(2)
          >>> iterator = iter(strategy.distribute_dataset([np.arange(4.0)] * 5))
          >>> steps = iterator.take(3)
          >>> steps.num_steps, steps.arrays.shape
          (3, (3, 2, 2))
          >>> def body(total, arrays):
          ...     return total + strategy.reduce("sum", steps.as_element(arrays), axis=0), None
          >>> dj.jit(lambda xs: dj.lax.scan(body, 0.0, xs)[0])(steps.arrays)
          Array(18., dtype=float32)
          >>> iterator.take(3).num_steps
          2

        Source: tf.distribute.StrategyExtended.experimental_run_steps_on_iterator
          (TF 1.13).
        """
        num_steps = require_int(
            "take: num_steps",
            num_steps,
            1,
            why="it is the leading dimension of what comes back",
            fix="iterator.take(100)",
        )
        return self._give(num_steps, "iterator.take")

    # -- saving and resuming --------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """Returns the loop's position: after the last element delivered.

        Prefetched elements do not count. A dict of ints: "delivered" (elements
        returned), "consumed" (elements of the dataset used for them), "full_size"
        (of the first batch), "checksum" (of the last element used), "epoch" (if the
        dataset has ``set_epoch``); plus "source", the state of the dataset's own iterator
        if it has ``get_state`` and ``set_state``, as grain's do, and "before", where that
        was before the last element. If each process of a job reads its own data, "process"
        is this process's number and the total.

        Example:
          >>> batches = [np.full(2, i) for i in range(4)]
          >>> dataset = dj.VirtualStrategy(2).distribute_dataset(batches)
          >>> iterator = iter(dataset)
          >>> _ = next(iterator), next(iterator)
          >>> iterator.get_state()
          {'delivered': 2, 'consumed': 2, 'full_size': 2, 'checksum': 2856927764}
          >>> resumed = iter(dataset)
          >>> resumed.set_state(iterator.get_state())
          >>> next(resumed).stacked.tolist()
          [[2], [2]]
        """
        state, process = self._reader.position.to_state(), self._process
        return state if process is None else {**state, "process": process}

    @property
    def _process(self) -> list[int] | None:
        return None if self._together is None else self._together.process

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Moves to the position just after the element that had `state`.

        Iterates the dataset again, in the epoch of the state, and skips what came before; or
        restores the state of the dataset's own iterator, of which only the last element taken
        is read again.

        Raises:
          ValueError: not a state; a dataset that is too short, cannot be iterated
            again, or gives another element now as the last one taken; or the state of
            another process, if each reads its own data.
        """
        require_position_of(self._process, state)
        position = Position.from_state(state)
        with self._lock:
            self._stop_reading()
            self._reader = self._reader.moved(position)
            if self._together is not None:
                self._together.reset()

    def stop_reading(self) -> None:
        """Stops reading ahead until the next call, which delivers what was read already."""
        with self._lock:
            self._stop_reading()

    def close(self) -> None:
        """Stops the background thread and releases the source.

        Waits for the source to return the element in progress. From here on `next`
        raises StopIteration.
        """
        self._reader.is_closed = True
        self._stop_reading()
        self._reader.release()
        self._reader.ahead.clear()

    # -- inside ---------------------------------------------------------------

    def _give(self, steps: int | None, method: str) -> Any:
        """Returns the next element, or steps; raises the error that stands in its place."""
        require_untraced(method)
        together = self._together
        with nullcontext() if together is None else together.waiting():
            item = self._take(steps)
        agreed = None if together is None else self._agree(together, item, steps)
        if agreed is not None:
            return _as_result(agreed, self._layout, steps)
        if isinstance(item, Chunk):
            return item.result
        try:
            raise item
        finally:
            del item  # else error, traceback and this frame form a cycle

    def _take(self, steps: int | None) -> Chunk | BaseException:
        """Returns this process's next item; the last one is an error, or StopIteration."""
        with self._lock:
            reader = self._reader
            if reader.is_closed:
                return StopIteration()
            item = self._prefetched(steps) if self._num_ahead else self._maker(steps)()
            if isinstance(item, Chunk):
                reader.position = item.block.positions[-1]
            elif not reader.is_closed:
                self.close()
            return item

    def _maker(self, steps: int | None) -> _Make:
        """Returns what makes items, which does not refer to this iterator."""
        reader, layout, together = self._reader, self._layout, self._together
        return lambda: make_chunk(reader, layout, together, steps)

    def _prefetched(self, steps: int | None) -> Chunk | BaseException:
        running = self._prefetcher
        if running is None or running.is_stopped or running.steps != steps:
            self._stop_reading()
            depth = max(1, self._num_ahead // (steps or 1))
            with interrupts.held():
                running = self._prefetcher = Prefetcher(self._maker(steps), steps, depth, self)
        return running.next()

    def _stop_reading(self) -> None:
        """Ends the thread, and gives what it has prepared back to the reader."""
        running = self._prefetcher
        if running is None:
            return
        running.stop()
        running.join()  # a Ctrl-C that ends this wait leaves all as it is: the next call waits
        with interrupts.held():
            self._prefetcher = None
            for item in reversed(running.items):
                ahead = item.block.elements if isinstance(item, Chunk) else [item]
                self._reader.ahead.extendleft(reversed(ahead))

    def _agree(
        self, together: Together, item: Chunk | BaseException, steps: int | None
    ) -> HostTree | None:
        """Returns what is delivered in place of an item after all have compared theirs, or None."""
        block = item.block if isinstance(item, Chunk) else None
        own = item.report if isinstance(item, Chunk) else item
        assert own is not None, "described, as others read with this process"
        try:
            tree = together.agree(block, own, steps)
        except StopIteration:  # the data of others has ended
            self.close()
            raise
        if tree is not None and block is not None and len(tree.leaves[0]) < len(block):
            # Others may have fewer because their data has ended, or changes its shape.
            count = len(tree.leaves[0])
            with self._lock:
                self._stop_reading()
                with interrupts.held():
                    self._reader.ahead.extendleft(reversed(block.elements[count:]))
                    self._reader.position = block.positions[count - 1]
        return tree


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What one call of the iterator returns: one element, or several as `Steps`.

    `report` is what the processes that read together compare.
    """

    block: Block
    result: Any
    report: Any


_Make = Callable[[], Chunk | BaseException]


def make_chunk(
    reader: Reader, layout: InputLayout, together: Together | None, steps: int | None
) -> Chunk | BaseException:
    """Returns the next element, or up to `steps` of them stacked; or the error in its place.

    There are fewer if the next element has another shape, or the data ends.
    """
    try:
        allocate = layout.allocate if layout.copies or steps is not None else None
        block = _read_block(reader, Block(reader.read(), steps or 1, allocate))
        report = None if together is None else together.describe(block)
        return Chunk(block, _as_result(block.tree, layout, steps), report)
    except Exception as error:  # re-raised in the loop
        return error


def _read_block(reader: Reader, block: Block) -> Block:
    while not block.is_full:
        try:
            element = reader.read()
        except Exception as error:  # it comes after the elements before it
            reader.ahead.append(error)
            break
        if not block.add(element):
            # The source may refill its memory before this one is taken.
            reader.ahead.appendleft(element.copy())
            break
    return block


def _as_result(tree: HostTree, layout: InputLayout, steps: int | None) -> Any:
    """Returns elements, leaves [k, R, B, ...], as delivered: k steps, or one element."""
    if steps is None:
        return layout.to_element(HostTree(tree.treedef, [leaf[0] for leaf in tree.leaves]))
    return Steps(len(tree.leaves[0]), layout.to_steps(tree), layout)


class Prefetcher:
    """Makes up to `depth` items ahead on its own thread, which it starts.

    The thread inherits the context (strategies, 64-bit mode, default device) of the thread that
    makes the Prefetcher, and holds no reference to its owner: it ends when that is dropped. Only
    one thread at a time may take `items`, of which the last may be an error. An item has `steps`
    steps; None: it is a single element.
    """

    def __init__(self, make: _Make, steps: int | None, depth: int, owner: object):
        self._make, self.steps, self._depth = make, steps, depth
        self.items: collections.deque[Chunk | BaseException] = collections.deque()
        self.is_stopped = self._has_ended = False
        self._waiters = Waiters()
        self._settings = settings_of_this_thread()
        name = f"{THREAD_NAME}-{next(_thread_numbers)}"
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._when_dropped = weakref.finalize(owner, self.stop)
        _live.add(self)
        self._thread.start()

    def next(self) -> Chunk | BaseException:
        """Waits for the next item and takes it; StopIteration once stopped."""
        self._waiters.wait_until(lambda: self.items or self.is_stopped)
        with interrupts.held():
            item = self.items.popleft() if self.items else StopIteration()
            self._waiters.ring()
        return item

    def stop(self) -> None:
        """Asks the thread to end, which it does as soon as the source lets it."""
        self.is_stopped = True
        self._when_dropped.detach()
        self._waiters.ring()

    def join(self, timeout: float | None = None) -> None:
        """Waits for the thread to end."""
        if self._thread is threading.current_thread() or not self._thread.is_alive():
            return
        # Before Python 3.13, a `Thread.join` ended by a signal also ends all later ones.
        self._waiters.wait_until(lambda: self._has_ended, timeout)
        self._thread.join(None if self._has_ended else 0)

    def _work(self) -> None:
        try:
            with self._settings():
                is_last = False
                while not is_last and self._has_room():
                    try:
                        item = self._make()
                    except BaseException as error:  # e.g. SystemExit: the loop must not wait
                        item = error
                    is_last = not isinstance(item, Chunk)
                    self.items.append(item)
                    del item  # an error, its traceback and this frame would form a cycle
                    self._waiters.ring()
        finally:
            self._has_ended = True
            self._waiters.ring()

    def _has_room(self) -> bool:
        self._waiters.wait_until(lambda: self.is_stopped or len(self.items) < self._depth)
        return not self.is_stopped


@atexit.register
def _stop_all() -> None:
    """Stops all threads: calling JAX during interpreter shutdown would crash it."""
    live = list(_live)
    for prefetcher in live:
        prefetcher.stop()
    for prefetcher in live:
        prefetcher.join(_EXIT_SECONDS)


def require_untraced(
    method: str, fix: str = "step = dj.jit(fn); for x in dataset: step(x)"
) -> None:
    """Raises a ContextError in a trace, where data that is read is a constant."""
    frame = frames.current()
    if frame.is_replica:
        raise ContextError(
            f"{method} should be called from outside of replica_fn",
            got=frame.name,
            why="an element has the values of all replicas, and a replica function is traced "
            "once: every later call would compute with the same element",
            fix="for x in dataset: strategy.run(step, args=(x,))",
        )
    if jax_compat.staging():
        raise ContextError(
            f"{method} needs to be called outside of traced functions",
            got="a trace (dj.jit, a merge or update function, jax.jit, ...)",
            why="the element would be a constant of the compiled program, the same in every call",
            fix=fix,
        )
