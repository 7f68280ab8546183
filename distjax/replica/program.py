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
from distjax.collectives.launch import launched, make_ticket
from distjax.context import frames
from distjax.errors import ContextError, TraceLeakError, explain
from distjax.replica.arguments import hide_objects
from distjax.replica.discovery import Discovered, ResultForm, boxed, discover, unboxed
from distjax.replica.retraces import RetraceWatch
from distjax.variables.creation import Creation, require_no_trace
from distjax.variables.lending import keep_lent_arrays, lent_variables, storage_lock


class _NewVariables(Exception):
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
        self._hides_objects = False
        self._jitted: Any = None  # a jax.stages.Wrapped, made at the first call
        self._pending: Discovered | None = None
        self._is_unguarded = self._spans_devices = False
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
        if self._jitted is None or self._hides_objects:
            args, kwargs = self._hidden(args, kwargs)
        donated, tree = self._split(args, kwargs)
        if self._jitted is None:
            self._prepare(donated, tree)
        if self._is_unguarded:
            raise ContextError(_unguarded_text(self.name))
        try:
            result, form = self._run(donated, tree, finish)
        except _NewVariables as news:
            self._adopt(news.discovered, donated, tree)
            result, form = self._run(donated, tree, finish)
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            if "deleted" in str(error):
                self._require_undeleted(donated)
            result, form = self._run(*self._repaired(error, args, kwargs), finish)
        if form.made_again:
            self._is_unguarded = True
        return result

    def _run(self, donated: Any, tree: Any, finish: Any) -> tuple[Any, ResultForm]:
        if donated and self._spans_devices:
            self._require_undeleted(donated)  # JAX 0.10 ends the process where it meets one
        if not self._threads and finish is None:  # nothing that a signal could leave half done
            _, arrays, box, ticket = self._jitted((), donated, (), tree)
            form = unboxed(box)
            result = form.unpack(arrays)
        elif not self._threads:
            result, form, ticket = self._start((), donated, (), tree, finish)
        else:
            if self._writes and jax_compat.tracing():
                raise TraceLeakError(self._leak_text())
            with storage_lock:
                if lent_variables:
                    keep_lent_arrays(self._written)
                written = [v.storage for v in self._writes]
                read = [v.storage for v in self._reads]
                result, form, ticket = self._start(written, donated, read, tree, finish)
        if ticket is not None:
            launched(ticket)
        return result, form

    def _start(
        self, written: Sequence[Any], donated: Any, read: Sequence[Any], tree: Any, finish: Any
    ) -> tuple[Any, ResultForm, Any]:
        """Starts the compiled program; stores what it returned even if a signal raises."""
        returned: list[Any] = []
        try:
            # In C from the call to the list: a signal that raises (KeyboardInterrupt) as the
            # call returns would else drop the new values, and the former ones are donated.
            returned.extend(map(self._jitted, (written,), (donated,), (read,), (tree,)))
            arrays = returned[0][1]
            if self._threads and arrays and isinstance(arrays[0], jax_compat.Tracer):
                self._require_eager()
            return self._stored(returned[0], finish)
        except TraceLeakError:
            raise
        except BaseException:
            if returned:
                self._stored(returned[0], finish)
            else:
                self._lose_deleted(written)
            raise

    def _stored(self, returned: Any, finish: Any) -> tuple[Any, ResultForm, Any]:
        new, arrays, box, ticket = returned
        for variable, array in zip(self._writes, new, strict=True):
            variable.storage = array
        form = unboxed(box)
        result = form.unpack(arrays)
        return result if finish is None else finish(result), form, ticket

    def _lose_deleted(self, written: Sequence[Any]) -> None:
        """Marks the variables whose arrays an interrupted call took with it."""
        for variable, former in zip(self._writes, written, strict=True):
            if isinstance(former, jax.Array) and former.is_deleted():
                variable.lose_value()

    def _repaired(self, error: Exception, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Returns arguments that `jit` takes in place of those it refused, or re-raises."""
        for variable in (*self._writes, *self._reads):
            variable.require_present()
        hidden = hide_objects((args, kwargs), self._argument_names)
        if not self._hides_objects and jax.tree.structure(hidden) != jax.tree.structure(
            (args, kwargs)
        ):
            self._hides_objects = True
            return self._split(*hidden)
        if "incompatible devices" in str(error):
            return self._place(self._split(*hidden))
        raise error

    def lower(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the `jax.stages.Lowered` of the program for these arguments."""
        donated, tree = self._split(*self._hidden(args, kwargs))
        if self._jitted is None:
            self._prepare(donated, tree)
        for attempt in range(2):
            jitted: Any = self._jitted
            try:
                return jitted.lower(
                    [v.storage for v in self._writes],
                    donated,
                    [v.storage for v in self._reads],
                    tree,
                )
            except _NewVariables as news:
                if attempt:
                    raise
                self._adopt(news.discovered, donated, tree)

    def _hidden(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        hidden = hide_objects((args, kwargs), self._argument_names)
        if jax.tree.structure(hidden) != jax.tree.structure((args, kwargs)):
            self._hides_objects = True
        return hidden

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if not self._donate_argnums:
            return (), (args, kwargs)
        donated = tuple(args[i] for i in self._donate_argnums)
        kept = tuple(None if i in self._donate_argnums else a for i, a in enumerate(args))
        return donated, (kept, kwargs)

    def _join(self, donated: Any, tree: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = list(tree[0]), tree[1]
        for index, arg in zip(self._donate_argnums, donated, strict=True):
            args[index] = arg
        return tuple(args), kwargs

    # -- building -------------------------------------------------------------

    def _prepare(self, donated: Any, tree: Any) -> None:
        with self._lock:
            if self._jitted is not None:
                return
            self._adopt(self._discover(donated, tree, Creation()), donated, tree)

    def _discover(self, donated: Any, tree: Any, creation: Creation) -> Discovered:
        def call(packed: Any) -> Any:
            return self._call(*self._join(*packed))

        return discover(call, (donated, tree), self._frame, creation)

    def _adopt(self, discovered: Discovered, donated: Any, tree: Any) -> None:
        """Threads the variables of one more trace, once those it created exist."""
        with self._lock:
            created = discovered.created
            if created:
                require_no_trace(created[0].name)
                discovered.initialize_created(self._place((donated, tree)))
                discovered = self._discover(donated, tree, Creation(made=created))
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
                self._watch.saw((donated, tree))
                discovered = self._discover(donated, tree, Creation())
            touched = (*discovered.reads, *discovered.created)
            # A variable that is threaded, but only read so far, has no output to be written to.
            if not (threaded.issuperset(touched) and written_here.issuperset(discovered.writes)):
                raise _NewVariables(discovered)
            values = dict(zip((*writes, *reads), (*written, *read), strict=True))
            arrays, form, new = discovered.evaluate((donated, tree), values)
            self._spans_devices = discovered.spans_devices
            ticket = make_ticket() if discovered.spans_devices else None
            # The new values come first: jit pairs donated inputs with the first outputs of their
            # shape, and on one device it does not ask in which memory (JAX 0.12 too).
            return [new.get(v, values[v]) for v in writes], arrays, boxed(form), ticket

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
        return explain(
            f"{self.name} reads or writes variable {variable.name!r} and needs to be called "
            "outside of JAX traces, or inside distjax.jit",
            got="a call inside jax.jit, grad or another JAX trace",
            why="the trace would bake in the variable's value of today and lose its new one",
            fix="compile the step with distjax.jit in place of jax.jit: it follows variables",
        )


def _deleted_text(function: str, argument: str, array: jax.Array) -> str:
    return explain(
        f"{function} needs argument {argument} to hold arrays that are still there",
        got=f"an array of {array.dtype}{list(array.shape)} that was donated before. Array has been "
        "deleted",
        why=f"{argument} is named in donate_argnums, so each call reuses its memory",
        fix=f"go on with what the call returns: {argument} = {function}({argument}, ...)",
    )


def _unguarded_text(name: str) -> str:
    return explain(
        f"{name} needs to create its variables once",
        got="a second call of a function whose variable constructors are not guarded",
        why="the constructor runs at every trace, but a compiled call runs none",
        fix="create the variables outside, or guard them: "
        "`if self.v is None: self.v = dj.Variable(...)`",
    )
