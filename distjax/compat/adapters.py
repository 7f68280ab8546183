"""Adapter: gives an object the names of an older API."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any, Self

from distjax.strategies.strategy import Strategy
from distjax.typing import DatasetLike, KeywordArgs, PositionalArgs, PyTree


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
        return self._find(name)

    def _find(self, name: str) -> Any:
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
        return self.wrapped.merge_call(with_adapter(self.strategy_type, merge_fn), args, kwargs)

    @property
    def strategy(self) -> Any:
        """The strategy."""
        return self.strategy_type(self.wrapped.strategy)


def adapt_or_none(adapter: Callable[[Any], Any], wrapped: object) -> Any:
    """Returns an adapter of `wrapped`; None if `wrapped` is None."""
    return None if wrapped is None else adapter(wrapped)


def with_adapter(adapter: Callable[[Any], Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the merge function ``fn``, which then receives an adapter of the strategy."""

    @functools.wraps(fn)
    def merge_fn(strategy: Strategy, *args: PyTree, **kwargs: PyTree) -> Any:
        return fn(adapter(strategy), *args, **kwargs)

    return merge_fn


class BareIterator:
    """An iterator with `get_next`, for the default strategy, whose iterators lack it.

    Args:
      iterator: any iterator.
    """

    def __init__(self, iterator: Iterator[PyTree]):
        self._iterator = iterator

    def __iter__(self) -> BareIterator:
        return self

    def __next__(self) -> Any:
        return next(self._iterator)

    get_next = __next__


def iterator_of(dataset: DatasetLike) -> Any:
    """Returns ``iter(dataset)`` with a `get_next` method."""
    iterator = iter(dataset)
    return iterator if hasattr(iterator, "get_next") else BareIterator(iterator)
