"""Source: the user's iterable, opened at a position.

An iterator with `get_state` and `set_state`, such as grain's, restores its own state. Any other is
iterated again, and as many elements are dropped as had been used; the last of them has to be the
one that was last when the position was saved. A dataset with `set_epoch` is told which epoch it is.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import sys
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sized
from typing import Any

from distjax.data.elements import checksum_of, read_element
from distjax.errors import BatchError, message
from distjax.typing import DatasetLike


def find_length(dataset: Sized) -> int | None:
    """Returns the length of `dataset`; None if it has none, does not tell, or is endless."""
    with contextlib.suppress(Exception):  # a stream may raise whatever it likes
        length = len(dataset)
        return length if length < sys.maxsize else None  # grain's endless datasets report maxsize
    return None


def keeps_position(source: object) -> bool:
    """Returns whether an iterator can save and restore its position, as grain's can.

    The iterator itself is asked, not its class: a wrapper may pass these methods on.
    """
    return callable(getattr(source, "get_state", None)) and callable(
        getattr(source, "set_state", None)
    )


def skip(source: Iterator[Any], count: int, needed: str) -> None:
    """Reads and drops the elements that were delivered before.

    Args:
      source: at its first element.
      count: how many elements.
      needed: the start of the error text, e.g. "set_state needs a dataset".

    Raises:
      ValueError: the source has fewer elements.
    """
    _Skip(source, count, needed).finish()


class Epochs:
    """A user's dataset, which is iterated once an epoch.

    Attributes:
      dataset: an iterable.
    """

    def __init__(self, dataset: DatasetLike):
        self.dataset: Any = dataset
        self._next = 0
        self._told: int | None = None  # the epoch that the dataset was told last
        self._ended: Any = None  # (a weak reference to) the iterator that was read to its end

    def begin(self, epoch: int | None = None) -> tuple[Iterator[Any], int | None]:
        """Returns a new iterator and its epoch; None if the dataset has no `set_epoch`.

        Args:
          epoch: which one; None: the one after the last that began.
        """
        if not callable(getattr(self.dataset, "set_epoch", None)):
            return _open(self.dataset), None
        epoch = self._next if epoch is None else epoch
        self.tell(epoch)
        iterator = _open(self.dataset)
        self._next = epoch + 1
        return iterator, epoch

    def tell(self, epoch: int | None) -> None:
        """Tells the dataset the epoch that is about to be read, if it was told another."""
        if epoch is not None and epoch != self._told:
            self.dataset.set_epoch(epoch)
            self._told = epoch

    def end(self, iterator: Iterator[Any]) -> bool:
        """Records that an iterator has ended; returns whether the same one had ended before."""
        ended = self._ended() if isinstance(self._ended, weakref.ref) else self._ended
        try:  # a dataset makes a new one for each epoch, which should not live on here
            self._ended = weakref.ref(iterator)
        except TypeError:  # of Python's own, which let go of what they have read
            self._ended = iterator
        return ended is iterator


class Source:
    """A user's dataset, opened: its iterator, and how to open it at another position.

    Attributes:
      was_set: whether the iterator was set to a saved state of its own.
      epoch: which of the epochs of a dataset with `set_epoch`; None: it has none.

    Args:
      epochs: the dataset.
      epoch: which epoch; None: the next one.
      iterator: one over it; None: a new one.
    """

    def __init__(
        self, epochs: Epochs, epoch: int | None = None, iterator: Iterator[Any] | None = None
    ):
        self._epochs, self._dataset = epochs, epochs.dataset
        self._iterator: Any = iterator
        self.epoch = epoch
        if iterator is None:
            self._iterator, self.epoch = epochs.begin(epoch)
        self._is_one_shot = self._iterator is self._dataset
        self._was_finished = _is_finished(self._iterator)
        self.was_set = False
        self._is_unread = True
        self._moved_from: Any = None  # the own state to return to, if another source has left it
        self._skip: _Skip | None = None

    @property
    def state(self) -> Any:
        """A copy of the iterator's own state; None if it keeps no position."""
        is_kept = keeps_position(self._iterator)
        return copy.deepcopy(self._iterator.get_state()) if is_kept else None

    def start(self) -> Iterator[Any]:
        """Returns the iterator at this position, to be read from."""
        if self._is_unread:
            self._epochs.tell(self.epoch)  # an `__iter__` that yields reads it only now
        self._is_unread = False
        if self._iterator is None:  # handed over
            self._iterator, self.epoch = self._epochs.begin(self.epoch)
        if self._moved_from is not None:
            self._iterator.set_state(self._moved_from)
            self._moved_from = None
        self._finish_skip()
        return self._iterator

    def reach_position(self) -> None:
        """Drops the elements before the position that was set, if that has been left for later.

        Raises:
          ValueError: as for `at`.
        """
        if self._skip is not None:
            self._is_unread = False
            self._finish_skip()

    def _finish_skip(self) -> None:
        if self._skip is not None:
            self._skip.finish()
            self._skip = None

    def release(self) -> None:
        """Drops the iterator."""
        self._iterator, self._is_unread = None, False

    def end(self, *, is_empty: bool) -> BatchError | None:
        """Says that the source has ended; returns an error if it had ended before it was read.

        An iterator of a class may begin again when `iter` is called, so it is tried first.

        Args:
          is_empty: whether it has given nothing.
        """
        again = self._epochs.end(self._iterator) or self._was_finished
        if is_empty and again:
            return BatchError(_ended_text(self._dataset))
        if is_empty and self._is_one_shot:
            warnings.warn(_empty_text(self._dataset), UserWarning, stacklevel=2)
        return None

    def at(self, state: Mapping[str, Any]) -> Source:
        """Returns a source after the element that had `state`: see `HostStream.state`.

        Either that source or this one can then be read on, but not both.

        Raises:
          ValueError: it is too short, its elements have another size, or it cannot be
            read again.
        """
        if self._is_one_shot:
            return self._one_shot_at(state)
        # An unread iterator is passed on: making another may advance a dataset's shuffle order.
        former, epoch = self._iterator, state.get("epoch", self.epoch)
        unread = former if self._is_unread and epoch == self.epoch else None
        if unread is not None:
            self._iterator = None
        opened = Source(self._epochs, epoch, unread)
        if opened._iterator is former and unread is None:
            raise ValueError(_one_shot_text(self._dataset))
        if not opened._set_own_state(state):
            opened._skip_to(state)
            opened.start()
        opened._is_unread = False
        return opened

    def _one_shot_at(self, state: Mapping[str, Any]) -> Source:
        opened = Source(self._epochs, None, self._dataset)
        if "source" in state and keeps_position(self._dataset):
            if self._moved_from is None:
                self._moved_from = opened.state
            opened._set_own_state(state)
        elif self._is_unread:
            opened._skip_to(state)  # when it is read: until then, another state can be set
        else:
            raise ValueError(_one_shot_text(self._dataset))
        return opened

    def _set_own_state(self, state: Mapping[str, Any]) -> bool:
        """Sets the iterator to its own state in `state`; returns False if there is none."""
        if "source" not in state or not keeps_position(self._iterator):
            return False
        self._iterator.set_state(copy.deepcopy(state["source"]))
        self.was_set = True
        return True

    def _skip_to(self, state: Mapping[str, Any]) -> None:
        needed, size = "set_state needs a dataset", state.get("full_size")
        self._skip = _Skip(self._iterator, state["consumed"], needed, size, state.get("checksum"))


