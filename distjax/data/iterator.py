"""DistributedIterator: elements on the devices, one after the other."""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from distjax import jax_compat
from distjax.context import frames
from distjax.data.block import Block, HostElement
from distjax.data.input_layout import InputLayout
from distjax.data.prefetch import Direct, Pipeline, Prefetcher
from distjax.data.stream import End, HostStream
from distjax.errors import ContextError, describe_value, message
from distjax.integers import is_int


@dataclasses.dataclass(frozen=True)
class Steps:
    """Input of K steps, moved to the devices in one transfer.

    To run over them in one compiled loop, scan over `arrays` and give each step
    ``steps.as_element(slice)``, which is what `next` would have given.

    Attributes:
      num_steps: K.
      arrays: the structure of an element; leaves are arrays [K, R, B, ...] that lie
        over the replicas in their second dimension; [K, B, ...] where R is 1.
      layout: how elements lie on the devices.
    """

    num_steps: int
    arrays: Any
    layout: InputLayout

    def as_element(self, arrays: Any) -> Any:
        """Returns one step's slices [R, B, ...] of `arrays` as an element."""
        return self.layout.as_element(arrays)


@dataclasses.dataclass(frozen=True)
class _Chunk:
    block: Block
    placed: Any


@dataclasses.dataclass(frozen=True)
class _Running:
    pipeline: Pipeline
    steps: int | None  # the size of its chunks; None: single elements
    stop_when_dropped: weakref.finalize


