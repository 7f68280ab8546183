"""Where the arrays of variables are, who may look at them, and which may be donated.

Three rules carry everything:

1. One lock for the variables of a strategy. Whoever looks at an array holds it. The program that
   ran last may keep the new arrays in the list that `jit` returned, since it is likely to run next;
   who else wants one of them puts them back first (`VariableLock.settle`).
2. An array that anyone outside has seen is never donated: the next program that writes its variable
   is given a copy. So a value that a user holds stays valid, whichever thread reads or steps.
3. Nothing is compiled while the lock is held: a read waits for a launch, never for a compilation.

A variable whose array is elsewhere has another class of storage, which overrides what it does
differently: one on devices that only compile has the type of an array and no array, one at servers
fetches and sends its value.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from distjax._src import jax_compat
from distjax._src.context import Frame, frames
from distjax._src.interrupts import interrupts
from distjax._src.placement import copied, transfer
from distjax._src.traces import as_traced, struct, type_of
from distjax._src.typing import PyTree
from distjax._src.variables.conversion import Array, module_of
from distjax._src.variables.layouts import Declared, found_layout
from distjax.errors import ContextError, UnsupportedError, message


class NewestArrays:
    """The newest arrays of the variables that one program writes, until someone else asks.

    `arrays` is the list that the program takes and returns. If they `are_here`, the variables do
    not have these arrays, but what was before, or none.
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
    """The array of one variable, which it does not keep alive: read, swapped and copied here.

    Attributes:
      array: the array, if no program keeps a newer one.
      is_private: whether there is an array that no one outside has seen, which may be donated.
      is_lost: whether a program took the array and returned no new one.
    """

    def __init__(self, variable: Declared, lock: VariableLock):
        self.name, self.layout, self.lock = variable.name, variable.layout, lock
        self._shape, self._dtype = variable.shape, variable.dtype
        self._global_shape = self.layout.local_form.global_shape(self._shape)
        self.array: jax.Array | None = None
        self.is_private = self.is_lost = False
        # The array and the parts that it was last split into, as far as users hold them.
        self._components: tuple[weakref.ref[Any], ...] = ()

    # -- the array, in stored form ------------------------------------------------

    def read(self) -> jax.Array | None:
        """Returns the array or None, to look at its type: the next launch may donate it."""
        with self.lock:
            self.lock.show()
            return self.array

    def require(self) -> jax.Array:
        """Like `read`, but raises an error that names the variable and says why there is none."""
        with self.lock:  # else another thread's launch may donate it between the two looks
            array = self.read()
            if array is None:
                text = _lost_text(self.name) if self.is_lost else _unmade_text(self.name)
                raise ContextError(text)
            if array.is_deleted():
                raise RuntimeError(_deleted_text(self.name))
            return array

    def require_made(self) -> None:
        """Raises as `require` does if there is no array."""
        self.require()

    def hand_out(self) -> Any:
        """Returns the array, for anyone to keep; raises as `require` does."""
        with self.lock:
            self.lock.settle()
            array = self.require()
            self.is_private = False
        handed_out[id(array)] = array
        return array

    def take_private(self) -> Any:
        """Returns an array to be donated: the stored one, or a copy if others may hold that."""
        return self.array if self.is_private else self.take_copy()

    def take_copy(self) -> Any:
        """Returns a copy of the array."""
        return _copy(self.require())

    def swap(self, array: jax.Array) -> None:
        """Makes `array`, which nobody else may hold, the stored one."""
        with self.lock:
            self.lock.settle()
            self.put(array)
            self.is_lost = False

    def put(self, array: jax.Array | None) -> None:
        """Stores an array, with the lock held and all arrays with their variables."""
        self.lock.hide()
        self.array = array
        self.is_private = array is not None

    def lose(self) -> None:
        """Records that a program took the array without returning a new one."""
        self.put(None)
        self.is_lost = True

    def put_back(self, former: jax.Array | None) -> None:
        """Stores the array that `keep_formers` has kept."""
        with self.lock:
            self.lock.settle()
            self.put(former)
            self.is_private = False

    # -- the value, in global form ------------------------------------------------

    def value(self) -> Any:
        """Returns the value, for anyone to keep."""
        return self._as_value(self.hand_out())

    def _as_value(self, array: jax.Array) -> Any:
        value = self.layout.from_stored(array, self._shape)
        is_safe = value is array or self.layout.hands_out_copies
        return value if is_safe else jnp.copy(value)

    def components(
        self, split: Callable[[jax.Array], tuple[jax.Array, ...]]
    ) -> tuple[jax.Array, ...]:
        """Returns the components that `split` makes of the value; those that users hold, as then.

        So ``value in local_results(value_container(value))`` is true by identity; `==` on arrays
        has no single truth value.
        """
        with self.lock:
            array = self.hand_out()
            parts = split(self._as_value(array))
            held = [reference() for reference in self._components]
            if held and held[0] is array:
                pairs = zip(held[1:], parts, strict=True)
                parts = tuple(new if old is None else old for old, new in pairs)
            self._components = tuple(map(weakref.ref, (array, *parts)))
        handed_out.update((id(part), part) for part in parts)
        return parts

    def gave_out(self, value: object) -> bool:
        """Returns whether `value` is one of the components that were given out last."""
        return any(reference() is value for reference in self._components[1:])

    def store(self, value: jax.Array) -> None:
        """Stores `value`, which nobody else may hold."""
        sharding = self._where_it_goes()
        stored = self.layout.to_stored(value)
        is_array = isinstance(stored, jax.Array)
        # Always committed to its sharding, as what a step returns is: else the step compiles twice.
        in_place = is_array and stored.committed and stored.sharding == sharding
        if not in_place and not (is_array and sharding is None):
            stored = transfer(stored, sharding)
        self.swap(stored)

    def _where_it_goes(self) -> Any:
        """Returns where a new array goes: as programs split it within the replicas, if they may."""
        topology = getattr(self.layout, "topology", None)
        former = self.read() if topology is not None and topology.model_axes else None
        if not isinstance(former, jax.Array):
            return self.layout.sharding
        return found_layout(self.layout, former.sharding).sharding

    def set(self, value: Array) -> None:
        """Stores a value [...], or that of every component; what it holds on the host is ours."""
        value = self.on_own_devices(value)
        whole: Any = module_of(value).broadcast_to(value, self._global_shape)
        self.store(jnp.copy(whole) if isinstance(whole, jax.Array) else whole)

    def add(self, amount: Array, *, negated: bool = False) -> None:
        """Adds to the value, or subtracts: where it is, so that no change by others is lost."""
        amount = jnp.asarray(self.on_own_devices(amount))
        with self.lock:
            value = self.layout.from_stored(self.require(), self._shape)
            self.store(value - amount if negated else value + amount)

    def on_own_devices(self, value: Array) -> Any:
        """Returns `value` on devices where it can be combined with the stored array."""
        sharding = self.layout.sharding
        if not isinstance(value, jax.Array) or not value.committed or sharding is None:
            return value
        is_here = value.sharding.device_set == sharding.device_set
        return value if is_here else jax_compat.as_uncommitted(value)

    # -- its type in a trace ------------------------------------------------------

    def traced_type(self) -> jax_compat.ShapedArray:
        """Returns the type that the global value has in a trace."""
        return self.traced_type_of(self.read())

    def traced_type_of(self, stored: object) -> jax_compat.ShapedArray:
        """Returns the type of the global value for an array in stored form, or None."""
        plain = jax_compat.ShapedArray(self._global_shape, self._dtype)
        is_array = isinstance(stored, jax.Array)
        if not is_array or type_of(stored) == jax_compat.aval_of(stored):
            return plain
        value = jax.make_jaxpr(lambda x: self.layout.from_stored(x, self._shape))(stored)
        return as_traced(value.out_avals[0])


