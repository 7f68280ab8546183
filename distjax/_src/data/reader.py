"""Reader: reads a user's dataset element by element, from any position on.

A position is reached in one of two ways. An iterator with `get_state` and `set_state`, such as
grain's, is set to its own state: first to the one before the last element, which is read again.
Any other is read again from its beginning, and what had been used is dropped. Either way, the last
one read again has to be the element that was last when the position was saved. A dataset with
`set_epoch` is told which epoch it is.

What a source gives is numbered by `enumerate` as it is read, so that a Ctrl-C that loses an element
on its way leaves the count right. To go elsewhere is to make another reader.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import itertools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any, NamedTuple

from distjax._src.data.elements import HostTree, checksum_of, read_element
from distjax._src.typing import DatasetLike
from distjax.errors import BatchError, describe_value, message

_NEEDED = "set_state needs a dataset"
_SAVED = ("delivered", "consumed", "full_size", "checksum", "epoch", "source", "before")


@dataclasses.dataclass(frozen=True)
class Position:
    """A place in a dataset: behind one of its elements.

    Attributes:
      delivered: how many elements for all replicas were made.
      consumed: how many elements of the source were used for them.
      full_size: the leading dimension of the first one; None: unknown.
      checksum: of the last one used; None: none was used, or it is not known.
      epoch: which one, of a dataset with ``set_epoch``.
      source: the state of a source iterator with `get_state` and `set_state`.
      before: "source" and "consumed" of the position before, from which the last one used is read
        again; None: there is none, or no state of the source.
      example: the last example read, leaves [1, ...], for padding; not saved.
    """

    delivered: int = 0
    consumed: int = 0
    full_size: int | None = None
    checksum: int | None = None
    epoch: int | None = None
    source: Any = None
    before: Any = None
    example: HostTree | None = None

    def to_state(self) -> dict[str, Any]:
        """Returns what is known of it as a dict, to be saved."""
        values = {name: getattr(self, name) for name in _SAVED}
        return {name: copy.deepcopy(x) for name, x in values.items() if x is not None}

    def after(self, consumed: int, full_size: int | None, checksum: int) -> Position:
        """Returns the position behind the source's first `consumed` elements."""
        return Position(self.delivered, consumed, full_size, checksum, self.epoch)

    def with_example(self, example: HostTree | None) -> Position:
        """Returns the same position, with the last example read."""
        return dataclasses.replace(self, example=example)

    @classmethod
    def from_state(cls, state: object) -> Position:
        """Returns the position that a state is of; a ValueError if it is none."""
        if isinstance(state, Mapping) and all(
            isinstance(state.get(key), int) and state[key] >= 0 for key in ("delivered", "consumed")
        ):
            return cls(**{name: copy.deepcopy(state[name]) for name in _SAVED if name in state})
        raise ValueError(
            message(
                "set_state needs what get_state returned",
                got=describe_value(state),
                why="it says after which element to continue",
                fix="state = iterator.get_state(); iterator.set_state(state)",
            )
        )


def require_position_of(process: list[int] | None, state: object) -> None:
    """Raises a ValueError unless `state` is a position that this process can resume.

    `process` is its number and the job's size if each process reads its own data: the "process" of
    the position has to be the same.
    """
    saved = state.get("process") if isinstance(state, Mapping) else None
    if saved == process:
        return
    raise ValueError(
        message(
            f"set_state needs a position of {_readers(process)}, not of {_readers(saved)}",
            got=describe_value(state),
            why="each process has its own data, so the position of one does not apply to another",
            fix="resume with as many processes, or let all read the same global batches: "
            "strategy.distribute_dataset(batches), whose position holds for any number",
        )
    )


def _readers(process: list[int] | None) -> str:
    """Returns whose position it is, for an error text."""
    return "all processes alike" if process is None else f"process {process[0]} of {process[1]}"


class HostElement(NamedTuple):
    """An element on the host, leaves [R, B, ...], and the position behind it."""

    tree: HostTree
    position: Position

    def copy(self) -> HostElement:
        """Returns it in memory of its own: the source may refill the one it gave."""
        return self._replace(tree=self.tree.copy())


#: The elements of a source, with their numbers from 0 on.
Numbered = Iterator[tuple[int, Any]]

#: Makes an element for all replicas of the next elements of a source: see `Splitter.pull`.
Pull = Callable[[Numbered, Position], tuple[HostTree, Position]]


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


