"""DistributedIterator: yields elements on the devices, one after the other.

An element is in one place at any time: ahead in the stream on the host, made by the pipeline and
waiting there, or claimed by the thread whose call will return it. A call that a signal interrupts
leaves its claim, and the thread's next call returns it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
import weakref
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from distjax import jax_compat
from distjax.cluster.job import Job, job
from distjax.cluster.phases import phase
from distjax.context import frames
from distjax.data.agreement import (
    EMPTY,
    ENDED,
    FAILED,
    Report,
    agree_on_elements,
    num_padded_rows,
    padded_rows,
    receive_example,
    require_position_of,
)
from distjax.data.block import Block, HostElement
from distjax.data.chunks import Chunk, Steps, make_chunk, outcomes_of, peek_chunk
from distjax.data.elements import HostTree
from distjax.data.input_layout import InputLayout
from distjax.data.options import PAD, InputOptions
from distjax.data.prefetch import OnDemand, Pipeline, Prefetcher
from distjax.data.stream import End, HostStream
from distjax.errors import ContextError, message
from distjax.integers import require_int


@dataclasses.dataclass(frozen=True)
class _Running:
    pipeline: Pipeline
    steps: int | None  # the size of its chunks; None: single elements
    stop_when_dropped: weakref.finalize[..., Any]


class DistributedIterator:
    """Iterates over the elements of a `DistributedDataset`, once.

    `next(iterator)` and `iterator.get_next()` return one element, `take` several
    steps at once; they can be mixed. The background thread starts with the first
    call and stops at the end of the data, on `close`, or when the iterator is
    dropped. Several threads may share one iterator: each element goes to one of them.

    Attributes:
      is_closed: whether it gives no more elements.

    Args:
      stream: the elements on the host.
      layout: how they lie on the devices.
      options: how many elements to move ahead (0: no thread), and what to do if some
        processes of a job run out of data first.

    Source: tf.distribute.DistributedIterator; tf.distribute.StrategyExtended, an
      iterator with locality T (TF 1.12, 1.13).
    """

    def __init__(self, stream: HostStream, layout: InputLayout, options: InputOptions):
        self._stream = stream
        self._layout = layout
        self._options = options
        self._latest: HostTree | None = None  # the template for masked copies, if any may be needed
        self._state = stream.state  # after the last element that a thread has claimed
        # By thread, the item claimed but not yet returned; an interrupt leaves it here.
        self._claims: dict[int, Any] = {}  # a Chunk or End, or None
        self._running: _Running | None = None
        self.is_closed = False
        self._taking = threading.RLock()  # `close` must not wait for it: the source may call it

    def __iter__(self) -> DistributedIterator:
        return self

    def __repr__(self) -> str:
        delivered, num_replicas = self._own_state["delivered"], self._layout.num_replicas
        return f"DistributedIterator(delivered={delivered}, num_replicas={num_replicas})"

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
        if it has ``get_state`` and ``set_state``, as grain's do. If each process of
        a job reads its own data, "process" is this process's number and the total.

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
        state = copy.deepcopy(self._own_state)
        return state if self._process is None else {**state, "process": self._process}

    @property
    def _process(self) -> list[int] | None:
        """This process's number and the total, if each reads its own data."""
        joined = job() if self._layout.is_own and self._layout.spans_processes else None
        return None if joined is None else [joined.process_id, joined.num_processes]

    @property
    def _own_state(self) -> dict[str, Any]:
        claim = self._claims.get(threading.get_ident())
        return claim.block.state_before if isinstance(claim, Chunk) else self._state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Moves to the position just after the element that had `state`.

        Iterates the dataset again, in the epoch of the state, and skips what came before; or
        restores the state of the dataset's own iterator.

        Raises:
          ValueError: not a state; a dataset that is too short, cannot be iterated
            again, or gives another element now as the last one taken; or the state of
            another process, if each reads its own data.
        """
        require_position_of(self._process, state)
        with self._taking:
            self._stop_reading()
            stream = self._stream.at(state)
            own = {k: copy.deepcopy(v) for k, v in state.items() if k != "process"}
            # In one line, so that a signal finds the former position or the new one.
            self._stream, self._state, self._claims, self.is_closed = stream, own, {}, False
            self._latest = None

    def reach_position(self) -> None:
        """Reads up to the position that was set, if the source gives its elements only once.

        Raises:
          ValueError: as for `set_state`.
        """
        with self._taking:
            self._stream.reach_position()

    def stop_reading(self) -> None:
        """Stops reading ahead until the next call, which delivers what was read already."""
        with self._taking:
            self._stop_reading()

    def close(self) -> None:
        """Stops the background thread and releases the source.

        Waits for the source to return the element in progress. From here on `next`
        raises StopIteration.
        """
        self.is_closed = True
        self._stop_reading()
        self._claims.clear()
        self._stream.release()

    # -- inside ---------------------------------------------------------------

    def _give(self, steps: int | None, method: str) -> Any:
        """Returns the next item, which stays this thread's claim until it is returned."""
        _require_untraced(method)
        thread = threading.get_ident()
        joined = job() if self._layout.spans_processes else None
        if joined is None:
            outcome = self._claim(thread, steps)
        else:
            with phase("waiting for data"):
                outcome = self._claim(thread, steps)
            outcome = self._agree(joined, thread, outcome, steps)
        if isinstance(outcome, End):
            error = outcome.take_error()
            try:
                raise StopIteration if error is None else error
            finally:
                del error  # else error, traceback and this frame form a cycle
        try:
            self._claims[thread] = None  # CPython handles no signal from here to the return
            return outcome.result
        except BaseException:
            self._claims[thread] = outcome
            raise

    def _agree(
        self, joined: Job, thread: int, outcome: Chunk | End, steps: int | None
    ) -> Chunk | End:
        """Returns this process's item after all processes have compared theirs."""
        said = self._describe(outcome) if isinstance(outcome, End) else outcome.said
        assert said is not None, "described, as the layout spans processes"
        is_own = self._layout.is_own
        partial = self._options.partial
        count, sender, size = agree_on_elements(joined, said, steps, partial, is_own=is_own)
        block = None if isinstance(outcome, End) else outcome.block
        if partial == PAD and is_own and block is not None:
            self._latest = block.element(len(block) - 1).tree
        if sender is not None:
            example = receive_example(joined, sender, self._latest, self._layout.num_rows)
            self._latest = self._latest or example
        if count == said.num_elements and size == said.num_padded:
            return outcome
        if not count:  # others ran out of data, and nothing is padded
            self.close()
            return End()
        chunk = self._cut(block, count, steps, size)
        if block is not None and count < len(block):
            self._put_back(thread, block, chunk, count)
        return chunk

    def _put_back(self, thread: int, block: Block, chunk: Chunk, count: int) -> None:
        """Leaves a block's elements from `count` on to the next call.

        Others may have fewer because their data has ended, or changes its shape: that call tells.
        """
        with self._taking:
            self._stop_reading()
            ahead = [*block.elements[count:], *self._stream.ahead]
            state = block.element(count - 1).state
            self._stream.ahead, self._state, self._claims[thread] = ahead, state, chunk

    def _describe(self, end: End) -> Report:
        if end.error_text is not None:
            return Report(FAILED, end.error_text)
        size = num_padded_rows(self._latest, 1, is_own=self._layout.is_own)
        return Report(ENDED, "" if self._latest is not None else EMPTY, num_padded=size)

    def _cut(self, block: Block | None, count: int, steps: int | None, size: int) -> Chunk:
        """Returns `count` elements: those of `block`, then masked copies of the latest.

        Each has `size` rows a replica if that is not 0, as those of other processes have.
        """
        tree = None if block is None else block.tree
        tree = padded_rows(tree, 2, size) if tree is not None and size else tree
        leaves = [] if tree is None else [leaf[:count] for leaf in tree.leaves]
        if size and self._latest is not None:
            self._latest = padded_rows(self._latest, 1, size)
        missing = count - (0 if block is None else len(block))
        if missing > 0:
            assert self._latest is not None, "without an element, one receives an example"
            treedef, (*data, mask) = self._latest  # of a `Batch`
            masked = [np.stack([leaf] * missing) for leaf in (*data, np.zeros_like(mask))]
            leaves = [*map(np.concatenate, zip(leaves, masked, strict=True))] if leaves else masked
            if block is None:
                element = HostElement(HostTree(treedef, [x[0] for x in masked]), *[self._state] * 2)
                block = Block(element, 1, None)
        assert block is not None, "count is not 0"
        return make_chunk(block, HostTree(block.tree.treedef, leaves), self._layout, steps)

    def _claim(self, thread: int, steps: int | None) -> Chunk | End:
        """Returns this thread's item: claimed by an interrupted call, or claimed now."""
        with self._taking:
            running = self._running
            if running is not None:
                running.pipeline.require_own_process()
            if running is None or running.pipeline.is_stopped or steps != running.steps:
                if self.is_closed:  # checked last: `close` sets it before stopping the pipeline
                    claim = self._claims.get(thread)
                    return claim if isinstance(claim, End) else End()
                running = self._restart(thread, steps)
            if self._claims.get(thread) is None:
                running.pipeline.move_next(self._claims, thread)
            outcome = self._claims.get(thread) or End()  # another thread may have closed it
            if isinstance(outcome, End):
                if not self.is_closed:
                    self.close()
            elif outcome.block.last_state["delivered"] > self._state["delivered"]:
                self._state = outcome.block.last_state
            return outcome

    def _restart(self, thread: int, steps: int | None) -> _Running:
        """Starts producing chunks of `steps`, beginning with elements not yet delivered."""
        self._stop_reading()
        claim = self._claims.get(thread)
        ahead = [*outcomes_of([] if claim is None else [claim]), *self._stream.ahead]
        peek = functools.partial(peek_chunk, self._stream, self._layout, steps)
        pipeline: Pipeline = OnDemand(self._stream, peek)
        if self._options.prefetch:
            depth = max(1, self._options.prefetch // (steps or 1))
            pipeline = Prefetcher(self._stream, peek, depth)
        running = _Running(pipeline, steps, weakref.finalize(self, pipeline.stop))
        # In one line, so that each element is in one place whenever a signal raises.
        self._running, self._stream.ahead, self._claims[thread] = running, ahead, None
        return running

    def _stop_reading(self) -> None:
        """Ends the pipeline and puts what no thread has claimed back into the stream."""
        running = self._running
        if running is not None:
            items = running.pipeline.drain()  # if a signal ends the wait, this is repeated
            running.stop_when_dropped.detach()
            self._running, self._stream.ahead = None, [*outcomes_of(items), *self._stream.ahead]


def _require_untraced(method: str) -> None:
    frame = frames.current()
    if frame.is_replica:
        raise ContextError(
            message(
                f"{method} should be called from outside of replica_fn",
                got=frame.name,
                why="an element has the values of all replicas, and a replica function is traced "
                "once: it would compute with the same element ever after",
                fix="for x in dataset: strategy.run(step, args=(x,))",
            )
        )
    if jax_compat.staging():
        raise ContextError(
            message(
                f"{method} needs to be called outside of traced functions",
                got="a trace (dj.jit, a merge or update function, jax.jit, ...)",
                why="the element would be a constant of the compiled program, the same in every "
                "call",
                fix="step = dj.jit(fn); for x in dataset: step(x)",
            )
        )