class DistributedIterator:
    """Iterates over the elements of a `DistributedDataset`, once.

    `next(iterator)` and `iterator.get_next()` give one element, `take` several
    steps at once; they can be mixed. The background thread starts with the first
    of them and ends with the data, with `close`, or when the iterator is dropped.
    Several threads may take from one iterator: each element goes to one of them.

    Args:
      stream: the elements on the host.
      layout: how they lie on the devices.
      prefetch: how many elements to move ahead; 0: no thread.

    Source: tf.distribute.DistributedIterator; tf.distribute.StrategyExtended, an
      iterator with locality T (TF 1.12, 1.13).
    """

    def __init__(self, stream: HostStream, layout: InputLayout, prefetch: int):
        self._stream = stream
        self._layout = layout
        self._prefetch = prefetch
        self._state = stream.state
        self._running: _Running | None = None
        self._is_closed = False
        self._taking = threading.RLock()  # `close` does not wait for it: the source may call that

    def __iter__(self) -> DistributedIterator:
        return self

    def __repr__(self) -> str:
        delivered, num_replicas = self._state["delivered"], self._layout.num_replicas
        return f"DistributedIterator(delivered={delivered}, num_replicas={num_replicas})"

    def __next__(self) -> Any:
        return self._next_chunk(None, "next(iterator)").placed

    def get_next(self) -> Any:
        """Returns the next element: ``next(iterator)``.

        Locality: T out; a bare array where R is 1. Context: not in a replica function
          or any other traced one. An error of the source passes through with its
          traceback.

        Raises:
          StopIteration: the data has ended.
          ContextError: in a traced function.
        """
        return next(self)

    def take(self, num_steps: int) -> Steps:
        """Returns up to `num_steps` elements, stacked and moved in one transfer.

        Fewer come before the end of the data, before an error of the source, and
        before an element of another shape: call again for the rest. With prefetch,
        the next `num_steps` are moved while these are in use.

        Args:
          num_steps: K, 1 or more.

        Locality: T out, arrays [K, R, B, ...]. Context: as `get_next`.

        Raises:
          StopIteration: no element is left.
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
        if not is_int(num_steps) or num_steps < 1:
            raise ValueError(
                message(
                    "take needs a number of steps, 1 or more",
                    got=describe_value(num_steps),
                    why="it is the leading dimension of what comes back",
                    fix="iterator.take(100)",
                )
            )
        chunk = self._next_chunk(int(num_steps), "iterator.take")
        return Steps(len(chunk.block), chunk.placed, self._layout)

    # -- saving and resuming --------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """Returns where the loop is: after the last element that it was given.

        Elements that were only prefetched do not count. A dict of ints: "delivered"
        (elements given), "consumed" (elements of the dataset used for them),
        "full_size" (of the first batch); and "source", what the dataset's own iterator
        says, where it has ``get_state`` and ``set_state`` as grain's have.

        Example:
          >>> batches = [np.full(2, i) for i in range(4)]
          >>> dataset = dj.VirtualStrategy(2).distribute_dataset(batches)
          >>> iterator = iter(dataset)
          >>> _ = next(iterator), next(iterator)
          >>> iterator.get_state()
          {'delivered': 2, 'consumed': 2, 'full_size': 2}
          >>> resumed = iter(dataset)
          >>> resumed.set_state(iterator.get_state())
          >>> next(resumed).stacked.tolist()
          [[2], [2]]
        """
        return copy.deepcopy(self._state)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues after the element that had `state`.

        The dataset is iterated again and what came before is skipped, or the state
        is handed to the dataset's own iterator.

        Raises:
          ValueError: not a state, a dataset that is too short, or one that cannot be
            iterated again.
        """
        self._end_pipeline()
        self._stream.restore(state)
        self._state = dict(copy.deepcopy(state))
        self._is_closed = False

    def close(self) -> None:
        """Ends the background thread and lets go of the source.

        Waits until the source has returned from the element that it is at. `next`
        raises StopIteration from here on.
        """
        self._is_closed = True
        self._end_pipeline()
        self._stream.release()

    # -- inside ---------------------------------------------------------------

    def _next_chunk(self, steps: int | None, method: str) -> _Chunk:
        _require_untraced(method)
        with self._taking:
            outcome = self._next_outcome(steps)
        if isinstance(outcome, _Chunk):
            return outcome
        error = outcome.take_error()
        try:
            raise StopIteration if error is None else error
        finally:
            del error  # or error, traceback and this frame would keep each other alive

    def _next_outcome(self, steps: int | None) -> _Chunk | End:
        running = self._running
        if running is None or running.pipeline.is_stopped or steps != running.steps:
            if self._is_closed:  # looked at last: `close` sets it before it stops the pipeline
                return End()
            running = self._running = self._restart(steps)
        outcome = running.pipeline.get()
        if isinstance(outcome, _Chunk):
            self._state = outcome.block.last_state
        elif not self._is_closed:
            self.close()
        return outcome

    def _restart(self, steps: int | None) -> _Running:
        """Starts producing chunks of another size; what was not taken is cut anew."""
        self._stream.put_back(self._end_pipeline())
        produce = functools.partial(_produce, self._stream, self._layout, steps)
        pipeline: Pipeline = Direct(produce)
        if self._prefetch:
            pipeline = Prefetcher(produce, max(1, self._prefetch // (steps or 1)))
        return _Running(pipeline, steps, weakref.finalize(self, pipeline.stop))

    def _end_pipeline(self) -> list[HostElement | End]:
        """Stops producing; returns what was produced and not taken."""
        running = self._running
        if running is None:
            return []
        items = running.pipeline.drain()  # a signal may end the wait: then this is done again
        self._running = None
        running.stop_when_dropped.detach()
        return [
            outcome
            for item in items
            for outcome in ([item] if isinstance(item, End) else item.block.elements)
        ]


def _produce(stream: HostStream, layout: InputLayout, steps: int | None) -> _Chunk | End:
    """Returns the next element, or up to `steps` of them stacked, on the devices."""
    try:
        block = stream.take(steps or 1, layout.allocate)
        if isinstance(block, End):
            return block
        if steps is None:
            return _Chunk(block, layout.to_element(block.elements[0].tree))
        return _Chunk(block, layout.to_steps(block.tree))
    except Exception as error:  # raised again in the loop
        return End(error)


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
