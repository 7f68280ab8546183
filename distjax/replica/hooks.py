"""What a layer above may hear of steps while they are traced: nothing, unless it is installed.

The kernel calls these hooks and names no layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from distjax.placement.topology import Topology
from distjax.replica.arguments import PartitionedTree, user_path
from distjax.replica.global_value import GlobalValue
from distjax.replica.trace import ReplicaTrace
from distjax.typing import PyTree


class Given(NamedTuple):
    """A replica function's arguments.

    Attributes:
      name: the user's name for the function.
      partitioned: its arguments.
      names: the user's names for the positional ones.
      values: the values of their leaves.
    """

    name: str
    partitioned: PartitionedTree
    names: Sequence[str]
    values: Sequence[GlobalValue]

    @property
    def paths(self) -> list[str]:
        """The user's paths to the leaves."""
        return [user_path(path, self.names) for path in self.partitioned.paths]


class TracedRun(NamedTuple):
    """A replica function that has been traced and emitted.

    Attributes:
      fn: the function.
      given: its arguments.
      traced: its trace.
      topology: its replicas.
      results: its array results, in the global view.
      values: the same as the user gets them.
      finals: the last values of the variables that it writes, in the global view.
      unequal: the variables that it creates with an initial value that differs.
      num_own: how many of the results are the user's; the others are state of objects.
      is_first_of_several: whether the user's results are the first of a tuple of trees.
      expectations: by `id`, each array that `dj.expect` allows to come back different, and why.
    """

    fn: Callable[..., Any]
    given: Given
    traced: ReplicaTrace
    topology: Topology
    results: Sequence[GlobalValue]
    values: Sequence[Any]
    finals: Sequence[GlobalValue]
    unequal: Sequence[Any]
    num_own: int
    is_first_of_several: bool
    expectations: Mapping[int, tuple[Any, str]]


#: Called with the result of a call, and with what `TraceHooks.describe` returned in its trace.
AfterCall = Callable[[PyTree, Sequence[Any]], None]


class TraceHooks:
    """The events, which do nothing here; a layer overrides what it wants to hear."""

    def on_call(
        self,
        memory: dict[Any, Any],
        fn: object,
        names: tuple[str, Sequence[str]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> AfterCall:
        """A function is called, for the first or second time.

        Args:
          memory: what the layer remembers from call to call; it lives as long as the calls.
          fn: what is called.
          names: the user's names for it, and for its positional arguments.
          args: positional arguments.
          kwargs: keyword arguments.
        """
        return lambda result, known: None

    def on_traced(self, run: TracedRun) -> None:
        """A replica function has been traced and emitted."""

    def on_reduced(
        self, op: str, arrays: Sequence[Any], outs: Sequence[Any], topology: Topology
    ) -> None:
        """Cross-replica code has reduced arrays over the replicas."""

    def on_lone_value(self, tree: PyTree) -> None:
        """Bare arrays are the single replica's own: a PerReplica if there were more."""

    def on_stand_ins(self, arrays: Sequence[Any], given: Sequence[Any]) -> None:
        """In a trace, arrays stand for those that were given."""

    def describe(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Returns what the layer knows of the results of a trace, for `on_call`."""
        return ()


_installed = [TraceHooks()]


def install(hooks: TraceHooks) -> None:
    """Makes a layer hear the events."""
    _installed[:] = [hooks]


def trace_hooks() -> TraceHooks:
    """Returns what hears the events."""
    return _installed[0]