class CompileOnlyStorage(StoredArray):
    """Where an array would be, on devices of `jax.experimental.topologies`: its type is known."""

    def __init__(self, variable: Declared, lock: VariableLock):
        super().__init__(variable, lock)
        form = jax.eval_shape(self.layout.to_stored, struct(self._global_shape, self._dtype))
        self.array: Any = struct(form.shape, form.dtype, self.layout.sharding)

    def require(self) -> NoReturn:
        """Raises: no array is there."""
        raise UnsupportedError(
            f"variable {self.name!r} needs real devices to have a value",
            got="a strategy on devices of jax.experimental.topologies",
            why="programs can be compiled for such devices, but nothing runs on them",
            fix="dj.jit(step).lower(*args).compile(), or a strategy on jax.devices()",
        )

    def require_made(self) -> None:
        """Does nothing: programs may be traced and compiled."""

    def store(self, value: jax.Array) -> None:
        """Raises: there is no place."""
        self.require()


def make_storage(variable: Declared, lock: VariableLock) -> StoredArray:
    """Returns the storage of a variable on devices of this process's programs."""
    sharding = variable.layout.sharding
    only_compiles = sharding is not None and jax_compat.only_compiles(sharding.device_set)
    return (CompileOnlyStorage if only_compiles else StoredArray)(variable, lock)


