"""A cache keyed by functions, which forgets a function when it is collected."""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any


class FunctionCache:
    """Maps a function, by identity, to a value that is made when it is first asked for.

    The cache keeps neither functions nor objects alive: values must not hold them, and use
    `resolve()` instead.

    Args:
      make: ``make(resolve)`` returns the value of the function that `resolve()` returns.
    """

    def __init__(self, make: Callable[[Callable[[], Any]], Any]) -> None:
        self._make = make
        self._entries: dict[Any, tuple[Callable[[], Any], Any]] = {}
        self._lock = threading.RLock()

    def get(self, fn: object) -> Any:
        """Returns the value of ``fn``."""
        identity = weakref.ref(fn) if type(fn) is types.FunctionType else _identity(fn)
        entry = self._entries.get(identity)
        if entry is not None and entry[0]() is not None:
            return entry[1]
        with self._lock:
            entry = self._entries.get(identity)
            if entry is None or entry[0]() is None:
                resolve = self._resolver(fn, identity)
                entry = (resolve, self._make(resolve))
                self._entries[identity] = entry
            return entry[1]

    def _resolver(self, fn: object, identity: Hashable) -> Callable[[], Any]:
        def forget(_: object) -> None:
            self._entries.pop(identity, None)

        if isinstance(fn, types.MethodType):
            function = fn.__func__
            try:
                owner = weakref.ref(fn.__self__, forget)
            except TypeError:
                return lambda: fn
            return lambda: None if owner() is None else types.MethodType(function, owner())
        try:
            return weakref.ref(fn, forget)
        except TypeError:
            return lambda: fn

    def __len__(self) -> int:
        return len(self._entries)


def _identity(fn: object) -> Hashable:
    """Returns a key for an object that may be equal to another one.

    A plain function is its own key, by weak reference. Asking for its `id` would call the audit
    hooks of the process: with filelock, which JAX 0.12 imports if it is there, for 0.3 us.

    A bound method is keyed by (object, function), since every attribute access makes
    a new method object.
    """
    if isinstance(fn, types.MethodType):
        return id(fn.__self__), id(fn.__func__)
    return id(fn)
