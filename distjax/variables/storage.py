"""Where the arrays of variables are, who may look at them, and which may be donated.

Three rules carry everything:

1. One lock for the variables of a strategy. Whoever looks at an array holds it. The program that
   ran last may keep the new arrays in the list that `jit` returned, since it is likely to run next;
   who else wants one of them puts them back first (`VariableLock.settle`).
2. An array that anyone outside has seen is never donated: the next program that writes its variable
   is given a copy. So a value that a user holds stays valid, whichever thread reads or steps.
3. Nothing is compiled while the lock is held: a read waits for a launch, never for a compilation.
"""

from __future__ import annotations

import abc
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from distjax import jax_compat
from distjax.errors import ContextError, UnsupportedError, message
from distjax.placement.transfer import copied
from distjax.trees import first_leaf
from distjax.typing import PyTree

#: What a variable stores: an array, or its ShapeDtypeStruct if the devices can only compile.
Stored: TypeAlias = jax.Array | jax.ShapeDtypeStruct


class NewestArrays:
    """The newest arrays of the variables that one program writes, until someone else asks.

    Attributes:
      stored: the variables' places.
      arrays: their arrays, the list that the program takes and returns.
      read: the arrays of the variables that the program only reads.
      are_here: whether the variables do not have these arrays, but what was before, or none.
    """

    __slots__ = ("are_here", "arrays", "read", "stored")

    def __init__(self, stored: Sequence[StoredArray], arrays: list[Any], read: list[Any]):
        self.stored, self.arrays, self.read = stored, arrays, read
        self.are_here = False

    def take_over(self) -> None:
        """Lets the variables let go of their arrays: what nobody else holds is free."""
        for stored in self.stored:
            stored.array = None
        self.are_here = True

    def put_back(self) -> None:
        """Gives the variables their arrays; the list stays valid."""
        if self.are_here:
            for stored, array in zip(self.stored, self.arrays, strict=True):
                stored.put(array)
            self.are_here = False


class VariableLock(type(threading.RLock())):  # pyright: ignore[reportGeneralTypeIssues]
    """The lock of a strategy's variables.

    Attributes:
      newest: the arrays that the program that ran last keeps; None: the variables have theirs.
      shown: what the last program that writes none has read, until a variable changes.
    """

    newest: NewestArrays | None = None
    shown: NewestArrays | None = None

    def settle(self) -> None:
        """Puts the arrays back for good: no program keeps any. With the lock held."""
        newest = self.newest
        if newest is not None:
            newest.put_back()
            newest.stored, newest.arrays, newest.read = (), [], []
            self.newest = None

    def show(self) -> None:
        """Lets the variables have their arrays to be looked at; the program goes on with them."""
        if self.newest is not None:
            self.newest.put_back()

    def hide(self) -> None:
        """Lets go of what was shown: a variable changes, and its former array may be large."""
        if self.shown is not None:
            self.shown.read = []
            self.shown = None


class SeveralLocks:
    """The locks of several strategies, always taken in one order.

    So no two threads wait for each other. No program keeps arrays under them.
    """

    newest = shown = None

    def __init__(self, locks: Iterable[VariableLock]):
        self._locks = sorted(locks, key=id)

    def __enter__(self) -> None:
        for lock in self._locks:
            lock.__enter__()

    def __exit__(self, *exception: object) -> None:
        for lock in reversed(self._locks):
            lock.__exit__(None, None, None)

    def settle(self) -> None:
        """Puts all arrays back for good."""
        for lock in self._locks:
            lock.settle()

    show = settle