class Epochs:
    """A user's dataset, which is iterated once an epoch."""

    def __init__(self, dataset: DatasetLike):
        self.dataset: Any = dataset
        self._next = 0
        self._told: int | None = None  # the epoch that the dataset was told last
        self._ended: Any = None  # (a weak reference to) the iterator that was read to its end

    def begin(self, epoch: int | None = None) -> tuple[Iterator[Any], int | None]:
        """Returns a new iterator and its epoch; None if the dataset has no `set_epoch`.

        By default it is the epoch that the user has told the dataset meanwhile, if its attribute
        `epoch` shows it; else the one after the last that began.
        """
        if not callable(getattr(self.dataset, "set_epoch", None)):
            return _open(self.dataset), None
        if epoch is None:
            epoch, shown = self._next, getattr(self.dataset, "epoch", None)
            if type(shown) is int and shown >= 0 and shown != self._told:
                epoch = shown
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


def _open(dataset: DatasetLike) -> Iterator[Any]:
    if hasattr(dataset, "__iter__") or not isinstance(dataset, Sized):
        return iter(dataset)
    # Python reads such an object up to an IndexError, which a slice of an array never raises.
    return itertools.islice(iter(dataset), find_length(dataset))


class Reader:
    """Reads elements for all replicas from a dataset. One thread at a time may read.

    Attributes:
      position: behind the last element that was delivered to the loop, which says so.
      ahead: what comes before the elements that are still to be made: elements, maybe an error.

    If it `is_behind`, the iterator still has to go to the position where it begins, when it is
    first read.
    """

    def __init__(
        self,
        epochs: Epochs,
        pull: Pull,
        iterator: Iterator[Any],
        position: Position,
        *,
        is_behind: bool = False,
    ):
        self._epochs, self._pull = epochs, pull
        self._iterator: Any = iterator  # None: used up by a position that was refused, or ended
        self._numbered: Numbered = enumerate(iterator, position.consumed * (not is_behind))
        self._is_one_shot = iterator is epochs.dataset
        self._is_behind = is_behind
        self._is_unread = is_behind or not position.consumed
        self._has_ended = self.is_closed = False
        self.position = self._made = position
        self.ahead: collections.deque[HostElement | BaseException] = collections.deque()

    @classmethod
    def at_the_beginning(cls, epochs: Epochs, pull: Pull) -> Reader:
        """Returns a reader of the next epoch."""
        iterator, epoch = epochs.begin()
        return cls(epochs, pull, iterator, Position(epoch=epoch, source=_state_of(iterator)))

    def read(self) -> HostElement:
        """Returns the next element; raises StopIteration, or the error of the source."""
        if self.ahead:
            outcome = self.ahead.popleft()
            if isinstance(outcome, HostElement):
                return outcome
            try:
                raise outcome
            finally:
                del outcome  # else error, traceback and this frame form a cycle
        if self._has_ended:
            raise StopIteration
        try:
            return self._make()
        except Exception:
            self.release()
            raise

    def _make(self) -> HostElement:
        former, epoch = self._made, self._made.epoch
        if self._is_unread:
            self._epochs.tell(epoch)  # an `__iter__` that yields reads it only now
        self._is_unread = False
        if self._iterator is None:
            self._iterator, _ = self._epochs.begin(epoch)
            self._numbered = enumerate(self._iterator)
        if self._is_behind and keeps_position(self._iterator) and former.source is not None:
            self._iterator.set_state(copy.deepcopy(former.source))
            self._numbered = enumerate(self._iterator, former.consumed)
        elif self._is_behind:
            drop(self._numbered, former.consumed, _NEEDED, former.checksum)
        self._is_behind = False
        try:
            tree, position = self._pull(self._numbered, former)
        except StopIteration:
            self._require_not_ended_before()
            raise
        source, before = _state_of(self._iterator), None
        if source is not None and former.source is not None:
            before = {"source": former.source, "consumed": former.consumed}
        self._made = dataclasses.replace(
            position, delivered=former.delivered + 1, source=source, before=before
        )
        return HostElement(tree, self._made)

    def _require_not_ended_before(self) -> None:
        """Raises a BatchError if an iterator that ends without any element had ended before.

        An iterator of a class may begin again when `iter` is called, so it is tried first.
        """
        has_ended = self._epochs.end(self._iterator)
        if self._made.consumed:
            return
        if has_ended:
            raise BatchError(_ended_text(self._epochs.dataset)) from None
        if self._is_one_shot:
            warnings.warn(_empty_text(self._epochs.dataset), UserWarning, stacklevel=2)

    def release(self) -> None:
        """Drops the source's iterator: there are no more elements."""
        self._iterator, self._numbered = None, iter(())
        self._is_unread, self._has_ended = False, True

    def moved(self, position: Position) -> Reader:
        """Returns a reader that goes on behind a position, in place of this one; or raises.

        A generator is read up to there with the first element, and refused only then.
        """
        iterator, epoch = self._iterator_for(position)
        is_behind = self._is_one_shot  # until it is read, another position can be set
        position = dataclasses.replace(position, epoch=epoch)
        if position.source is not None and keeps_position(iterator):
            # Ctrl-C may leave the source elsewhere: this reader, if it stays, goes back by itself.
            self._is_behind |= iterator is self._iterator and self._made.source is not None
            _require_reachable(iterator, position)
            is_behind = True
        elif not is_behind:
            self._epochs.tell(epoch)
            drop(enumerate(iterator), position.consumed, _NEEDED, position.checksum)
        return Reader(self._epochs, self._pull, iterator, position, is_behind=is_behind)

    def _iterator_for(self, position: Position) -> tuple[Any, int | None]:
        """Returns an iterator from which a position can be reached, and its epoch."""
        former, dataset = self._iterator, self._epochs.dataset
        if self._is_one_shot:
            if self._is_unread or (position.source is not None and keeps_position(dataset)):
                return dataset, None
            raise ValueError(_one_shot_text(dataset))
        epoch = self._made.epoch if position.epoch is None else position.epoch
        if self._is_unread and former is not None and epoch == self._made.epoch:
            # Making another might advance the order of a dataset that shuffles.
            self._iterator = None
            return former, epoch
        iterator, epoch = self._epochs.begin(epoch)
        if iterator is former:
            raise ValueError(_one_shot_text(dataset))
        return iterator, epoch


