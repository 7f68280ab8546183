"""Gives an object the names of an older API: a class for each version is a table of `Renamed`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator
from operator import attrgetter
from typing import Any, Self, TypeVar

from distjax._src.context import frames
from distjax._src.servers.coordinator import ParameterServerStrategy
from distjax._src.strategies.mirrored import MirroredStrategy, OneDeviceStrategy
from distjax._src.strategies.strategy import Strategy
from distjax._src.typing import DatasetLike, KeywordArgs, PositionalArgs, PyTree

_T = TypeVar("_T")
_C = TypeVar("_C")


class Renamed:
    """Stands in a class for the attribute at `path` of what an `Adapter` wraps.

    Args:
      path: dotted names.
      bare_after: how many arguments stand before the bare ones: ``f(fn, x, k=y)`` is
        ``f(fn, (x,), {"k": y})`` if it is 1. None: the arguments are distjax's.
      **keywords: old name of a keyword -> the new one; None is dropped.
    """

    def __init__(self, path: str, bare_after: int | None = None, **keywords: str | None):
        self.path, self.bare_after, self.keywords = path, bare_after, keywords
        self.__doc__ = f"`{path}`."

    def __get__(self, adapter: Adapter | None, owner: type) -> Any:
        if adapter is None:
            return self
        found = attrgetter(self.path)(adapter.wrapped)
        if self.bare_after is None and not self.keywords:
            return found
        return functools.wraps(found)(functools.partial(self._call, found))

    def _call(self, found: Callable[..., Any], *args: PyTree, **kwargs: PyTree) -> Any:
        given = {new: kwargs.pop(old) for old, new in self.keywords.items() if old in kwargs}
        given = {new: value for new, value in given.items() if new is not None}
        if self.bare_after is None:
            return found(*args, **kwargs, **given)
        return found(*args[: self.bare_after], args[self.bare_after :], kwargs, **given)


class Adapter:
    """Wraps an object; attributes that the adapter lacks are those of `wrapped`.

    Args:
      wrapped: the object, or an adapter of it.
    """

    def __init__(self, wrapped: PyTree):
        self.wrapped = wrapped.wrapped if isinstance(wrapped, Adapter) else wrapped

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped":  # not set yet, while copying or unpickling
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.wrapped is self.wrapped

    def __hash__(self) -> int:
        return hash(self.wrapped)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.wrapped!r})"


class StrategyAdapter(Adapter):
    """What a strategy has in common under the names of all versions."""

    @contextlib.contextmanager
    def scope(self) -> Generator[Self]:
        """`dj.Strategy.scope`."""
        with self.wrapped.scope():
            yield self

    def nothing_to_do(self) -> list[Any]:
        """Returns []: nothing is left to initialize or to finalize."""
        return []


class ReplicaContextAdapter(Adapter):
    """A replica context whose strategy uses the names of a version.

    Attributes:
      strategy_type: the strategy adapter of that version.
    """

    strategy_type: type[StrategyAdapter]

    def merge_call(
        self, merge_fn: Callable[..., Any], args: PositionalArgs = (), kwargs: KeywordArgs = None
    ) -> Any:
        """`dj.ReplicaContext.merge_call`; `merge_fn` receives a strategy of that version."""

        @functools.wraps(merge_fn)
        def merge(strategy: Strategy, *args: PyTree, **kwargs: PyTree) -> Any:
            return merge_fn(self.strategy_type(strategy), *args, **kwargs)

        return self.wrapped.merge_call(merge, args, kwargs)

    @property
    def strategy(self) -> Any:
        """The strategy."""
        return self.strategy_type(self.wrapped.strategy)


def constructors(adapter: Callable[[Any], _T]) -> list[Callable[..., _T]]:
    """Returns distjax's mirrored, one-device and parameter server strategies, adapted.

    Each takes devices, a device or a number of workers, or nothing. `dj.Coordinator` takes the
    `wrapped` of the last.
    """

    def adapted(make: Callable[..., Strategy]) -> Callable[..., _T]:
        def construct(first: PyTree = None) -> _T:
            return adapter(make(first))

        construct.__name__, construct.__doc__ = make.__name__, f"`dj.{make.__name__}`."
        return construct

    return [
        adapted(make) for make in (MirroredStrategy, OneDeviceStrategy, ParameterServerStrategy)
    ]


def getters(
    adapter: Callable[[Any], _T], context_adapter: Callable[[Any], _C]
) -> tuple[Callable[[], _T], Callable[[], _C | None]]:
    """Returns `dj.get_strategy` and `dj.get_replica_context`, adapted."""

    def get_replica_context() -> _C | None:
        context = frames.get_replica_context()
        return None if context is None else context_adapter(context)

    return lambda: adapter(frames.get_strategy()), get_replica_context


class _WithGetNext(Adapter):
    """An iterator of the default strategy, with the method that it lacks."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return next(self.wrapped)

    get_next = __next__


def iterator_of(dataset: DatasetLike) -> Any:
    """Returns ``iter(dataset)`` with a `get_next` method."""
    iterator = iter(dataset)
    return iterator if hasattr(iterator, "get_next") else _WithGetNext(iterator)
