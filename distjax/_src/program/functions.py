"""Functions of the user: what was compiled for each, and warnings when one is compiled often."""

from __future__ import annotations

import functools
import inspect
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any
from weakref import ref

import jax

from distjax._src import hooks, jax_compat, user_lines
from distjax._src.context import StrategyLike
from distjax._src.placement import is_per_replica
from distjax._src.replica.arguments import Static, function_name, is_one_leaf, user_path
from distjax._src.typing import PyTree
from distjax.errors import RecompilationWarning, message

# -- function cache -----------------------------------------------------------
# A cache keyed by functions, which forgets a function when it is collected.
#
# A plain function is its own key, by weak reference: a dictionary compares those in C, and asking
# for an `id` would call the audit hooks of the process (with filelock, which JAX 0.12 imports if it
# is there, for 0.3 us). Other callables may equal one another, so identity is their key.
#
# IPython's autoreload puts the code of an edited file into the functions that there are: a function
# whose code was replaced is another one here.


class FunctionCache:
    """Maps a function, by identity, to a value that is made when it is first asked for.

    The cache keeps neither functions nor objects alive: ``make(resolve)`` returns the value, which
    must not hold the function that ``resolve()`` returns.
    """

    def __init__(self, make: Callable[[Callable[[], Any]], Any]) -> None:
        self._make = make
        #: Key of the function -> what returns it, its value, its code at that time.
        self._entries: dict[Hashable, tuple[Callable[[], Any], Any, CodeType | None]] = {}
        self._lock = threading.RLock()

    def get(self, fn: object) -> Any:
        """Returns the value of ``fn``."""
        if type(fn) is FunctionType:
            key, code = ref(fn), fn.__code__
        elif isinstance(fn, MethodType):  # each access of a bound method makes a new object
            key = id(fn.__self__), id(fn.__func__)
            code = getattr(fn.__func__, "__code__", None)
        else:
            key, code = id(fn), None
        entry = self._entries.get(key)
        if entry is None or entry[2] is not code or entry[0]() is None:
            with self._lock:
                entry = self._entries.get(key)
                if entry is None or entry[2] is not code or entry[0]() is None:
                    key, resolve = self._weakly(fn, key)
                    entry = self._entries[key] = resolve, self._make(resolve), code
        return entry[1]

    def _weakly(self, fn: object, key: Hashable) -> tuple[Hashable, Callable[[], Any]]:
        """Returns the key to keep, and what returns ``fn`` as long as anyone else has it."""
        if type(fn) is FunctionType:
            own = ref(fn, lambda own: self._entries.pop(own, None))
            return own, own

        def forget(_: object) -> None:
            self._entries.pop(key, None)

        try:
            resolve = ref(fn.__self__ if isinstance(fn, MethodType) else fn, forget)
        except TypeError:
            return key, lambda: fn
        if not isinstance(fn, MethodType):
            return key, resolve
        function = fn.__func__
        return key, lambda: None if (owner := resolve()) is None else MethodType(function, owner)

    def __len__(self) -> int:
        return len(self._entries)


# -- retraces -----------------------------------------------------------------
# Warnings for functions that are compiled again and again.


#: The number of compilations of one function at which to warn first.
FIRST_WARNING = 8


class RetraceWatch:
    """Counts the signatures of one function and reports what changed."""

    def __init__(self, name: str, argument_names: Sequence[str] = ()):
        self._name, self._argument_names = name, argument_names
        self._count = 1
        self._warn_at = FIRST_WARNING
        self._last: dict[str, str] = {}

    def record(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_replacing: bool = False
    ) -> None:
        """Records one more compilation, perhaps for other captured objects; warns at 8, 16, ..."""
        self._count += 1
        before, self._last = self._last, _describe(args, kwargs, self._argument_names)
        if self._count < self._warn_at:
            return
        self._warn_at *= 2
        ordinal = f"{self._count}{'nd' if self._count == 32 else 'th'}"
        if is_replacing:
            _warn(
                f"{self._name} is compiled for the {ordinal} time and needs the objects that it "
                "captures to stay the same",
                got="a new variable, metric, optimizer or layer in place of one that it used",
                why="a compiled program is made for the variables that it was traced with",
                fix="make it once and set it back: metric.reset(), v.assign(...), or a learning "
                "rate as a variable",
            )
            return
        changed = [
            f"{path}: {before.get(path, 'absent')} -> {now}"
            for path, now in self._last.items()
            if before.get(path) != now
        ]
        _warn(
            f"{self._name} is compiled for the {ordinal} time and needs arguments whose shapes "
            "stay the same",
            got=f"a change of {'; '.join(changed[:4]) or 'the tree of arguments'}",
            why="each new shape, dtype or Python value is a program of its own",
            fix="pad batches to one shape, and pass numbers that change as arrays",
        )


def _warn(needs: str, *, got: str, why: str, fix: str) -> None:
    text = message(needs, got=got, why=why, fix=fix)
    warnings.warn(text, RecompilationWarning, stacklevel=user_lines.user_stacklevel())


def record_new_function(fn: Callable[..., Any], strategy: StrategyLike) -> Callable[[], None]:
    """Records a new function; warns at the 8th, 16th, 32nd, ... with the same code in a row.

    A loop that creates a function anew for each step compiles it each time, and nothing else shows
    it. A call of the returned function, at the function's second call, ends the streak, and so does
    another strategy.
    """
    code = _code_of(fn)
    if code is None or hooks.is_dry_run():  # `dj.explain` traces a function anew
        return lambda: None
    streak: _Streak = _streaks.get(code)
    streak.add(strategy)
    if streak.count == streak.warn_at:
        streak.warn_at *= 2
        _warn(
            f"{function_name(fn)} needs to be one function object for all its calls",
            got=f"{streak.count} function objects of the same code, each called once",
            why="a compiled program is found by the function object, so that a new lambda, "
            "functools.partial or jit is compiled at each call",
            fix="make it once, before the loop: fn = functools.partial(...); strategy.run(fn, ...)",
        )
    return streak.clear


class _Streak:
    """The number of new functions with one code seen in a row, under one strategy."""

    def __init__(self) -> None:
        self._strategy: Callable[[], Any] = lambda: None
        self.clear()

    def add(self, strategy: StrategyLike) -> None:
        if self._strategy() is not strategy:
            self._strategy = weakref.ref(strategy)
            self.clear()
        self.count += 1

    def clear(self) -> None:
        self.count, self.warn_at = 0, FIRST_WARNING


#: By code.
_streaks = FunctionCache(lambda _: _Streak())


def _code_of(fn: Callable[..., Any]) -> types.CodeType | None:
    """Returns the code under partials and decorators, or None for a bound method."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(inspect.unwrap(fn), "__code__", None) if not inspect.ismethod(fn) else None


def _describe(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str]
) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path((args, kwargs), is_leaf=is_one_leaf)
    return {
        f"argument {user_path(jax.tree_util.keystr(path), names)}": _describe_leaf(leaf)
        for path, leaf in leaves
    }


def _describe_leaf(leaf: PyTree) -> str:
    if isinstance(leaf, Static):
        return repr(leaf.value)
    if is_per_replica(leaf):
        return f"PerReplica {jax_compat.aval_of(leaf.stacked)}"
    return str(jax_compat.aval_of(leaf))