def _state_of(iterator: Iterator[Any]) -> Any:
    """Returns a copy of an iterator's own state; None if it keeps no position."""
    own: Any = iterator  # for the type checker
    return copy.deepcopy(own.get_state()) if keeps_position(own) else None


def _require_reachable(iterator: Iterator[Any], position: Position) -> None:
    """Raises a ValueError if a source with a state gives another last element now: see `drop`.

    It is set to its state before that element, and reads it; then it goes back to where it was.
    """
    source: Any = iterator
    former = _state_of(source)
    try:
        if position.before is not None:
            source.set_state(copy.deepcopy(position.before["source"]))
            numbered = enumerate(source, position.before["consumed"])
            drop(numbered, position.consumed, _NEEDED, position.checksum)
        source.set_state(copy.deepcopy(position.source))
    finally:
        source.set_state(former)


def drop(numbered: Numbered, count: int, needed: str, checksum: int | None = None) -> None:
    """Reads and drops the elements with numbers below `count`; part of them may be gone before.

    Raises a ValueError, which begins with `needed`, if there are fewer or the last is another.
    """
    if not count:
        return
    number = -1
    for number, element in numbered:
        if number >= count - 1:
            if number == count - 1 and checksum is not None:
                _require_same(read_element(element, f"element {number}"), checksum, needed, number)
            return
    raise ValueError(
        message(
            f"{needed} of at least {count} elements",
            got=f"one that ended after {number + 1}",
            why="it is read again up to the element where the state was taken",
            fix="pass a dataset that gives the same elements whenever it is iterated",
        )
    )


def _require_same(element: HostTree, checksum: int, needed: str, number: int) -> None:
    if checksum_of(element) == checksum:
        return
    raise ValueError(
        message(
            f"{needed} that gives the same elements again: element {number}, the last one taken, "
            "has other values now",
            got=f"another order, other values or batches of another size (now "
            f"{element.leading_size}) than when the state was taken, from {number + 1} elements "
            "that were read again",
            why="the loop would continue elsewhere in the data: some examples would come twice, "
            "others never",
            fix="batches of the same size; and let the dataset derive its order, and all that it "
            "draws, from its own state if it has one, else from the epoch: def set_epoch(self, "
            "epoch): self.random = np.random.default_rng((self.seed, epoch)); or "
            "begin the epoch again: leave the iterator out, "
            "checkpointer.restore(tree without it, partial=True)",
        )
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
        why="its earlier elements are gone, so it cannot be read up to the same position",
        fix="pass an iterable (a list, a dataset, a class with __iter__); or set the state before "
        "the first element is read",
    )
