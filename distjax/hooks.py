"""What layers hear from the kernel, and may do there: the kernel knows none of them by name.

A layer (jobs of several processes, parameter servers, the search for wrong reductions) installs
itself when it is imported, from `distjax/__init__.py`. Without any, the kernel trains on the
devices of one process. Others listen for a while, in one thread: `dj.explain` to the traces that it
makes, `dj.pmap` to that of its function.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from distjax.typing import PyTree


@dataclasses.dataclass(frozen=True)
class Watcher:
    """What a layer does around each launch of one program.

    Attributes:
      compiled: ``compiled(build, lowered, args, kwargs)`` before the first launch with such
        arguments, without any lock.
      begin: ``begin(build, args, kwargs)`` before each launch, with the lock of its variables.
      end: ``end(returned)`` after it; None: the launch raised.
      after: ``after(returned)`` when the lock is free: the place to wait.
    """

    compiled: Callable[..., None] | None = None
    begin: Callable[..., None] | None = None
    end: Callable[[tuple[Any, ...] | None], None] | None = None
    after: Callable[[tuple[Any, ...]], None] | None = None


#: Called with the result of a call, and with what `Layer.describe` returned in its trace.
AfterCall = Callable[[PyTree, Sequence[Any]], None]


class Layer:
    """The events, at which nothing happens here; a layer overrides those that it wants to hear.

    Attributes:
      is_dry_run: whether what is traced while it listens must change nothing.
    """

    is_dry_run = False

    # -- programs ---------------------------------------------------------------

    def watch(self, build: PyTree) -> Watcher | None:
        """Returns what to do around each launch of a new `program.launch.Build`, if anything."""

    def launcher(self, build: PyTree) -> Callable[..., Any] | None:
        """Returns what launches a build in place of `Build.launch`, for variables elsewhere."""

    def on_new_program(self, name: str) -> None:
        """A program is about to be compiled for the first time."""

    def on_created(self, variables: PyTree, lower: Callable[[], Any]) -> None:
        """A step is about to create variables; ``lower()`` gives the program of their values."""

    def working(self, what: str) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which this process is at slow work, such as a compilation."""
        return contextlib.nullcontext()

    def on_call(
        self,
        memory: dict[Any, Any],
        fn: object,
        names: tuple[str, Sequence[str]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> AfterCall | None:
        """A function is called, for the first or second time.

        Args:
          memory: what layers remember from call to call; it lives as long as the calls.
          fn: what is called.
          names: the user's names for it, and for its positional arguments.
          args: positional arguments.
          kwargs: keyword arguments.
        """

    # -- traces -----------------------------------------------------------------

    def on_stand_ins(self, arrays: Sequence[Any], given: Sequence[Any]) -> None:
        """In a trace, arrays stand for those that were given."""

    def on_segment(self, jaxpr: PyTree, varying: Sequence[bool], analysis: PyTree) -> None:
        """A merge-free run of replica code is emitted; `varying` describes its inputs."""

    def merging(self, eqn: PyTree) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which a merge is emitted."""
        return contextlib.nullcontext()

    def on_reduced(
        self, op: str, values: Sequence[Any], outs: Sequence[Any], topology: PyTree
    ) -> None:
        """Cross-replica code has reduced values over the replicas."""

    def on_lone_value(self, tree: PyTree) -> None:
        """Bare arrays are the single replica's own: a PerReplica if there were more."""

    def on_traced(self, run: PyTree) -> None:
        """A replica function has been traced and emitted: a `replica.run.TracedRun`."""

    def on_proved(self, run: PyTree, why: Sequence[tuple[str, bool, str]]) -> None:
        """The layer `lint` has found why results of a `TracedRun` are equal, or differ."""

    def on_program(self, reads: Sequence[Any], writes: Sequence[Any], results: PyTree) -> None:
        """A cross-replica function was traced: its variables, and the paths of its results."""

    def on_finding(self, finding: PyTree) -> bool:
        """Something is probably wrong; returns whether nobody else is to be told."""
        return False

    def describe(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Returns what the layer knows of the results of a trace, for `on_call`."""
        return ()


_installed: list[Layer] = []
#: Those that listen in this thread.
_listening: ContextVar[tuple[Layer, ...]] = ContextVar("distjax_listening", default=())
_is_dry_run: ContextVar[bool] = ContextVar("distjax_dry_run", default=False)

#: Library -> the module of distjax whose `LAYER` takes its objects into programs (see
#: `objects.stateful`); that is imported once the library has been.
object_layers: dict[str, str] = {}


def install(layer: Layer) -> None:
    """Lets a layer hear all events from now on."""
    _installed.append(layer)


@contextlib.contextmanager
def listening(layer: Layer) -> Generator[None]:
    """Lets a layer hear the events of this thread for a block."""
    token, dry = _listening.set((*_listening.get(), layer)), _is_dry_run.get()
    try:
        _is_dry_run.set(dry or layer.is_dry_run)
        yield
    finally:
        _listening.reset(token)
        _is_dry_run.set(dry)


@contextlib.contextmanager
def only_shapes() -> Generator[None]:
    """A context for traces that are made for shapes: they prove nothing to those that listen."""
    token = _listening.set(())
    try:
        yield
    finally:
        _listening.reset(token)


def layers() -> Sequence[Layer]:
    """Returns those that hear what happens here."""
    own = _listening.get()
    return (*_installed, *own) if own else _installed


def is_dry_run() -> bool:
    """Returns whether code is traced only to be inspected, and must change nothing."""
    return _is_dry_run.get()


# -- what several layers say -----------------------------------------------------


def working(what: str) -> contextlib.AbstractContextManager[Any]:
    """Returns a context for slow work of this process, described for people."""
    entered = contextlib.ExitStack()
    for layer in layers():
        entered.enter_context(layer.working(what))
    return entered


def merging(eqn: PyTree) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which a merge is emitted."""
    entered = contextlib.ExitStack()
    for layer in layers():
        entered.enter_context(layer.merging(eqn))
    return entered


def watchers_of(build: PyTree) -> list[Watcher]:
    """Returns the watchers of a new build."""
    made = (layer.watch(build) for layer in layers())
    return [watcher for watcher in made if watcher is not None]


def on_lone_value(tree: PyTree) -> None:
    """Tells the layers of a single replica's own value."""
    for layer in layers():
        layer.on_lone_value(tree)


def describe(leaves: Sequence[Any]) -> dict[Layer, Sequence[Any]]:
    """Returns what each layer knows of the results of a trace."""
    return {layer: layer.describe(leaves) for layer in layers()}


def on_call(
    *call: PyTree,
) -> Callable[[PyTree, Mapping[Layer, Sequence[Any]]], None]:
    """Tells the layers of a call; returns what tells them of its end: see `Layer.on_call`."""
    told = [(layer, layer.on_call(*call)) for layer in layers()]

    def after_call(result: PyTree, known: Mapping[Layer, Sequence[Any]]) -> None:
        for layer, after in told:
            if after is not None:
                after(result, known.get(layer, ()))

    return after_call
