"""Where the array of a variable is: with the variable, or in the list of a program that steps it.

Every variable has one `StoredArray`; its array is read and swapped there alone. A program that
writes variables keeps their arrays in one `SteppedArrays`: the list goes into the compiled call,
and the list that comes out takes its place within the same C call, so that no signal and no other
thread finds a step half stored. The `StoredArray` of such a variable knows only its place there.

Arrays move, and are donated, under the lock of the variable's strategy. A read waits for that lock
only while the program that writes the variable is being started (see `donation.hand_out`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from distjax.variables.storage_errors import is_there, require_present, require_stored

#: What a variable stores: an array; on devices that are only described its shape and sharding.
Stored: TypeAlias = jax.Array | jax.ShapeDtypeStruct


class SteppedArrays:
    """The arrays of the variables that one program writes.

    Attributes:
      cell: one element, the list of arrays; for a moment at the end of a call all that the
        compiled program returned, a tuple that begins with the list.
      is_whole: whether the list has the array of every variable that the program writes.
      is_starting: whether a thread is starting the program.
      aliased: those of the list that were handed out since the program was last started.
      num_starts: how often the program was started.
    """

    __slots__ = ("aliased", "cell", "is_starting", "is_whole", "num_starts")

    def __init__(self) -> None:
        self.cell: list[Any] = [[]]
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
        """Moves the arrays of `variables` into the list; called under their lock.

        Interrupted, it leaves every array where its `place` says; the next start takes them anew.
        """
        self.cell[:] = [[stored.require() for stored in variables]]
        self.aliased = [stored for stored in variables if stored.handles]
        for index, stored in enumerate(variables):
            stored.move_to(self, index)
        self.is_whole = True


class StoredArray:
    """The array of one variable: read, swapped and versioned here.

    Args:
      name: the name of the variable, for errors.
      lock: of the strategy's variables; held while arrays move or are donated.

    Attributes:
      place: the list of the program that steps the variable, and the index there; None while
        the array is with the variable itself.
      handles: weak references to arrays that were handed out over the same buffers.
      components: the array, and the parts that it was last taken apart into, weakly.
      complete: gives the variable the initial value of a trace that did not finish, or None.
      is_being_made: whether the trace that creates the variable is under way.
      is_lost: whether a program took the array and returned no new one.
      is_remote: whether the array is kept outside of this process's variables, as at a server: no
        program steps it, its value is fetched and sent.
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
        self.place: tuple[SteppedArrays, int] | None = None
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
        """A number that grows with each change of the value."""
        place = self.place
        return self._swaps if place is None else self._swaps + place[0].num_starts

    def read(self) -> Stored | None:
        """Returns the array; None if there is none."""
        while True:
            place = self.place
            array = self._array if place is None else place[0].arrays[place[1]]
            if self.place is place:  # else it moved between the two looks
                return array

    def require(self) -> Stored:
        """Returns the array, or raises an error that names the variable and says why not.

        A deleted one may be a step of another thread, which has its successor in a moment: so
        it is looked at again under the lock.

        Raises:
          ContextError: never made, or lost.
          RuntimeError: the user donated or deleted it.
        """
        array = self.read()
        if not is_there(array):
            with self.lock:
                array = self.read()
                require_stored(self.name, array, self.is_lost)
        assert array is not None, "required above"
        return array

    def require_made(self) -> None:
        """Raises as `require` does, where there is no array."""
        self.require()

    def require_present(self) -> None:
        """Raises an UnsupportedError if the devices of the variable are only described."""
        require_present(self.name, self.read())

    def swap(self, array: Stored) -> None:
        """Makes `array`, which nobody else holds, the stored one."""
        with self.lock:
            self._put(array)
            self.complete = None
            self.handles, self.is_lost = [], False  # what was handed out has the former buffers

    def complete_creation(self) -> None:
        """Gives the variable the initial value that a trace left which did not finish."""
        if self.complete is not None and self.read() is None:
            self.complete()

    def lose(self) -> None:
        """Records that a program took the array and did not return a new one."""
        self._put(None)
        self.handles, self.is_lost = [], True
        if self.place is not None:
            self.place[0].is_whole = False

    def keep(self) -> tuple[Stored | None, list[weakref.ref[jax.Array]]]:
        """Returns what `restore` takes to undo the swaps from here on."""
        return self.read(), self.handles

    def restore(self, kept: tuple[Stored | None, list[weakref.ref[jax.Array]]]) -> None:
        """Puts back the array that was there when `keep` was called."""
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
            stepped, index = self.place
            stepped.arrays[index] = array

    def move_to(self, stepped: SteppedArrays, index: int) -> None:
        """Records that the array now stands in the list of a program; called under the lock."""
        former, version = self.place, self.version
        if former is not None:
            former[0].is_whole = False  # first: the former program must not run with the array
        self.place = stepped, index
        self._swaps = version - stepped.num_starts
        self._array = None
        if former is not None and former[0] is not stepped:
            former[0].arrays[former[1]] = None  # a program pins no array that it does not step

    def __del__(self) -> None:
        # The program may be gone while other variables keep its list: no array stays for them.
        place = getattr(self, "place", None)
        if place is not None:
            place[0].is_whole = False
            place[0].arrays[place[1]] = None