def _is_finished(iterator: object) -> bool:
    """Returns whether a generator has run to its end, whoever has read it."""
    return inspect.isgenerator(iterator) and iterator.gi_frame is None


def _open(dataset: DatasetLike) -> Iterator[Any]:
    if hasattr(dataset, "__iter__") or not isinstance(dataset, Sized):
        return iter(dataset)
    # Python reads such an object up to an IndexError, which a slice of an array never raises.
    return itertools.islice(iter(dataset), find_length(dataset))


class _Skip:
    """Drops elements of an iterator; after an interrupt, the next call drops the rest.

    Args:
      iterator: at its first element.
      count: how many elements.
      needed: the start of the error text.
      size: the leading dimension of the first element; None: unknown.
      checksum: that of the last element; None: unknown.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        count: int,
        needed: str,
        size: int | None = None,
        checksum: int | None = None,
    ):
        self._iterator, self._count, self._needed = iterator, count, needed
        self._size, self._checksum = size, checksum
        self._dropped: list[Any] = []  # the last element, and None for each one before it

    def finish(self) -> None:
        """Drops what is left to drop.

        Raises:
          ValueError: there are fewer elements, they have another size, or the last is another.
        """
        while (before := len(self._dropped)) < self._count:
            # One call in C, so that whenever a signal arrives, what was read is in the list.
            self._dropped.extend(map(next, (self._iterator,)))
            if len(self._dropped) == before:
                raise ValueError(self._short_text())
            if before:
                self._dropped[before - 1] = None
            elif self._size is not None:
                self._require_size(read_element(self._dropped[0], "element 0").leading_size)
        if self._dropped and self._checksum is not None:
            last = read_element(self._dropped[-1], f"element {self._count - 1}")
            if checksum_of(last) != self._checksum:
                raise ValueError(self._other_text())

    def _other_text(self) -> str:
        return message(
            f"{self._needed} that gives the same elements again: element {self._count - 1}, the "
            "last one taken, has other values now",
            got=f"another order, or other values, than when the state was taken, from {self._count}"
            " elements that were read again",
            why="the loop would go on elsewhere: some examples would come twice, others never",
            fix="let the dataset derive its order, and all that it draws, from the epoch: def "
            "set_epoch(self, epoch): self.random = np.random.default_rng((self.seed, epoch)); or "
            "begin the epoch again: leave the iterator out, "
            "checkpointer.restore(tree without it, partial=True)",
        )

    def _short_text(self) -> str:
        return message(
            f"{self._needed} of at least {self._count} elements",
            got=f"one that ended after {len(self._dropped)}",
            why="it is read again up to the element where the state was taken",
            fix="pass a dataset that gives the same elements whenever it is iterated",
        )

    def _require_size(self, size: int | None) -> None:
        if size != self._size:
            raise ValueError(size_text(f"{self._needed} with", size, self._size))


def size_text(needed: str, size: int | None, saved: int | None) -> str:
    """Returns the error text for batches of another size than in the saved state.

    Args:
      needed: how it begins, e.g. "batch 3 needs".
      size: the leading dimension found; None: the arrays have none in common.
      saved: the one in the state.
    """
    return message(
        f"{needed} {saved} examples in a full batch, as when the state was taken",
        got="arrays with no common leading dimension" if size is None else f"{size} examples",
        why="a position counts elements of the dataset: after as many of another size, some "
        "examples would come twice, or never",
        fix=f"give batches of {saved} examples; or begin the epoch again: leave the iterator out, "
        "checkpointer.restore(tree without it, partial=True)",
    )


def _ended_text(dataset: object) -> str:
    return message(
        "a second epoch needs a dataset that can be iterated again",
        got=f"{_name(dataset)} that has given all its elements",
        why="an iterator gives them once: from now on every epoch would be empty",
        fix=_AGAIN,
    )


def _empty_text(dataset: object) -> str:
    return message(
        "an epoch needs elements",
        got=f"{_name(dataset)} that has none, or has given them before",
        why="an iterator gives its elements once, and every loop over it after that is empty",
        fix=_AGAIN,
    )


def _name(dataset: object) -> str:
    return f"a dataset of type {type(dataset).__name__}"


#: How a dataset is iterated again.
_AGAIN = (
    "pass an iterable, such as a list of batches or an object whose __iter__ is the generator "
    "function: class Batches: __iter__ = lambda self: make_batches()"
)


def _one_shot_text(dataset: object) -> str:
    return message(
        "set_state needs a dataset that can be iterated again, or whose iterator has "
        "get_state and set_state",
        got=f"a {type(dataset).__name__} that is its own iterator and has been read from",
        why="what it has given is gone, so the same element cannot be reached again",
        fix="pass an iterable (a list, a dataset, a class with __iter__); or set the state before "
        "the first element is read",
    )
