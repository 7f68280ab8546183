"""Build: a program compiled for the variables that its traces have met so far.

The variables that a trace reads or writes become inputs and (donated) outputs of a `jax.jit`. A
signature is traced before `jit` sees it, and offered to it. One that meets more variables makes the
next build, which threads these too.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from distjax import jax_compat
from distjax.cluster.job import job
from distjax.collectives.throttle import is_throttled, make_token
from distjax.objects.reached import Reached
from distjax.program.discovery import Discovered, discover
from distjax.program.output_spec import OutputSpec, as_static_output
from distjax.program.signatures import Jitted, Signature, Signatures
from distjax.program.step import Step
from distjax.replica.facts import Fact
from distjax.typing import PyTree
from distjax.variables.creation_log import CreationLog
from distjax.variables.storage import OwnedArrays, StoredArray
from distjax.variables.variable import Variable

#: Elements of a result that may be held for the next launch.
_SMALL = 256


class UnknownVariables(Exception):
    """A trace inside of `jit` met variables that its build does not thread, or does not write."""

    def __init__(self, discovered: Discovered):
        super().__init__()
        self.discovered = discovered


class NotCompiled(Exception):
    """A call met what is to be traced first, outside of `jit` and without the lock."""


@dataclasses.dataclass(frozen=True, eq=False)
class Build:
    """One compiled program and the variables that it threads.

    Attributes:
      name: the user's name of the function.
      signatures: the compiled functions.
      writes: variables whose arrays are donated and replaced.
      reads: variables that are only read.
      owned: the arrays of `writes`.
      read_arrays: the arrays of `reads`.
      lock: held while arrays of these variables are collected, donated and replaced.
      spans_devices: whether the program runs on several devices, as far as a trace and its
        arguments show.
      spans_processes: whether it runs on devices of several processes.
      is_in_job: whether this process is one of several.
      offered: by thread, the trace that `jit` compiles if it has none for the arguments; None: the
        step may be traced inside of `jit`.
      is_remote: whether an array of `writes` is kept elsewhere: see `StoredArray`.
      facts: what the last trace knew of each array result.
      reached: the objects that the function used, and how it came to them.
    """

    name: str
    signatures: Signatures
    writes: tuple[Variable, ...]
    reads: tuple[Variable, ...]
    owned: OwnedArrays
    read_arrays: tuple[StoredArray, ...]
    lock: AbstractContextManager[Any]
    spans_devices: bool
    spans_processes: bool
    is_in_job: bool
    offered: dict[int, Discovered | None]
    is_remote: bool
    facts: list[Fact | None] = dataclasses.field(default_factory=list)
    reached: Reached = dataclasses.field(default_factory=Reached)

    @property
    def variables(self) -> tuple[Variable, ...]:
        """All variables that the program threads."""
        return *self.writes, *self.reads

    def lower(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> jax.stages.Lowered | None:
        """Returns the program lowered for these arguments; None: they have to be traced first.

        No lock is held meanwhile.
        """
        for variable in self.variables:
            if variable.storage is None:  # deleted is no matter here: another thread may step it
                variable.stored.require()
        signature = self.signatures.find(args, kwargs)
        if signature is None:
            return None
        try:
            return signature.jitted.lower(
                self._collect_written(), self.collect_read(), kwargs, *args
            )
        except NotCompiled:
            return None
        finally:
            self.offered.pop(threading.get_ident(), None)

    def require_signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
        """Returns the signature of these arguments; raises NotCompiled if they seem to be new.

        New ones may be taken for known ones, whose function refuses them.
        """
        known = self.signatures
        signature = (known.find if self.is_in_job else known.guess)(args, kwargs)
        if signature is None:
            raise NotCompiled
        return signature

    def record_agreed(self, args: tuple[Any, ...], kwargs: dict[str, Any], agreed: int) -> None:
        """Records what the processes of a job agreed on for these arguments."""
        signature = self.signatures.find(args, kwargs)
        if signature is not None:
            signature.agreed = agreed

    def covers(self, found: Discovered) -> bool:
        """Returns whether the program has inputs and outputs for all variables of a trace."""
        # A variable that is threaded, but only read so far, has no output to be written to.
        return (
            {*self.variables} >= {*found.reads, *found.created}
            and {*self.writes} >= {*found.writes}
            and (self.spans_devices or not (found.spans_devices or found.takes_spread))
            and (self.spans_processes or not found.spans_processes)
        )

    def offer(self, found: Discovered, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> None:
        """Offers a trace of these arguments to the next call of this thread."""
        self.signatures.add(args, kwargs, self._collect_all())
        found.record(self.reached)
        self.facts[:] = found.facts
        self.offered[threading.get_ident()] = found

    def switch(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> bool:
        """Turns to the function compiled for arguments on these devices, if it was another."""
        expected = self.signatures.expect_any()
        signature = self.signatures.find(args, kwargs)
        if signature is None:
            return False
        is_another = signature.switch((args, kwargs, self._collect_all()))
        return is_another or expected not in (None, signature)

    def _collect_all(self) -> Sequence[Any]:
        return [*self._collect_written(), *self.collect_read()]

    def _collect_written(self) -> Sequence[Any]:
        return [variable.stored.read() for variable in self.writes]

    def collect_read(self) -> Sequence[Any]:
        """Returns the arrays of the variables that are only read."""
        return [stored.read() for stored in self.read_arrays]


def make_build(step: Step, discovered: Discovered, former: Build | None) -> Build:
    """Returns the build that threads the variables of one more trace.

    Args:
      step: what is compiled.
      discovered: the trace.
      former: the build before, or None.
    """
    known = (former.writes, former.reads) if former is not None else ((), ())
    writes = dict.fromkeys((*known[0], *discovered.writes))
    reads = dict.fromkeys(v for v in (*known[1], *discovered.reads) if v not in writes)
    threaded = (*writes, *reads)
    offered: dict[int, Discovered | None] = {}
    needs_end = job() is not None or is_throttled()

    def emit(
        written: Sequence[Any], read: Sequence[Any], kwargs: dict[str, Any], *args: PyTree
    ) -> Any:
        thread = threading.get_ident()
        if thread not in offered:
            raise NotCompiled
        found = offered.pop(thread)
        values = dict(zip(threaded, (*written, *read), strict=True))
        if found is None or not found.fits(args, kwargs, values):
            found = discover(step, args, kwargs, CreationLog())
            found.record(build.reached)
        if not build.covers(found):
            raise UnknownVariables(found)
        arrays, spec, new = found.evaluate(args, kwargs, values)
        token = None
        if needs_end and (found.spans_devices or found.spans_processes):
            token = _show_end(spec, arrays, args, kwargs, step.donate_argnums)
        outputs = spec.pack(arrays) if job() is None else arrays
        # The new values come first: jit pairs donated inputs with the first outputs of their
        # shape, and on one device it does not ask in which memory (JAX 0.12 too).
        written = [new.get(v, values[v]) for v in writes]
        return written, as_static_output(spec), outputs, token

    def jit_anew() -> Jitted:
        body = lambda *operands: emit(*operands)  # JAX shares caches between jits of one function
        body.__name__ = body.__qualname__ = discovered.name
        return jax.jit(body, donate_argnums=(0, *(3 + n for n in step.donate_argnums)))

    spans = (discovered,) if former is None else (discovered, former)
    build = Build(
        name=step.name,
        signatures=Signatures(jit_anew),
        writes=tuple(writes),
        reads=tuple(reads),
        owned=OwnedArrays(),
        read_arrays=tuple(v.stored for v in reads),
        lock=_make_lock(threaded),
        spans_devices=discovered.takes_spread or any(each.spans_devices for each in spans),
        spans_processes=any(each.spans_processes for each in (*spans, *threaded)),
        is_in_job=job() is not None,
        offered=offered,
        is_remote=any(v.stored.is_remote for v in writes),
    )
    return build


def _show_end(
    spec: OutputSpec,
    results: Sequence[Any],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    donate_argnums: Sequence[int],
) -> jax.Array | None:
    """Sets in `spec` which result shows that the program has completed; if none, returns a token.

    The token is one more result, which shows it.
    """
    donated = [arg for i, arg in enumerate(args) if i in donate_argnums]
    spec.completion = _find_completion(results, (args, kwargs), donated)
    spec.is_throttled = is_throttled()
    return make_token() if spec.completion is None else None


def _find_completion(results: Sequence[Any], inputs: PyTree, donated: PyTree) -> int | None:
    """Returns the number of a result that shows that the program has completed, as a loss does.

    It is held for a while (see `Ledger`, `throttle`), so it has to be small; JAX hands on an input
    at once; and what takes the place of a donated input is gone with the next call.
    """
    kinds = {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(donated)}
    given = {id(leaf) for leaf in jax.tree.leaves(inputs)}
    for number, x in enumerate(results):
        if not isinstance(x, jax.Array):  # a constant of the program
            continue
        is_kept = x.size <= _SMALL and (x.shape, x.dtype) not in kinds
        if is_kept and id(x) not in given and not jax_compat.is_key_dtype(x.dtype):
            return number
    return None


def _make_lock(variables: Iterable[Variable]) -> AbstractContextManager[Any]:
    """Returns the lock of the variables: that of their strategy, or of several in one order."""
    locks = {id(v.stored.lock): v.stored.lock for v in variables}
    if len(locks) == 1:
        return next(iter(locks.values()))
    return _LocksInOrder([locks[key] for key in sorted(locks)])


class _LocksInOrder:
    """Several locks, always taken in the same order, so that no two threads wait for each other."""

    def __init__(self, locks: Sequence[AbstractContextManager[Any]]):
        self._locks = locks

    def __enter__(self) -> None:
        for lock in self._locks:
            lock.__enter__()

    def __exit__(self, *exception: object) -> None:
        for lock in reversed(self._locks):
            lock.__exit__(None, None, None)