def call_or_undo(frame: Frame, write: Callable[[], Any]) -> Any:
    """Returns ``write()`` in the frame; if it raises, all that it has written is as before.

    No context of a generator: one that a Ctrl-C leaves as it is entered would end when it is
    collected, and undo what has been written since.
    """
    formers: dict[StoredArray, Any] = {}
    try:
        with frames.with_frame(dataclasses.replace(frame, formers=formers)):
            return write()
    except BaseException:
        with interrupts.held():
            for stored, former in formers.items():
                stored.put_back(former)
        raise


def keep_formers(storages: Sequence[StoredArray]) -> None:
    """Before writes outside of traces: keeps the arrays that each `call_or_undo` may put back."""
    for frame in frames.stack():
        if frame.formers is None:
            continue
        for stored in storages:
            if stored not in frame.formers:
                with stored.lock:
                    frame.formers[stored] = stored.read()
                    stored.is_private = False


#: The arrays of variables that users were given, by `id`: a call that donates its arguments copies
#: these.
handed_out: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()


def _copy(array: jax.Array) -> Any:
    """Returns a copy, made shard by shard if the array spans several processes.

    Only this process may need a copy, so it cannot be a program run by all of them.
    """
    if array.is_fully_addressable:
        return jnp.copy(array)
    kind = array.sharding.memory_kind
    place = lambda device: jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
    shards = [copied(shard.data, place(shard.device)) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


# -- donated arguments ---------------------------------------------------------


def copy_handles(args: tuple[Any, ...], numbers: Collection[int]) -> tuple[Any, ...]:
    """Returns the arguments, with copies of donated arrays that are variables' too."""
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
    """
    for number in numbers:
        if number >= len(args):
            continue
        leaf = first_leaf(args[number])
        is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax_compat.Tracer)
        if is_array and leaf.is_deleted():
            name = names[number] if number < len(names) else str(number)
            raise RuntimeError(_donated_text(function, name, leaf))


def first_leaf(tree: PyTree) -> Any:
    """Returns one leaf of a tree, or None if it has none.

    Cost: under a microsecond if only tuples, lists and dicts lead to a `jax.Array`.
    """
    node: Any = tree
    while type(node) in (tuple, list, dict) and node:
        node = next(iter(node.values() if type(node) is dict else node))
    return node if isinstance(node, jax.Array) else next(iter(jax.tree.leaves(tree)), None)


# -- texts of errors -----------------------------------------------------------


def _unmade_text(name: str) -> str:
    return message(
        f"variable {name!r} needs an initial value",
        got="a variable whose creating function did not finish",
        why="the values of a traced function exist only when its trace ends",
        fix="create it outside the function; or set what holds it back to None, so that "
        "`if self.v is None` creates it again",
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


def _donated_text(function: str, argument: str, array: jax.Array) -> str:
    return message(
        f"{function} needs argument {argument} to hold arrays that were not donated",
        got=f"an array of {array.dtype}{list(array.shape)} that was donated before. Array has been "
        "deleted",
        why=f"{argument} is named in donate_argnums, so each call reuses its memory",
        fix=f"go on with what the call returns: {argument} = {function}({argument}, ...)",
    )
