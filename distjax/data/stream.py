"""HostStream: reads a source element by element, with lookahead and resumption.

A splitter reads through a `_Reader`, which keeps what it has read until an element is made of it.
If a signal raises in between, the next pull replays what was kept, so nothing is lost. Elements
made but not yet taken are in `ahead`, each with the stream's state before and after it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from distjax.data.block import Allocate, Block, HostElement
from distjax.data.source import Source
from distjax.data.splitting import Position, Splitter
from distjax.errors import describe_error, describe_value, message


class End:
    """The end of a stream: its source has ended, or failed.

    Args:
      error: the source's error; None: it has ended.
    """

    def __init__(self, error: BaseException | None = None):
        self._error = error

    @property
    def error_text(self) -> str | None:
        """The type and first line of the error; None: the stream has ended."""
        return None if self._error is None else describe_error(self._error)

    def take_error(self) -> BaseException | None:
        """Returns the error and forgets it, since its traceback refers to this object."""
        error, self._error = self._error, None
        return error


class _Progress(NamedTuple):
    """How far a stream has pulled.

    Attributes:
      position: how far the source has been read.
      num_pulled: the number of elements made from it.
      state: see `HostStream.state`.
      read: what has been read since and is not yet part of an element.
    """

    position: Position
    num_pulled: int
    state: dict[str, Any]
    read: list[Any]


class HostStream:
    """Elements for all replicas, from a dataset.

    Attributes:
      ahead: the next outcomes, which were looked at or put back, but not yet taken.

    Args:
      source: a dataset, opened.
      splitter: turns its elements into elements for all replicas.
      position: how far the source has been read.
      num_pulled: the number of elements made from it.
    """

    def __init__(
        self,
        source: Source,
        splitter: Splitter,
        position: Position = Position(),  # noqa: B008  (immutable)
        num_pulled: int = 0,
    ):
        self._source: Source = source
        self._splitter = splitter
        self._progress = self._make_progress(position, num_pulled)
        self.ahead: list[HostElement | End] = []

    @property
    def state(self) -> dict[str, Any]:
        """The position of the source.

        delivered: elements made; consumed: elements of the source used for them;
        full_size: the leading dimension of the first, if known; checksum: of the last one used;
        epoch: which one, of a dataset with ``set_epoch``; source: the state of a source iterator
        with ``get_state`` and ``set_state``.
        """
        return self._progress.state

    def _make_progress(self, position: Position, num_pulled: int) -> _Progress:
        state: dict[str, Any] = {"delivered": num_pulled, "consumed": position.consumed}
        if position.full_size is not None:
            state["full_size"] = position.full_size
        if position.checksum is not None:
            state["checksum"] = position.checksum
        if self._source.epoch is not None:
            state["epoch"] = self._source.epoch
        own = self._source.state
        if own is not None:
            state["source"] = own
        return _Progress(position, num_pulled, state, [])

    def peek(self, limit: int, allocate: Allocate | None) -> Block | End:
        """Returns up to `limit` elements that can be stacked, at least one, or the end.

        They remain next until `ahead` is set to what follows them. Returns fewer than
        `limit` if the next element has another shape or is the end. An error of the
        source comes after the elements before it.

        Args:
          limit: 1 or more.
          allocate: allocates the memory to copy to; None, for a limit of 1: no copy.
        """
        first = self._outcome(0)
        if isinstance(first, End):
            return first
        block = Block(first, limit, allocate)
        while True:
            if allocate is not None:  # the copy takes its place: the source may refill its memory
                self.ahead[len(block) - 1] = block.element(len(block) - 1)
            if len(block) == limit:
                return block
            outcome = self._outcome(len(block))
            if isinstance(outcome, End):
                return block
            if not block.add(outcome):
                self.ahead[len(block)] = outcome._replace(tree=outcome.tree.copy())
                return block

    def release(self) -> None:
        """Drops the source's iterator."""
        self._source.release()
        self.ahead = [End()]

    def at(self, state: Mapping[str, Any]) -> HostStream:
        """Returns a stream just after the element that had `state`.

        If this fails, this stream can be read on.

        Raises:
          ValueError: not a state, a source that is too short or has elements of another
            size, or one that cannot be read again.
        """
        state = _require_state(state)
        source = self._source.at(state)
        full_size, is_resumed = state.get("full_size"), source.was_set
        position = Position(
            state["consumed"], full_size, is_resumed=is_resumed, checksum=state.get("checksum")
        )
        return HostStream(source, self._splitter, position, state["delivered"])

    def reach_position(self) -> None:
        """Drops the elements before the position that was set, if that has been left for later."""
        self._source.reach_position()

    def _outcome(self, index: int) -> HostElement | End:
        """Returns one of the next outcomes; an `End` is the last."""
        while len(self.ahead) <= index:
            self._pull()
        return self.ahead[index]

    def _pull(self) -> None:
        """Adds an outcome to `ahead`; a signal finds all of this done, or none of it."""
        before = after = self._progress
        outcome: HostElement | End
        try:
            reader = _Reader(self._source.start(), before.read)
            tree, position = self._splitter.pull(reader, before.position)
            after = self._make_progress(position, before.num_pulled + 1)
            outcome = HostElement(tree, after.state, before.state)
        except StopIteration:
            outcome = End(self._source.end(is_empty=not before.position.consumed))
        except Exception as error:  # re-raised in the loop
            outcome = End(error)
        end = slice(len(self.ahead), None)
        self.ahead[end], self._progress = (outcome,), after  # no signal between the two
        if isinstance(outcome, End):
            self._source.release()


class _Reader:
    """Reads a source and keeps what it read in `read`, for another reader to replay.

    Args:
      source: an iterator.
      read: what was read from it and not used yet.
    """

    def __init__(self, source: Iterator[Any], read: list[Any]):
        self._source, self._read = source, read
        self._index = 0

    def __iter__(self) -> _Reader:
        return self

    def __next__(self) -> Any:
        if self._index == len(self._read):
            # The source may refill its memory. Signals raise only in the main thread.
            if self._read and threading.current_thread() is threading.main_thread():
                self._read[-1] = jax.tree.map(np.array, self._read[-1])
            self._read.extend(map(next, (self._source,)))  # in one call in C
            if self._index == len(self._read):
                raise StopIteration
        self._index += 1
        return self._read[self._index - 1]


def _require_state(state: object) -> Mapping[str, Any]:
    if isinstance(state, Mapping) and all(
        isinstance(state.get(key), int) and state[key] >= 0 for key in ("delivered", "consumed")
    ):
        return state
    raise ValueError(
        message(
            "set_state needs what get_state returned",
            got=describe_value(state),
            why="it says after which element to continue",
            fix="state = iterator.get_state(); iterator.set_state(state)",
        )
    )
