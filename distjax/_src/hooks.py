"""What layers hear from the kernel, and may do there: the kernel knows none of them by name.

A layer (jobs of several processes, parameter servers, the search for wrong reductions) appends its
functions to these events when it is imported, from `distjax/__init__.py`, or first used. Without
any, the kernel trains on the devices of one process. A function that does not apply to what it is
told returns at once, or None. Others listen for a while, in one thread: `dj.explain` to the traces
that it makes, `dj.pmap` to that of its function.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

from distjax._src.typing import PyTree


class Event(list[Callable[..., Any]]):
    """The functions to call at an event: those of layers, then those that listen in this thread.

    ``if event`` asks for the layers' alone, which is cheap: code on the path of every call asks so,
    and nobody can listen there for a block (`listening`).
    """

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        yield from super().__iter__()
        for event, told in _listening.get().pairs:
            if event is self:
                yield told


class _Listening(NamedTuple):
    """Those that listen in this thread, and to what; and whether what is traced changes nothing."""

    pairs: tuple[tuple[Event, Callable[..., Any]], ...] = ()
    is_dry_run: bool = False


_NOBODY = _Listening()
_listening: ContextVar[_Listening] = ContextVar("distjax_listening", default=_NOBODY)


@contextlib.contextmanager
def listening(
    *pairs: tuple[Event, Callable[..., Any]], is_dry_run: bool = False
) -> Generator[None]:
    """A context in which functions hear events of this thread; in a dry run nothing may change."""
    before = _listening.get()
    now = _Listening((*before.pairs, *pairs), before.is_dry_run or is_dry_run)
    try:
        _listening.set(now)
        yield
    finally:
        _listening.set(before)


@contextlib.contextmanager
def only_shapes() -> Generator[None]:
    """A context for traces that are made for shapes: they prove nothing to those that listen."""
    before = _listening.get()
    try:
        _listening.set(before._replace(pairs=()))
        yield
    finally:
        _listening.set(before)


def is_dry_run() -> bool:
    """Returns whether code is traced only to be inspected, and must change nothing."""
    return _listening.get().is_dry_run


# -- programs -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Watcher:
    """What a layer does around each launch of one program, chosen when the program is built.

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


#: ``watch(build)`` returns the `Watcher` of a new `program.launch.Build`, or None.
watchers = Event()

#: ``launch(build)`` returns what launches a program in place of `Build.launch`, or None: for
#: variables that are kept elsewhere.
launchers = Event()

#: ``told(name)``: a program is about to be compiled for the first time.
on_new_program = Event()

#: ``told(variables, initial)``: variables are about to get their initial values; ``initial()``
#: returns the program that computes them, lowered, or the one value.
on_created = Event()

#: ``told(what, value)``: a value on the host was written where every process has to write the same.
on_host_write = Event()

#: ``begin(name, fn, arrays, static)``: ``fn(arrays, *static)`` is about to be launched outside of
#: programs. Returns what is called with an output that is ready when it is done, or with None if it
#: was not launched; or None.
on_operation = Event()

#: ``told(strategy, devices)``: a strategy of this name is made for `devices`, or for all (None).
on_all_devices = Event()

#: ``told(call, meant)``: a call takes this process's devices, by default; the code `meant` says so.
on_local_devices = Event()

#: ``told(topology, devices_per_host)``: a strategy is about to reduce over these replicas.
on_topology = Event()

#: ``told(topology, copies)``: values that have to be equal on all replicas are compared. `copies`
#: are those that this process holds: by name of the value, a list with `slices` and `data` each.
on_compared = Event()

#: ``join(layout, partial)`` returns the `data.iterator.Together` of a new iterator, or None.
readers = Event()

#: ``work(what)`` returns a context in which this process is at slow work, such as a compilation.
at_work = Event()

#: ``told(memory, fn, names, args, kwargs)``: a function is called, for the first or second time.
#: Returns what is called with the result, and with what `describe` returned in its trace. `memory`
#: is a dict in which layers remember from call to call what lives as long as the calls; `names`
#: are the user's names for the function, and for its positional arguments.
on_call = Event()

# -- traces ---------------------------------------------------------------------

#: ``told(arrays, given)``: in a trace, arrays stand for those that were given.
on_stand_ins = Event()

#: ``told(jaxpr, varying, topology)``: a merge-free run of replica code is emitted for several
#: replicas; `varying` describes its inputs.
on_segment = Event()

#: ``make(topology)`` returns a `replica.emit.JaxprEmitter` that emits a replica function in place
#: of the usual one, or None.
emitters = Event()

#: ``merge(eqn)`` returns a context in which a merge is emitted.
in_merge = Event()

#: ``told(op, values, outs, topology)``: cross-replica code has reduced values over the replicas.
on_reduced = Event()

#: ``told(tree)``: bare arrays are the only replica's own: a PerReplica if there were more.
on_lone_value = Event()

#: ``told(run)``: a replica function has been traced and emitted, a `replica.run.TracedRun`.
on_traced = Event()

#: ``told(run, why)``: the layer `lint` has found why each result of a `TracedRun` is equal, or
#: differs: (its path, whether it may differ, why).
on_proved = Event()

#: ``told(reads, writes, results, described)``: a whole step was traced: its variables, for each
#: array result its path and whether it may differ, and what each function of `describe` returned.
on_program = Event()

#: ``told(finding)``: something is probably wrong; returns whether nobody else is to be told.
on_finding = Event()

#: ``describe(leaves)`` returns what a layer knows of the results of a trace, for `on_call`.
describe = Event()

#: Library -> the module of distjax whose `LAYER` takes its objects into programs (see
#: `objects.stateful`); that is imported once the library has been.
object_layers: dict[str, str] = {}


def inside(event: Event, *told: PyTree) -> contextlib.AbstractContextManager[Any]:
    """Returns the context that the functions of `at_work` or `in_merge` make together."""
    entered = contextlib.ExitStack()
    for make in event:
        entered.enter_context(make(*told))
    return entered


def tell(event: Event, *told: PyTree) -> list[Any]:
    """Tells an event; returns what was answered, but for None."""
    answers = [hear(*told) for hear in event]
    return [answer for answer in answers if answer is not None]
