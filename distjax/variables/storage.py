"""Where a variable's array is: with the variable, or in a program's list.

Every variable has one `StoredArray`, and its array is read and swapped only there. A program that
writes variables keeps their arrays in one `OwnedArrays`: the list goes into the compiled call,
and the list that comes out replaces it within the same C call, so no signal and no other thread
can observe a half-stored step. The `StoredArray` of such a variable knows only its index there.

Arrays are moved and donated under the lock of the variable's strategy. A read waits for that lock
only while the program that writes the variable is starting (see `donation.hand_out`).
"""

from __future__ import annotations

import abc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from distjax.variables.storage_errors import is_there, require_present, require_stored

#: What a variable stores: an array, or its ShapeDtypeStruct if the devices can only compile.
Stored: TypeAlias = jax.Array | jax.ShapeDtypeStruct


class OwnedArrays:
    """The arrays of the variables that one program writes.

    Attributes:
      cell: one element, which its `append` and `extend` replace: the list of arrays; momentarily,
        at the end of a call, everything the compiled program returned: a tuple whose first
        element is the list.
      is_whole: whether the list holds the array of every variable that the program writes.
      is_starting: whether a thread is starting the program.
      aliased: the variables whose arrays were handed out since the program last started.
      num_starts: how many times the program was started.
    """

    __slots__ = ("aliased", "cell", "is_starting", "is_whole", "num_starts")

    def __init__(self) -> None:
        self.cell: deque[Any] = deque([[]], maxlen=1)
        self.is_whole = False
        self.is_starting = False
        self.aliased: list[StoredArray] = []
        self.num_starts = 0

    @property
    def arrays(self) -> list[Stored | None]:
        """The arrays, in the order of the variables that the program writes."""
        held = self.cell[0]
        return held[0] if isinstance(held, tuple) else held

    def take(self, variables: Sequence[StoredArray]) -> None:
        """Moves the arrays of `variables` into the list; call it under their lock.

        If interrupted, every array is where its `place` says, and the next start retries.
        """
        self.cell.append([stored.require() for stored in variables])
        self.aliased = [stored for stored in variables if stored.handles]
        for index, stored in enumerate(variables):
            stored.move_to(self, index)
        self.is_whole = True


class StoredArray:
    """The array of one variable: read, swapped and versioned here.

    Args:
      name: the variable's name, for errors.
      lock: of the strategy's variables; held while arrays move or are donated.

    Attributes:
      place: the list of the program that steps the variable, and the index in it; None while
        the array is with the variable itself.
      handles: weak references to arrays handed out over the same buffers; changed in place while
        the array is stored, and another list for another array, so that `keep` has them all.
      components: weak references to the array and to the parts it was last split into.
      complete: stores the initial value from a trace that did not finish; None if there is none.
      is_being_made: whether the trace that creates the variable is active.
      is_lost: whether a program took the array and returned no new one.
      is_remote: whether the array is kept outside this process's variables, as on a server: no
        program steps it; its value is fetched and sent.
    """

    is_remote = False

    __slots__ = (
        "__weakref__",
        "_array",
        "_swaps",
        "complete",
        "components",
        "handles",
        "is_being_made",
        "is_lost",
        "lock",
        "name",
        "place",
    )

    def __init__(self, name: str, lock: threading.RLock):
        self.name, self.lock = name, lock
        self.place: tuple[OwnedArrays, int] | None = None
        self.handles: list[weakref.ref[jax.Array]] = []
        self.components: tuple[weakref.ref[Stored] | None, tuple[weakref.ref[jax.Array], ...]] = (
            None,
            (),
        )
        self.complete: Callable[[], None] | None = None
        self.is_being_made = self.is_lost = False
        self._array: Stored | None = None
        self._swaps = 0

    @property
    def version(self) -> int:
        """A number that grows with every change of the value."""
        place = self.place
        return self._swaps if place is None else self._swaps + place[0].num_starts

    def read(self) -> Stored | None:
        """Returns the array, or None if there is none."""
        while True:
            place = self.place
            array = self._array if place is None else place[0].arrays[place[1]]
            if self.place is place:  # else it moved in between
                return array

    def require(self) -> Stored:
        """Returns the array, or raises an error that names the variable and says why.

        A deleted array may belong to another thread's step, which is about to replace it, so it is
        read again under the lock.

        Raises:
          ContextError: the variable was never initialized, or its array was lost.
          RuntimeError: the user donated or deleted the array.
        """
        array = self.read()
        if not is_there(array):
            with self.lock:
                array = self.read()
                require_stored(self.name, array, self.is_lost)
        assert array is not None, "required above"
        return array

    def require_made(self) -> None:
        """Raises as `require` does if there is no array."""
        self.require()

    def require_present(self) -> None:
        """Raises UnsupportedError if the variable's devices can only be compiled for."""
        require_present(self.name, self.read())

    def swap(self, array: Stored) -> None:
        """Makes `array`, which nobody else may hold, the stored one."""
        with self.lock:
            self._put(array)
            self.complete = None
            self.handles, self.is_lost = [], False  # existing handles have the old buffers

    def complete_creation(self) -> None:
        """Stores the initial value left over from a trace that did not finish."""
        if self.complete is not None and self.read() is None:
            self.complete()

    def lose(self) -> None:
        """Records that a program took the array without returning a new one."""
        self._put(None)
        self.handles, self.is_lost = [], True
        if self.place is not None:
            self.place[0].is_whole = False

    def keep(self) -> tuple[Stored | None, list[weakref.ref[jax.Array]]]:
        """Returns what `restore` needs to undo all later swaps."""
        return self.read(), self.handles

    def restore(self, kept: tuple[Stored | None, list[weakref.ref[jax.Array]]]) -> None:
        """Restores the array that was stored when `keep` was called."""
        with self.lock:
            array, handles = kept
            self._put(array)
            self.handles = handles
            if handles and self.place is not None:
                self.place[0].aliased.append(self)

    def _put(self, array: Stored | None) -> None:
        self._swaps += 1
        if self.place is None:
            self._array = array
        else:
            owned, index = self.place
            owned.arrays[index] = array

    def move_to(self, owned: OwnedArrays, index: int) -> None:
        """Records that the array is now in a program's list; call it under the lock."""
        former, version = self.place, self.version
        if former is not None:
            former[0].is_whole = False  # first, so the former program cannot run with the array
        self.place = owned, index
        self._swaps = version - owned.num_starts
        self._array = None
        if former is not None and former[0] is not owned:
            former[0].arrays[former[1]] = None  # programs keep only arrays they step alive

    def __del__(self) -> None:
        # Other variables may outlive this one and keep the list alive: drop its array.
        place = getattr(self, "place", None)
        if place is not None:
            place[0].is_whole = False
            place[0].arrays[place[1]] = None


class RemoteStorage(StoredArray, abc.ABC):
    """The array of a variable that others change too, where it is kept."""

    is_remote = True

    __slots__ = ()

    @abc.abstractmethod
    def add(self, amount: jax.Array) -> None:
        """Adds `amount` [...] to the value where it is kept, so that no change of others is lost.

        A sum that is read here and then sent would undo what they have written in between.
        """
