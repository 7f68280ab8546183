"""One compiled program and its launch: arrays of variables in, arrays out, never half stored.

The variables that a step reads or writes are inputs of a `jax.jit`, those that it writes donated
inputs and outputs. A launch is plain Python, under the lock of the variables: state read, passed
in, swapped back. Nothing is compiled there: a step is traced and compiled before, and the body of
`jit` refuses arguments that it has not met, with `NotTraced`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax

from distjax._src import hooks, jax_compat
from distjax._src.collectives.eager import is_throttled, throttle
from distjax._src.interrupts import interrupts
from distjax._src.jax_compat import EVAL_TRACE, trace_state
from distjax._src.objects.reached import Reached
from distjax._src.program.discovery import (
    Discovered,
    OutputSpec,
    Step,
    completion_of,
    show_end,
)
from distjax._src.typing import PyTree
from distjax._src.variables.storage import (
    NewestArrays,
    SeveralLocks,
    VariableLock,
    keep_formers,
)
from distjax.errors import TraceLeakError, message

#: Writes the state of objects back, and returns what builds the user's results.
Finish = Callable[[Any], Callable[[], Any]]


class NotTraced(Exception):
    """`jit` met arguments that are to be traced first, without the lock; nothing has happened."""


class _Offer(threading.local):
    """The trace that this thread lets `jit` use; None: it is to refuse what is new."""

    found: Discovered | None = None


class Build:
    """A step, compiled for the variables that its traces, and those of `former`, have met so far.

    Attributes:
      writes: variables whose arrays are donated and replaced.
      reads: variables that are only read.
      lock: held while arrays of these variables are collected, donated and replaced.
      facts: what the last trace knew of each array result.
      spans_devices: whether the program runs on several devices, as far as traces and their
        arguments show.
      meshes: those of its arguments and equations.
      reached: the objects that the function used, and how it came to them.
    """

    def __init__(self, step: Step, found: Discovered, former: Build | None):
        known = (former.writes, former.reads) if former is not None else ((), ())
        self.name, self.step = step.name, step
        self.facts: Any = None
        writes = dict.fromkeys((*known[0], *found.writes))
        reads = dict.fromkeys((*known[1], *found.reads))
        self.writes, self.reads = tuple(writes), tuple(v for v in reads if v not in writes)
        self.variables = (*self.writes, *self.reads)
        self.reached = Reached()
        self.record(found)
        self.spans_devices = (
            found.takes_spread
            or found.spans_devices
            or (former is not None and former.spans_devices)
        )
        self.meshes = found.meshes | (former.meshes if former is not None else frozenset())
        locks = {id(v.stored.lock): v.stored.lock for v in self.variables} or {0: VariableLock()}
        is_one = len(locks) == 1
        self.lock: Any = next(iter(locks.values())) if is_one else SeveralLocks(locks.values())
        launchers = (launch(self) for launch in hooks.launchers)
        self._launch_elsewhere = next(filter(None, launchers), None)
        # Whether arrays stay in the list after a launch; others change what is kept elsewhere.
        self._keeps = is_one and self._launch_elsewhere is None
        self._newest: NewestArrays | None = None
        self._offer = _Offer()
        self.watchers: list[hooks.Watcher] = hooks.tell(hooks.watchers, self)
        if is_throttled() and self.spans_devices:
            self.watchers.append(hooks.Watcher(after=_throttle))
        self._begins = [w.begin for w in self.watchers if w.begin is not None]
        self._ends = [w.end for w in self.watchers if w.end is not None]
        self._afters = [w.after for w in self.watchers if w.after is not None]
        #: Who is told of a program before its first launch, though it may have no variables.
        self.on_compiled = [w.compiled for w in self.watchers if w.compiled is not None]
        # A new function, since JAX's caches go by it, with the names that JAX's errors tell.
        body = lambda written, read, kwargs, *args: self._emit(written, read, kwargs, *args)
        body.__name__ = body.__qualname__ = found.name
        self.jitted = jax.jit(body, donate_argnums=(0, *(3 + n for n in step.donate_argnums)))

    def __del__(self) -> None:
        # The lock lives as long as its strategy, and must not keep arrays of variables that are
        # gone. A collection may interrupt any code, so this does not wait: the next launch does it.
        newest = getattr(self, "_newest", None)
        if newest is None or not self._keeps or not self.lock.acquire(blocking=False):
            return
        try:
            if self.lock.newest is newest:
                self.lock.settle()
            if self.lock.shown is newest:
                self.lock.hide()
        finally:
            self.lock.release()

    def _emit(
        self, written: Sequence[Any], read: Sequence[Any], kwargs: dict[str, Any], *args: PyTree
    ) -> Any:
        """The body of `jit`: (new values of `writes`, how to build the results, these, a token).

        The new values come first: jit pairs donated inputs with the first outputs of their shape,
        and on one device it does not ask in which memory (JAX 0.12 too).
        """
        found = self._offer.found
        if found is None:
            raise NotTraced
        values = dict(zip(self.variables, (*written, *read), strict=True))
        arrays, spec, new = found.evaluate(args, kwargs, values)
        token = None
        if self.watchers and found.spans_devices:
            token = show_end(spec, arrays, args, kwargs, self.step.donate_argnums)
        written = [new.get(v, values[v]) for v in self.writes]
        outputs = spec.unpack(arrays) if spec.is_built else arrays
        return written, {spec: None}, outputs, token

    def record(self, found: Discovered) -> None:
        """Records what one more trace reached, and what it knew of its results."""
        if self.facts is not found.facts:
            self.facts = found.facts
            found.record(self.reached)

    def covers(self, found: Discovered) -> bool:
        """Returns whether the program has inputs and outputs for all variables of a trace."""
        # A variable that is threaded, but only read so far, has no output to be written to.
        return (
            {*self.variables} >= {*found.reads, *found.created}
            and {*self.writes} >= {*found.writes}
            and (self.spans_devices or not (found.spans_devices or found.takes_spread))
            and self.meshes >= found.meshes
        )

    def offering(self, found: Discovered | None) -> contextlib.AbstractContextManager[None]:
        """A context in which `jit` may compile this trace, or run it."""
        return contextlib.nullcontext() if found is None else self._offering(found)

    @contextlib.contextmanager
    def _offering(self, found: Discovered) -> Generator[None]:
        self._offer.found = found
        try:
            yield
        finally:
            self._offer.found = None

    def lower(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], found: Discovered | None = None
    ) -> jax.stages.Lowered:
        """Returns the program lowered, without any lock; raises NotTraced for what is new to it."""
        stored = [v.stored.read() for v in self.variables]
        for variable, array in zip(self.variables, stored, strict=True):
            if array is None:  # deleted is no matter here: another thread may step it
                variable.stored.require()
        operands = stored[: len(self.writes)], stored[len(self.writes) :], kwargs, *args
        with self.offering(found):
            return self.jitted.lower(*operands)

    # -- the launch -------------------------------------------------------------

    def launch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], finish: Finish | None = None
    ) -> tuple[Any, OutputSpec]:
        """Runs the program; returns what `finish` does, or its outputs, and how results are built.

        No code of the user runs here: the classes of the tree that the step returns are called by
        the caller, who launches nothing again because they raise. If it raises NotTraced, the
        arguments are new, and nothing has happened.
        """
        if trace_state.value is not EVAL_TRACE and self.variables:
            require_outside_traces(self)
        if self._launch_elsewhere is not None:
            return self._launch_elsewhere(args, kwargs, finish)
        lock = self.lock
        returned: Any = None
        with lock:
            waits = interrupts.hold()
            try:
                newest = self._newest
                if newest is None or (lock.newest is not newest and lock.shown is not newest):
                    newest = self._take()
                for begin in self._begins:
                    begin(self, args, kwargs)
                try:
                    returned = self.jitted(newest.arrays, newest.read, kwargs, *args)
                    newest.arrays, newest.are_here = returned[0], True
                    if not self._keeps:
                        newest.put_back()
                    elif lock.newest is not newest or lock.shown is not None:
                        self._keep(newest)  # again: a trace inside of the launch reads variables
                except BaseException:
                    newest.put_back()
                    self._lose_deleted()
                    raise
                finally:
                    for end in self._ends:
                        end(returned)
                (spec,) = returned[1]
                result = returned[2] if finish is None else finish(spec.results(returned[2]))
            finally:
                if waits:
                    interrupts.let_go()  # Ctrl-C raises here
        for after in self._afters:
            after(returned)
        return result, spec

    def _take(self) -> NewestArrays:
        """Takes the arrays of the variables, and copies of those that must not be donated."""
        if self.writes:
            self.lock.settle()
        else:
            self.lock.show()
        stored = [v.stored for v in self.writes]
        keep_formers(stored)
        arrays = [each.take_private() for each in stored]
        read = [v.stored.array if v.stored.is_private else v.stored.require() for v in self.reads]
        self._newest = newest = NewestArrays(stored, arrays, read)
        newest.take_over()
        if self._keeps:
            self._keep(newest)
        return newest

    def _keep(self, newest: NewestArrays) -> None:
        """Makes these the arrays that the lock knows to be with a program."""
        lock = self.lock
        if lock.shown is not newest:
            lock.hide()
        if self.writes:
            lock.newest = newest
        else:
            lock.shown = newest

    def _lose_deleted(self) -> None:
        """After a launch that raised: a variable whose array was donated has no value now."""
        self.lock.settle()
        for variable in self.writes:
            array = variable.stored.read()
            if isinstance(array, jax.Array) and array.is_deleted():
                variable.stored.lose()


def _throttle(returned: tuple[Any, ...]) -> None:
    """Awaits an older program when too many are in flight: see `collectives.eager`."""
    throttle(completion_of(returned))


# -- foreign traces ------------------------------------------------------------


def require_outside_traces(build: Build) -> None:
    """Raises if the program is called in a JAX trace that would bake in its variables.

    Derivatives of a read-only program are legal: their traces hold no constants.
    """
    if jax_compat.tracing() and (build.writes or jax_compat.staging()):
        raise TraceLeakError(_leak_text(build))


def _leak_text(build: Build) -> str:
    name, variable = build.name, build.variables[0].name
    return message(
        f"{name} reads or writes variable {variable!r} and needs to be called "
        "outside of JAX traces, or inside distjax.jit",
        got="a call inside jax.jit, grad or another JAX trace",
        why="the trace would bake in the variable's current value and lose its new one",
        fix="compile the step with distjax.jit in place of jax.jit: it follows variables",
    )