class StoredArray:
    """The array of one variable: read, swapped and versioned here.

    Args:
      name: the variable's name, for errors.
      lock: the lock of the strategy's variables.

    Attributes:
      array: the array, if no program keeps a newer one.
      is_private: whether there is an array that no one outside has seen, which may be donated.
      components: weak references to the array and to the parts it was last split into.
      complete: stores the initial value from a trace that did not finish; None if there is none.
      is_being_made: whether the trace that creates the variable is active.
      is_lost: whether a program took the array and returned no new one.
      is_remote: whether the array is kept outside this process's variables, as on a server: its
        value is fetched and sent.
    """

    is_remote = False

    def __init__(self, name: str, lock: VariableLock):
        self.name, self.lock = name, lock
        self.array: Stored | None = None
        self.is_private = False
        self.components: tuple[weakref.ref[Stored] | None, tuple[weakref.ref[jax.Array], ...]] = (
            None,
            (),
        )
        self.complete: Callable[[], None] | None = None
        self.is_being_made = self.is_lost = False
        self._num_changes = 0

    @property
    def version(self) -> int:
        """A number that grows when the value has changed."""
        self.read()
        return self._num_changes

    def read(self) -> Stored | None:
        """Returns the array or None, to look at its type: the next launch may donate it."""
        with self.lock:
            self.lock.show()
            return self.array

    def require(self) -> Stored:
        """Like `read`, but raises an error that names the variable and says why there is none.

        Raises:
          ContextError: the variable was never initialized, or its array was lost.
          RuntimeError: the user donated or deleted the array.
        """
        array = self.read()
        if array is None:
            raise ContextError(_lost_text(self.name) if self.is_lost else _unmade_text(self.name))
        if isinstance(array, jax.Array) and array.is_deleted():
            raise RuntimeError(_deleted_text(self.name))
        return array

    def hand_out(self) -> Any:
        """Returns the array, for anyone to keep.

        Raises:
          ContextError, RuntimeError: see `require`.
        """
        with self.lock:
            self.lock.settle()
            array = self.require()
            self.is_private = False
        if isinstance(array, jax.Array):
            handed_out[id(array)] = array
        return array

    def take_private(self) -> Any:
        """Returns an array to be donated: the stored one, or a copy if others may hold that."""
        return self.array if self.is_private else self.take_copy()

    def take_copy(self) -> Any:
        """Returns a copy of the array."""
        return _copy(self.require())

    def swap(self, array: Stored) -> None:
        """Makes `array`, which nobody else may hold, the stored one."""
        with self.lock:
            self.lock.settle()
            self.put(array)
            self.complete, self.is_lost = None, False

    def put(self, array: Stored | None) -> None:
        """Stores an array, with the lock held and all arrays with their variables."""
        self.lock.hide()
        self.array = array
        self._num_changes += 1
        self.is_private = array is not None

    def lose(self) -> None:
        """Records that a program took the array without returning a new one."""
        self.put(None)
        self.is_lost = True

    def keep(self) -> Stored | None:
        """Returns what `restore` needs to undo all later swaps."""
        return None if self.read() is None else self.hand_out()

    def restore(self, kept: Stored | None) -> None:
        """Restores the array that was stored when `keep` was called."""
        with self.lock:
            self.lock.settle()
            self.put(kept)
            self.is_private = False

    def complete_creation(self) -> None:
        """Stores the initial value left over from a trace that did not finish."""
        if self.complete is not None and self.read() is None:
            self.complete()

    def require_made(self) -> None:
        """Raises as `require` does if there is no array."""
        self.require()

    def require_present(self) -> None:
        """Raises UnsupportedError if the variable's devices can only be compiled for."""
        if isinstance(self.read(), jax.ShapeDtypeStruct):
            raise UnsupportedError(_absent_text(self.name))


class RemoteStorage(StoredArray, abc.ABC):
    """The array of a variable that others change too, where it is kept."""

    is_remote = True

    @abc.abstractmethod
    def add(self, amount: jax.Array) -> None:
        """Adds `amount` [...] to the value where it is kept, so that no change of others is lost.

        A sum that is read here and then sent would undo what they have written in between.
        """


#: The arrays of variables that users were given, by `id`: a call that donates its arguments copies
#: these.
handed_out: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()


def hand_out(stored: StoredArray) -> Any:
    """Returns the array of a variable, for anyone to keep: see `StoredArray.hand_out`."""
    return stored.hand_out()


