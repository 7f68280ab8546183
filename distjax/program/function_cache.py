"""A cache keyed by functions, which forgets a function when it is collected.

A plain function is its own key, by weak reference: a dictionary compares those in C, and asking
for an `id` would call the audit hooks of the process (with filelock, which JAX 0.12 imports if it
is there, for 0.3 us). Other callables may equal one another, so identity is their key.

IPython's autoreload puts the code of an edited file into the functions that there are: a function
whose code was replaced is another one here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from types import CodeType, FunctionType, MethodType
from typing import Any
from weakref import ref


class FunctionCache:
    """Maps a function, by identity, to a value that is made when it is first asked for.

    The cache keeps neither functions nor objects alive: values must not hold them, and use
    `resolve()` instead.

    Args:
      make: ``make(resolve)`` returns the value of the function that `resolve()` returns.
    """

    def __init__(self, make: Callable[[Callable[[], Any]], Any]) -> None:
        self._make = make
        self._of_functions: dict[ref[FunctionType], tuple[CodeType, Any]] = {}
        self._of_others: dict[Hashable, tuple[Callable[[], Any], Any, CodeType | None]] = {}
        self._lock = threading.RLock()

    def get(self, fn: object) -> Any:
        """Returns the value of ``fn``."""
        if type(fn) is not FunctionType:
            return self._get_other(fn)
        entry = self._of_functions.get(ref(fn))
        if entry is None or entry[0] is not fn.__code__:
            return self._make_for_function(fn)
        return entry[1]

    def _make_for_function(self, fn: FunctionType) -> Any:
        with self._lock:
            entry = self._of_functions.get(ref(fn))
            if entry is None or entry[0] is not fn.__code__:
                key = ref(fn, lambda key: self._of_functions.pop(key, None))
                entry = self._of_functions[key] = fn.__code__, self._make(key)
            return entry[1]

    def _get_other(self, fn: object) -> Any:
        key = _identity(fn)
        code = getattr(fn.__func__, "__code__", None) if isinstance(fn, MethodType) else None
        entry = self._of_others.get(key)
        if entry is not None and entry[0]() is not None and entry[2] is code:
            return entry[1]
        with self._lock:
            entry = self._of_others.get(key)
            if entry is None or entry[0]() is None or entry[2] is not code:
                resolve = self._resolver(fn, key)
                entry = self._of_others[key] = resolve, self._make(resolve), code
            return entry[1]

    def _resolver(self, fn: object, key: Hashable) -> Callable[[], Any]:
        def forget(_: object) -> None:
            self._of_others.pop(key, None)

        owner = fn.__self__ if isinstance(fn, MethodType) else fn
        try:
            resolve = ref(owner, forget)
        except TypeError:
            return lambda: fn
        if not isinstance(fn, MethodType):
            return resolve
        function = fn.__func__
        return lambda: None if (owner := resolve()) is None else MethodType(function, owner)

    def __len__(self) -> int:
        return len(self._of_functions) + len(self._of_others)


def _identity(fn: object) -> Hashable:
    """Returns the key of a callable; each access of a bound method makes a new method object."""
    return (id(fn.__self__), id(fn.__func__)) if isinstance(fn, MethodType) else id(fn)
