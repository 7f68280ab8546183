"""Program: a cross-replica function compiled once, with variables threaded.

A discovery trace finds which variables the function reads and writes. They
become inputs and (donated) outputs of one `jax.jit`, which is the cache for
shapes, trees and shardings. What belongs to one signature and is no array
(Python results, the tree of results) leaves in the auxiliary data of the output
tree, since a call that hits runs no Python of ours inside `jit`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from distjax import jax_compat
from distjax.collectives.throttle import make_token, throttle
from distjax.context import frames
from distjax.errors import ContextError, TraceLeakError, message
from distjax.program.discovery import (
    Discovered,
    OutputSpec,
    as_static_output,
    discover,
    from_static_output,
)
from distjax.program.retraces import RetraceWatch
from distjax.replica.arguments import mark_static
from distjax.variables.creation_log import CreationLog, require_no_trace
from distjax.variables.donation import aliased_variables, copy_aliased_storage, storage_lock


class _UnknownVariables(Exception):
    """A trace met variables that the program does not thread yet."""

    def __init__(self, discovered: Discovered):
        super().__init__()
        self.discovered = discovered


class Program:
    """``call(args, kwargs)`` as one compiled program.

    Args:
      name: the user's name of the function.
      call: runs the function in the global view, inside a trace.
      frame: makes the frame that `call` runs in, given the state of variables.
      place: puts arguments that live elsewhere on the program's devices.
      donate_argnums: positional arguments whose buffers are donated.
      argument_names: the user's names of the positional arguments.
    """

    def __init__(
        self,
        name: str,
        call: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        frame: Callable[[Any], frames.Frame],
        place: Callable[[Any], Any],
        donate_argnums: tuple[int, ...] = (),
        argument_names: Sequence[str] = (),
    ):
        self.name = name
        self._call, self._frame, self._place = call, frame, place
        self._donate_argnums, self._argument_names = donate_argnums, argument_names
        self._lock = threading.RLock()
        self._reads: tuple[Any, ...] = ()
        self._writes: tuple[Any, ...] = ()
        self._written = frozenset[Any]()
        self._threads = False
        self._marks_static = False
        self._jitted: Any = None  # a jax.stages.Wrapped, made at the first call
        self._pending: Discovered | None = None
        self._recreated: tuple[str, ...] = ()
        self._spans_devices = False
        self._watch = RetraceWatch(name, argument_names)

    # -- calling --------------------------------------------------------------

    def __call__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        finish: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Runs the program and returns the user's results, or what `finish` makes of them.

        `finish` is part of the step: where a signal raises meanwhile, it is called once more.
        """
        if self._jitted is None or self._marks_static:
            args, kwargs = self._mark_static(args, kwargs)
        donated, tree = self._split_donated(args, kwargs)
        if self._jitted is None:
            self._prepare(donated, tree)
        if self._recreated:
            raise ContextError(_unguarded_text(self.name, self._recreated))
        try:
            result, spec = self._run(donated, tree, finish)
        except _UnknownVariables as unknown:
            self._rebuild(unknown.discovered, donated, tree)
            result, spec = self._run(donated, tree, finish)
        except (TypeError, ValueError, AttributeError, KeyError, RuntimeError) as error:
            if "deleted" in str(error):
                self._require_undeleted(donated)
            result, spec = self._run(*self._retry_args(error, args, kwargs), finish)
        if spec.recreated:
            self._recreated = spec.recreated
        return result

    def _run(self, donated: Any, tree: Any, finish: Any) -> tuple[Any, OutputSpec]:
        if donated and self._spans_devices:
            self._require_undeleted(donated)  # JAX 0.10 ends the process where it meets one
        if not self._threads and finish is None:  # nothing that a signal could leave half done
            _, arrays, static, token = self._jitted((), donated, (), tree)
            spec = from_static_output(static)
            result = spec.unpack(arrays)
        elif not self._threads:
            result, spec, token = self._start((), donated, (), tree, finish)
        else:
            if self._writes and jax_compat.tracing():
                raise TraceLeakError(self._leak_text())
            with storage_lock:
                if aliased_variables:
                    copy_aliased_storage(self._written)
                written = [v.storage for v in self._writes]
                read = [v.storage for v in self._reads]
                result, spec, token = self._start(written, donated, read, tree, finish)
        if token is not None:
            throttle(token)
        return result, spec

    def _start(
        self, written: Sequence[Any], donated: Any, read: Sequence[Any], tree: Any, finish: Any
    ) -> tuple[Any, OutputSpec, Any]:
        """Starts the compiled program; stores what it returned even if a signal raises."""
        returned: list[Any] = []
        try:
            # In C from the call to the list: a signal that raises (KeyboardInterrupt) as the
            # call returns would else drop the new values, and the former ones are donated.
            returned.extend(map(self._jitted, (written,), (donated,), (read,), (tree,)))
            arrays = returned[0][1]
            if self._threads and arrays and isinstance(arrays[0], jax_compat.Tracer):
                self._require_eager()
            return self._write_back(returned[0], finish)
        except TraceLeakError:
            raise
        except BaseException:
            if returned:
                self._write_back(returned[0], finish)
            else:
                self._lose_deleted(written)
            raise

    def _write_back(self, returned: Any, finish: Any) -> tuple[Any, OutputSpec, Any]:
        new, arrays, static, token = returned
        for variable, array in zip(self._writes, new, strict=True):
            variable.storage = array
        spec = from_static_output(static)
        result = spec.unpack(arrays)
        return result if finish is None else finish(result), spec, token

    def _lose_deleted(self, written: Sequence[Any]) -> None:
        """Marks the variables whose arrays an interrupted call took with it."""
        for variable, former in zip(self._writes, written, strict=True):
            if isinstance(former, jax.Array) and former.is_deleted():
                variable.lose_value()

    def _retry_args(self, error: Exception, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Returns arguments that `jit` takes in place of those it refused, or re-raises."""
        for variable in (*self._writes, *self._reads):
            variable.require_present()
        marked = mark_static((args, kwargs), self._argument_names)
        if not self._marks_static and jax.tree.structure(marked) != jax.tree.structure(
            (args, kwargs)
        ):
            self._marks_static = True
            return self._split_donated(*marked)
        if jax_compat.has_explicit_mesh(marked):  # JAX says a KeyError of an axis, and more
            return self._split_donated(*jax_compat.off_explicit_meshes(marked))
        if "incompatible devices" in str(error):
            return self._place(self._split_donated(*marked))
        raise error

    def lower(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the `jax.stages.Lowered` of the program for these arguments."""
        donated, tree = self._split_donated(*self._mark_static(args, kwargs))
        if self._jitted is None:
            self._prepare(donated, tree)
        for attempt in range(3):
            jitted: Any = self._jitted
            try:
                return jitted.lower(
                    [v.storage for v in self._writes],
                    donated,
                    [v.storage for v in self._reads],
                    tree,
                )
            except _UnknownVariables as unknown:
                if attempt:
                    raise
                self._rebuild(unknown.discovered, donated, tree)
            except ValueError as error:
                if attempt == 2 or "incompatible devices" not in str(error):
                    raise
                donated, tree = self._place((donated, tree))

    def _mark_static(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        marked = mark_static((args, kwargs), self._argument_names)
        if jax.tree.structure(marked) != jax.tree.structure((args, kwargs)):
            self._marks_static = True
        return marked

    def _split_donated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if not self._donate_argnums:
            return (), (args, kwargs)
        donated = tuple(args[i] for i in self._donate_argnums)
        kept = tuple(None if i in self._donate_argnums else a for i, a in enumerate(args))
        return donated, (kept, kwargs)

    def _join_donated(self, donated: Any, tree: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = list(tree[0]), tree[1]
        for index, arg in zip(self._donate_argnums, donated, strict=True):
            args[index] = arg
        return tuple(args), kwargs

    # -- building -------------------------------------------------------------

    def _prepare(self, donated: Any, tree: Any) -> None:
        with self._lock:
            if self._jitted is not None:
                return
            self._rebuild(self._discover(donated, tree, CreationLog()), donated, tree)

    def _discover(self, donated: Any, tree: Any, creation_log: CreationLog) -> Discovered:
        def call(packed: Any) -> Any:
            return self._call(*self._join_donated(*packed))

        return discover(call, (donated, tree), self._frame, creation_log)

    def _rebuild(self, discovered: Discovered, donated: Any, tree: Any) -> None:
        """Threads the variables of one more trace, once those it created exist."""
        with self._lock:
            created = discovered.created
            if created:
                require_no_trace(created[0].name)
                discovered.initialize_created(self._place((donated, tree)))
                discovered = self._discover(donated, tree, CreationLog(made=created))
            writes = dict.fromkeys((*self._writes, *discovered.writes))
            reads = dict.fromkeys((*self._reads, *discovered.reads))
            self._writes = tuple(writes)
            self._reads = tuple(v for v in reads if v not in writes)
            self._written = frozenset(writes)
            self._threads = bool(writes or reads)
            self._pending = discovered
            self._jitted = jax.jit(self._body(), donate_argnums=(0, 1))

    def _body(self) -> Callable[..., Any]:
        writes, reads = self._writes, self._reads
        threaded, written_here = {*writes, *reads}, frozenset(writes)

        def body(written: Sequence[Any], donated: Any, read: Sequence[Any], tree: Any) -> Any:
            discovered, self._pending = self._pending, None
            if discovered is None or not discovered.fits((donated, tree)):
                self._watch.record((donated, tree))
                discovered = self._discover(donated, tree, CreationLog())
            touched = (*discovered.reads, *discovered.created)
            # A variable that is threaded, but only read so far, has no output to be written to.
            if not (threaded.issuperset(touched) and written_here.issuperset(discovered.writes)):
                raise _UnknownVariables(discovered)
            values = dict(zip((*writes, *reads), (*written, *read), strict=True))
            arrays, spec, new = discovered.evaluate((donated, tree), values)
            self._spans_devices = discovered.spans_devices
            token = make_token() if discovered.spans_devices else None
            # The new values come first: jit pairs donated inputs with the first outputs of their
            # shape, and on one device it does not ask in which memory (JAX 0.12 too).
            return [new.get(v, values[v]) for v in writes], arrays, as_static_output(spec), token

        body.__name__ = body.__qualname__ = self.name.rsplit(".", 1)[-1]
        return body

    def _require_undeleted(self, donated: Any) -> None:
        """Raises a RuntimeError if an argument to donate has been donated before.

        Its first array tells: those of one argument are donated together.
        """
        for number, arg in zip(self._donate_argnums, donated, strict=True):
            for leaf in jax.tree.leaves(arg)[:1]:
                is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax_compat.Tracer)
                if is_array and leaf.is_deleted():
                    names = self._argument_names
                    name = names[number] if number < len(names) else str(number)
                    raise RuntimeError(_deleted_text(self.name, name, leaf))

    def _require_eager(self) -> None:
        """Raises if the program was called in a JAX trace that bakes variables in."""
        if jax_compat.staging():
            raise TraceLeakError(self._leak_text())

    def _leak_text(self) -> str:
        variable = (*self._writes, *self._reads)[0]
        return message(
            f"{self.name} reads or writes variable {variable.name!r} and needs to be called "
            "outside of JAX traces, or inside distjax.jit",
            got="a call inside jax.jit, grad or another JAX trace",
            why="the trace would bake in the variable's value of today and lose its new one",
            fix="compile the step with distjax.jit in place of jax.jit: it follows variables",
        )


def _deleted_text(function: str, argument: str, array: jax.Array) -> str:
    return message(
        f"{function} needs argument {argument} to hold arrays that are still there",
        got=f"an array of {array.dtype}{list(array.shape)} that was donated before. Array has been "
        "deleted",
        why=f"{argument} is named in donate_argnums, so each call reuses its memory",
        fix=f"go on with what the call returns: {argument} = {function}({argument}, ...)",
    )


def _unguarded_text(name: str, variables: tuple[str, ...]) -> str:
    return message(
        f"{name} needs to create its variables once",
        got=f"a second call, and not guarded: the constructor of {', '.join(map(repr, variables))}",
        why="the constructor runs at every trace, but a compiled call runs none",
        fix="create the variables outside, or guard them: "
        "`if self.v is None: self.v = dj.Variable(...)`",
    )
