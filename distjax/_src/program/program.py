"""Program: a step compiled at its first call, and for each new kind of arguments.

A program grows. The first call traces the step and finds the variables that it touches; a build
threads them through a `jax.jit` (see `launch`). Arguments of other types are traced and compiled
when `jit` refuses them; a trace that touches more variables replaces the build by one that threads
these too. All of this happens before the lock on variables is taken.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax

from distjax._src import hooks, jax_compat, user_mesh
from distjax._src.context import frames
from distjax._src.objects.stateful import StatefulArgs, call_of, find_objects, one_at_a_time
from distjax._src.placement import is_narrowed, is_per_replica, require_held, return_to_replicas
from distjax._src.program.discovery import Discovered, Step, discover
from distjax._src.program.functions import RetraceWatch
from distjax._src.program.launch import Build, Finish, NotTraced, require_outside_traces
from distjax._src.replica.arguments import is_array, is_array_or_struct, mark_modules, mark_static
from distjax._src.typing import PyTree
from distjax._src.user_mesh import has_user_mesh
from distjax._src.variables.state import CreationLog, require_no_trace
from distjax._src.variables.storage import copy_handles, require_undeleted
from distjax.errors import ContextError, message

#: How many builds are kept whose variables are all in use by a later one.
_MAX_KEPT = 8
#: To launch it as it is, compiled, off explicit meshes, and with arguments on its devices.
_MOST_ATTEMPTS = 4

#: Raises for (args, kwargs) that a trace, which does not see layouts, cannot reject.
Require = Callable[[tuple[Any, ...], dict[str, Any]], None]
#: (args, kwargs)
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Program:
    """A step as one compiled program; `require` gets the arguments of each new signature."""

    def __init__(
        self,
        step: Step,
        on_second_call: Callable[[], None] = lambda: None,
        require: Require | None = None,
    ):
        self._step = step
        self._on_second_call = on_second_call
        self.require = require or (lambda args, kwargs: None)
        self._build: Build | None = None
        self._ready: Build | None = None  # there is nothing to do but to launch it
        # Builds for objects that the user has since put others in the place of: they may come back.
        self._formers: weakref.WeakSet[Build] = weakref.WeakSet()
        self._kept: collections.deque[Build] = collections.deque(maxlen=_MAX_KEPT)
        self._put_away: Build | None = None  # the last of these, until another is in its place
        self._marks_objects = False  # some arguments are Python objects
        self._takes_wide_integers = False
        self._prepares = bool(step.donate_argnums)  # see `_prepare`
        self._tracing = threading.RLock()  # one thread at a time traces the step
        self._num_calls = 0
        self._memory: dict[Any, Any] = {}
        self._recreated: tuple[str, ...] = ()
        self._keeps_mesh = not step.ignores_user_mesh  # until JAX refuses the step under it
        self._watch = RetraceWatch(step.name, step.argument_names)

    # -- calling --------------------------------------------------------------

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the program and returns the user's results.

        From the third call on, and without objects, a launch is all there is to do.
        """
        build, refused = self._ready, None
        if build is not None and ((is_current := build.reached.is_current) is None or is_current()):
            if self._prepares:
                args, kwargs = self._prepare(args, kwargs)
            try:
                outputs, spec = build.launch(args, kwargs)
            except Exception as error:
                refused = error
            else:
                if spec.recreated:
                    self._recreated, self._ready = spec.recreated, None
                return outputs if spec.is_built else spec.unpack(outputs)
        try:  # outside the handler, so that the user's errors are not chained to `refused`
            if not jax_compat.compiles() and frames.current().strategy.extended.compiles:
                with jax.disable_jit(False):  # a step is traced anyhow: its code sees no values
                    return self.call(args, kwargs)
            if has_user_mesh():
                call = functools.partial(self._call_slowly, refused=refused)
                return self._under_user_mesh(call, self._call_slowly, args, kwargs)
            return self._call_slowly(args, kwargs, refused)
        finally:
            del refused  # its traceback holds this frame, and the arguments

    def _under_user_mesh(
        self, call: Callable[..., Any], call_anew: Callable[..., Any], *given: PyTree
    ) -> Any:
        """Calls with or without the mesh that the user has set, as the step needs.

        User code may name the mesh; JAX rejects a strategy's code under it.
        """
        without = user_mesh.ignores_user_mesh(call_anew)
        if not self._keeps_mesh or frames.current().has_strategy:
            try:
                return without(*given)
            finally:
                self._ready = None  # the next call may be under that mesh, too
        try:
            return call(*given)
        except ValueError as error:
            if not user_mesh.is_refusal(error):
                raise  # the user's function is not called again for an error of its own
            try:
                result = without(*given)
            except Exception:
                raise error from None
            self._keeps_mesh, self._ready = False, None
            return result

    def _call_slowly(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], refused: Exception | None = None
    ) -> Any:
        """Runs the program when a call is more than the launch of a build.

        The first two calls are: the second is compared with the first's results. `refused` is the
        error of an attempt to launch the build, if any.
        """
        require_no_nan(refused, self._step, self._build, args)  # first: it donated the arguments
        names = self._step.name, self._step.argument_names
        told = ()
        if self._num_calls < 2:
            told = hooks.tell(hooks.on_call, self._memory, self._step, names, args, kwargs)
        split = self._find_objects(args, kwargs)
        if split is None:
            result = self._run(args, kwargs, None, refused)
        else:  # `jit` refused objects as they are, and nothing else
            result = self._take_turn(split, self._run)
        for after_call in told:
            after_call(result, self._build.facts if self._build is not None else {})
        return result

    def _find_objects(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], StatefulArgs] | None:
        """Returns what splits the objects that a call takes or captures; None: there are none."""
        step = self._step
        if not step.takes_objects:
            return None
        return find_objects(step.function, args, kwargs, step.strategy, step.donate_argnums)

    def _take_turn(self, split: Callable[[], StatefulArgs], run: Callable[..., Any]) -> Any:
        """Returns ``run``'s result for objects taken apart; threads take turns with them."""
        with one_at_a_time:  # until the objects have been written
            objects = split()
            self._ready = None
            return objects.call(run)

    def _with_objects(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Returns ``run``'s result for the arguments, objects among them taken apart."""
        split = self._find_objects(args, kwargs)
        return run(args, kwargs) if split is None else self._take_turn(split, run)

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        finish: Finish | None = None,
        refused: Exception | None = None,
    ) -> Any:
        """Launches the program; compiles it first where `jit` refuses these arguments.

        It is tried again only if the arguments are new, or can be changed to what `jit` accepts:
        what has run is never run again.
        """
        self._num_calls += 1
        if self._num_calls == 2:
            self._on_second_call()
        _require_guarded(self._step.name, self._recreated)
        build, found = self._current_build(), None
        if build is None:
            refused = NotTraced()
        elif self._prepares:
            args, kwargs = self._prepare(args, kwargs)
        try:
            for _ in range(_MOST_ATTEMPTS):
                if refused is not None:
                    args, kwargs = self._accepted(refused, args, kwargs)
                try:
                    if refused is not None or build is None:
                        build, found = self._compile(args, kwargs)
                    with build.offering(found):
                        result, spec = build.launch(args, kwargs, finish)
                    break
                except Exception as error:
                    refused = error
            else:
                assert refused is not None, "each attempt was refused"
                raise refused
        finally:
            del refused  # its traceback holds this frame, and the arguments
        self._recreated = spec.recreated
        if finish is not None:
            return result()
        self._ready = build if self._num_calls > 1 and not spec.recreated else None
        return spec.results(result)

    def _current_build(self) -> Build | None:
        """Returns the build for the objects that the function reaches now; None: there is none."""
        build = self._build
        if build is None or not build.reached.is_the_same():
            with self._tracing:
                if self._build is build:
                    self._put_away = build or self._put_away
                    known = (b for b in (self._put_away, *self._formers) if b is not None)
                    self._build = next((b for b in known if b.reached.is_the_same()), None)
                    if self._build is not None:
                        self._replace_by(self._build)
        return self._build

    def _replace_by(self, build: Build) -> None:
        """Remembers the build that was put away, once there is one in its place.

        It lives as long as a variable that only it threads, which keeps it: a program may live for
        ever, and must not keep the model of each fold. Of those without any, the last few live.
        """
        former, self._put_away = self._put_away, None
        if former is None or former is build:
            return
        self._formers.add(former)
        own = next((v for v in former.variables if v not in {*build.variables}), None)
        if own is None:
            self._kept.append(former)
        else:  # by program, so that it ends with that, too
            kept = vars(own).setdefault("_builds", weakref.WeakKeyDictionary())
            kept.setdefault(self, set()).add(former)

    # -- arguments ---------------------------------------------------------------

    def _prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns arguments as `jit` takes them; raises for those it would change in silence."""
        if self._marks_objects:
            args, kwargs = self._mark_objects(args, kwargs) or (args, kwargs)
        if self._takes_wide_integers:
            self._require_held(args, kwargs)
        step, build = self._step, self._build
        if not step.donate_argnums:
            return args, kwargs
        if not jax_compat.REFUSES_TO_DONATE_DELETED and build is not None and build.spans_devices:
            self._require_undeleted(args)
        # Of arrays that variables would lose, copies are donated.
        return copy_handles(args, step.donate_argnums), kwargs

    def _mark_objects(
        self, *call: PyTree, is_data: Callable[[Any], bool] = is_array
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Returns (args, kwargs) with Python objects as static nodes; None if there are none."""
        names = tuple(self._step.argument_names)
        marked = mark_static(mark_modules(call, names, is_data), names, is_data)
        if jax.tree.structure(marked) == jax.tree.structure(call):
            return None
        self._marks_objects = self._prepares = True
        return marked

    def _require_held(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises an OverflowError for host integers of 64 bits that would wrap around."""
        for leaf in jax.tree.leaves((args, kwargs)):
            if is_narrowed(leaf):
                self._takes_wide_integers = self._prepares = True
                require_held(leaf, f"an argument of {self._step.name}")

    def _require_undeleted(self, args: tuple[Any, ...]) -> None:
        step = self._step
        require_undeleted(step.name, step.argument_names, step.donate_argnums, args)

    # -- what a call that was refused needs -----------------------------------

    def _accepted(
        self, refused: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        """Returns the arguments as `jit` takes them, or raises `refused` if they are so already."""
        self._explain(refused, args)
        is_new = isinstance(refused, NotTraced)
        if jax_compat.is_broken_cache(refused):
            self._build, is_new = None, True
        marked = self._mark_objects(args, kwargs)
        if marked is not None:
            args, kwargs = marked
        elif not is_new and user_mesh.has_explicit_mesh((args, kwargs)):
            args, kwargs = user_mesh.off_explicit_meshes((args, kwargs))
        elif not is_new:
            args, kwargs = self._placed(refused, args, kwargs)
        return self._prepare(args, kwargs) if self._prepares else (args, kwargs)

    def _placed(
        self, refused: Exception, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> Arguments:
        """Returns the arguments on devices where the program can run, or raises `refused`."""
        if not jax_compat.is_device_mismatch(refused):
            raise refused
        for leaf in jax.tree.leaves((args, kwargs), is_leaf=is_per_replica):
            if is_per_replica(leaf):
                return_to_replicas(leaf)
        return self._step.place((args, kwargs))

    def _explain(self, refused: Exception, args: tuple[Any, ...]) -> None:
        """Raises a clearer error in place of one that a launch raised, if there is one."""
        require_no_nan(refused, self._step, self._build, args)
        if isinstance(refused, NotTraced):
            return
        for variable in self._build.variables if self._build is not None else ():
            try:
                variable.stored.require()
            except ContextError as lost:  # by this launch, unless that says the same
                raise lost from None if isinstance(refused, ContextError) else refused
        if "deleted" in str(refused):
            self._require_undeleted(args)

    # -- tracing and compiling --------------------------------------------------

    def _compile(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Build, Discovered | None]:
        """Traces and compiles for these arguments, while no lock of variables is held.

        Returns the build, and the trace that `jit` may use once more in the launch: to run it
        operation by operation (`jax.debug_nans`), or to compile it, if it has no variables, so
        that there is no lock to hold up anyone.
        """
        with self._tracing, hooks.inside(hooks.at_work, f"compiling {self._step.name}"):
            self.require(args, kwargs)
            self._require_held(args, kwargs)
            build, found, lowered = self._build, None, None
            ahead = jax_compat.compiles()
            if build is not None and ahead:
                with contextlib.suppress(Exception):  # else another thread has compiled it
                    lowered = build.lower(args, kwargs)
            if build is None or lowered is None:
                build, found = self._trace(args, kwargs)
                if build.variables:
                    require_outside_traces(build)
                if ahead and (build.variables or build.on_compiled):
                    # A class among the arguments may take only arrays: then the launch compiles.
                    with contextlib.suppress(Exception):
                        lowered = build.lower(args, kwargs, found)
            if lowered is not None:
                for compiled in build.on_compiled:
                    compiled(build, lowered, args, kwargs)
                with contextlib.suppress(Exception):  # the launch will raise it
                    lowered.compile()
            jax_compat.forget_refusals(build.jitted)
            return build, found

    def trace(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        within: Callable[[], contextlib.AbstractContextManager[None]],
        place: Callable[[Any], Any],
        emit: Callable[..., Any],
    ) -> tuple[Discovered, tuple[Any, ...], dict[str, Any], Mapping[str, Any] | None]:
        """Traces the step apart from all builds, to be looked at and evaluated.

        ``emit(emit of the step, fn, state, args, kwargs)`` emits it, of arguments that `place`
        returns. The last of what comes back is, for a step with objects: path -> the user's name
        and the former value of each of their arrays that is written.
        """
        traced = dataclasses.replace(self._step, emit=functools.partial(emit, self._step.emit))

        def run(args: tuple[Any, ...], kwargs: dict[str, Any], *_: object) -> Any:
            args, kwargs = place(self._mark_objects(args, kwargs) or (args, kwargs))
            with within():
                found = discover(traced, args, kwargs, CreationLog())
            call = call_of(kwargs)
            return found, args, kwargs, None if call is None else call.changes()

        if has_user_mesh():
            return user_mesh.ignores_user_mesh(self._with_objects)(run, args, kwargs)
        return self._with_objects(run, args, kwargs)

    def take_apart(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], place: Callable[[Any], Any]
    ) -> Any:
        """Returns arguments as `trace` takes them, for what it has traced."""

        def run(args: tuple[Any, ...], kwargs: dict[str, Any], *_: object) -> Any:
            return place(self._mark_objects(args, kwargs) or (args, kwargs))

        return self._with_objects(run, args, kwargs)

    def lower(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> jax.stages.Lowered:
        """Returns the program lowered for these arguments; structs among them stand for arrays."""
        lower = functools.partial(self._with_objects, self._lower)
        if has_user_mesh():
            return self._under_user_mesh(lower, lower, args, kwargs)
        return lower(args, kwargs)

    def _lower(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *_: object
    ) -> jax.stages.Lowered:
        self.require(args, kwargs)
        self._current_build()
        marked = self._mark_objects(args, kwargs, is_data=is_array_or_struct)
        given = marked or (args, kwargs)
        with self._tracing:
            try:
                return self._lower_traced(*given)
            except ValueError as error:
                refused = error
            return self._lower_traced(*self._placed(refused, *given))

    def _lower_traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> jax.stages.Lowered:
        if self._build is not None:
            with contextlib.suppress(NotTraced):
                return self._build.lower(args, kwargs)
        build, found = self._trace(args, kwargs)
        return build.lower(args, kwargs, found)

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Build, Discovered]:
        """Traces the step; returns a build with its variables, and the trace."""
        build, step = self._build, self._step
        if (build is not None or self._put_away is not None) and jax_compat.compiles():
            self._watch.record(args, kwargs, is_replacing=build is None)
        found = discover(step, args, kwargs, CreationLog())
        if build is not None and build.covers(found):
            build.record(found)
            return build, found
        if found.created:
            require_no_trace(found.created[0].name)
            found.make_created(step, args, kwargs)
            found = discover(step, args, kwargs, CreationLog(made=found.created))
        hooks.tell(hooks.on_new_program, step.name)
        self._build = Build(step, found, build)
        self._replace_by(self._build)
        return self._build, found


def require_no_nan(
    error: Exception | None, step: Step, build: Build | None, args: tuple[Any, ...]
) -> None:
    """Raises a FloatingPointError if `error` comes from `jax.debug_nans` or `debug_infs`.

    JAX then calls the function again, operation by operation, with arrays that are gone.
    """
    cause = None if error is None else error.__context__
    if not isinstance(error, NotTraced) or "FloatingPoint" not in type(cause).__name__:
        return
    donated = jax.tree.leaves([arg for i, arg in enumerate(args) if i in step.donate_argnums])
    are_gone = any(isinstance(x, jax.Array) and x.is_deleted() for x in donated)
    raise FloatingPointError(_nan_text(step, build, are_gone)) from cause


def _nan_text(step: Step, build: Build | None, are_gone: bool) -> str:
    writes = build.writes if build is not None else ()
    if any(v.stored.is_lost for v in writes):
        gone = "variables that it writes have no value now"
        fix = (
            "restore a checkpoint or assign them; to find the operation, call a part of the "
            "step that writes no variable"
        )
    elif writes:  # JAX donates nothing in programs that it has compiled in this mode
        gone = "its variables have the values from before"
        fix = (
            "dj.jit(step)(...) or strategy.jit(step)(...) with these arguments: in a first call, "
            "JAX names the operation"
        )
    else:
        gone = "JAX looks at its results"
        fix = (
            "jax.jit(part)(rows of one replica) for a part of the step without reductions: JAX "
            "then names the operation"
        )
    if are_gone:
        gone += ", and arguments named in donate_argnums are gone"
    return message(
        f"{step.name} needs finite values while jax.debug_nans or jax.debug_infs is on",
        got="nan or inf in a result" + (", or in a variable that it writes" if writes else ""),
        why=f"the step has run: {gone}",
        fix=fix,
    )


def _require_guarded(name: str, recreated: tuple[str, ...]) -> None:
    """Raises a ContextError if every trace of the step of that name recreates variables."""
    if not recreated:
        return
    raise ContextError(
        f"{name} needs to create its variables once",
        got=f"in a second call, an unguarded constructor of {', '.join(map(repr, recreated))}",
        why="the constructor runs at every trace, but a compiled call runs none",
        fix="create the variables outside, or guard them: "
        "`if self.v is None: self.v = dj.Variable(...)`",
    )
