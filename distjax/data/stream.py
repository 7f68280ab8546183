"""HostStream: a source read element by element, that can be put back and resumed."""

from __future__ import annotations

import collections
import copy
from collections.abc import Mapping, Sequence
from typing import Any

from distjax.data.block import Allocate, Block, HostElement
from distjax.data.splitting import Position, Splitter
from distjax.errors import describe_value, message


class End:
    """The stream gives no more: it has ended, or failed.

    Args:
      error: what the source raised; None: it has ended.
    """

    def __init__(self, error: BaseException | None = None):
        self._error = error

    def take_error(self) -> BaseException | None:
        """Returns the error, once: frames of its traceback hold this object."""
        error, self._error = self._error, None
        return error


class HostStream:
    """Elements for all replicas, from a dataset.

    Args:
      dataset: an iterable.
      splitter: makes elements of the dataset's.
    """

    def __init__(self, dataset: Any, splitter: Splitter):
        self._dataset = dataset
        self._splitter = splitter
        self._open()

    def _open(self) -> None:
        self._source: Any = iter(self._dataset)
        self._position = Position()
        self._num_pulled = 0
        self._is_untouched = True
        self._ahead: collections.deque[HostElement | End] = collections.deque()

    @property
    def state(self) -> dict[str, Any]:
        """Where the source is now.

        delivered: elements made; consumed: elements of the source used for them;
        full_size: the leading dimension of the first, if known; source: the state
        of a source iterator with ``get_state`` and ``set_state``.
        """
        state: dict[str, Any] = {
            "delivered": self._num_pulled,
            "consumed": self._position.consumed,
        }
        if self._position.full_size is not None:
            state["full_size"] = self._position.full_size
        if _keeps_state(self._source):
            state["source"] = copy.deepcopy(self._source.get_state())
        return state

    def take(self, limit: int, allocate: Allocate) -> Block | End:
        """Returns up to `limit` elements that can be stacked, at least one; or the end.

        Fewer than `limit` come where the next element has another shape, or is the
        end. An error of the source comes after the elements before it.

        Args:
          limit: 1 or more.
          allocate: makes the memory that they are copied to.
        """
        first = self._next()
        if isinstance(first, End):
            return first
        block = Block(first, limit, allocate)
        while len(block) < limit:
            outcome = self._next()
            if isinstance(outcome, End):
                break
            if not block.add(outcome):
                self.put_back([HostElement(outcome.tree.copy(), outcome.state)])
                break
        return block

    def put_back(self, outcomes: Sequence[HostElement | End]) -> None:
        """Makes `outcomes` the next ones."""
        self._ahead.extendleft(reversed(outcomes))

    def release(self) -> None:
        """Lets go of the source."""
        self._source = None
        self._ahead = collections.deque([End()])

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues after the element that had `state`.

        Raises:
          ValueError: no such state, a source that is too short, or one that cannot be
            iterated again.
        """
        state = _require_state(state)
        was_untouched = self._is_untouched
        self._open()
        if _keeps_state(self._source) and "source" in state:
            self._source.set_state(copy.deepcopy(state["source"]))
        elif self._source is self._dataset and not was_untouched:
            raise ValueError(_one_shot_text(self._dataset))
        else:
            self._skip(state["consumed"])
        self._num_pulled = state["delivered"]
        self._position = Position(state["consumed"], state.get("full_size"))

    def _skip(self, count: int) -> None:
        for i in range(count):
            try:
                next(self._source)
            except StopIteration:
                raise ValueError(
                    message(
                        f"set_state needs a dataset of at least {count} elements",
                        got=f"one that ended after {i}",
                        why="it is read again up to the element where the state was taken",
                        fix="pass the dataset that the state was taken from",
                    )
                ) from None

    def _next(self) -> HostElement | End:
        """Returns the next outcome; an `End` again and again."""
        outcome = self._ahead.popleft() if self._ahead else self._pull()
        if isinstance(outcome, End):
            self.put_back([outcome])
        return outcome

    def _pull(self) -> HostElement | End:
        self._is_untouched = False
        try:
            tree, self._position = self._splitter.pull(self._source, self._position)
            self._num_pulled += 1
            return HostElement(tree, self.state)
        except StopIteration:
            self._source = None
            return End()
        except Exception as error:  # raised again in the loop
            self._source = None
            return End(error)


def _keeps_state(source: Any) -> bool:
    return callable(getattr(source, "get_state", None)) and callable(
        getattr(source, "set_state", None)
    )


def _require_state(state: Any) -> Mapping[str, Any]:
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


def _one_shot_text(dataset: Any) -> str:
    return message(
        "set_state needs a dataset that can be iterated again, or whose iterator has "
        "get_state and set_state",
        got=f"a {type(dataset).__name__} that is its own iterator and has been read from",
        why="what it has given is gone, so the same element cannot be reached again",
        fix="pass an iterable (a list, a dataset, a class with __iter__); or set the state before "
        "the first element is read",
    )