def reuse_components(stored: StoredArray, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Returns the components, reusing array objects that users still hold.

    This makes ``value in local_results(value_container(value))`` true by identity; `==` on
    arrays has no single truth value.

    Args:
      stored: the variable's array, which has been handed out.
      parts: its components, freshly split.
    """
    array = stored.require()
    former, before = stored.components
    if former is not None and former() is array:
        held = [reference() for reference in before]
        parts = tuple(new if old is None else old for old, new in zip(held, parts, strict=True))
    stored.components = weakref.ref(array), tuple(map(weakref.ref, parts))
    handed_out.update((id(part), part) for part in parts)
    return parts


def _copy(array: Stored) -> Any:
    """Returns a copy, made shard by shard if the array spans several processes.

    Only this process may need a copy, so it cannot be a program run by all of them.
    """
    if not isinstance(array, jax.Array):
        return array
    if array.is_fully_addressable:
        return jnp.copy(array)
    kind = array.sharding.memory_kind
    place = lambda device: jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
    shards = [copied(shard.data, place(shard.device)) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


# -- donated arguments ---------------------------------------------------------


def copy_handles(args: tuple[Any, ...], numbers: Collection[int]) -> tuple[Any, ...]:
    """Returns the arguments, with copies of donated arrays that are variables' too.

    Args:
      args: positional arguments.
      numbers: the positions of those that are about to be donated.
    """
    if not handed_out:
        return args
    copy = lambda x: _copy(x) if handed_out.get(id(x)) is x else x
    return tuple(jax.tree.map(copy, arg) if i in numbers else arg for i, arg in enumerate(args))


def require_undeleted(
    function: str, names: Sequence[str], numbers: Iterable[int], args: Sequence[PyTree]
) -> None:
    """Raises a RuntimeError if an argument to be donated was donated before.

    Checks only the first array of each argument, since the arrays of one argument are donated
    together. An argument passed by keyword is not donated.

    Args:
      function: the name of the function called.
      names: the names of its positional parameters.
      numbers: the positions of the arguments that the call donates.
      args: its positional arguments.
    """
    for number in numbers:
        if number >= len(args):
            continue
        leaf = first_leaf(args[number])
        is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax_compat.Tracer)
        if is_array and leaf.is_deleted():
            name = names[number] if number < len(names) else str(number)
            raise RuntimeError(_donated_text(function, name, leaf))


# -- texts of errors -----------------------------------------------------------


def _unmade_text(name: str) -> str:
    return message(
        f"variable {name!r} needs an initial value",
        got="a variable whose creating function did not finish",
        why="the values of a traced function exist only when its trace ends",
        fix="create the variable again, outside the function or guarded by `if self.v is None`",
    )


def _lost_text(name: str) -> str:
    return message(
        f"variable {name!r} needs a value",
        got="none: a program that writes it failed, or was interrupted, as it started",
        why="such a program reuses the memory of the former value, and returned no new one",
        fix="checkpointer.restore(tree), or v.assign(...), for each variable that the step writes",
    )


def _deleted_text(name: str) -> str:
    return message(
        f"variable {name!r} needs the array that it stores",
        got="an array that was deleted: Array has been deleted",
        why="v.value shares the memory of the variable, and was donated (jax.jit with "
        "donate_argnums) or deleted by hand",
        fix="donate a copy: jnp.copy(v.value); to go on: v.assign(...), or "
        "checkpointer.restore(tree)",
    )


def _absent_text(name: str) -> str:
    return message(
        f"variable {name!r} needs real devices to have a value",
        got="a strategy on devices of jax.experimental.topologies",
        why="programs can be compiled for such devices, but nothing runs on them",
        fix="dj.jit(step).lower(*args).compile(), or a strategy on jax.devices()",
    )


def _donated_text(function: str, argument: str, array: jax.Array) -> str:
    return message(
        f"{function} needs argument {argument} to hold arrays that were not donated",
        got=f"an array of {array.dtype}{list(array.shape)} that was donated before. Array has been "
        "deleted",
        why=f"{argument} is named in donate_argnums, so each call reuses its memory",
        fix=f"go on with what the call returns: {argument} = {function}({argument}, ...)",
    )
