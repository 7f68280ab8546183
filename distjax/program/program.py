"""Program: a step compiled for every signature it is called with, its variables threaded.

A program grows. The first call traces the step and finds the variables that it touches; they are
threaded through one `jax.jit` (see `build`), which traces every later signature. A signature that
touches more variables replaces the build by one that threads these too. All of this happens
before a lock on variables is taken; then the call is started (see `calls`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from distjax import jax_compat, user_mesh
from distjax.cluster.phases import phase
from distjax.errors import ContextError, message
from distjax.objects.claims import HeldClaims
from distjax.objects.stateful import StateFound
from distjax.program.agreement import agree_on_program
from distjax.program.build import Build, NotCompiled, UnknownVariables, make_build
from distjax.program.calls import (
    Finish,
    require_outside_traces,
    start,
    start_uninterrupted,
    trace_and_start,
)
from distjax.program.discovery import Discovered, discover
from distjax.program.output_spec import OutputSpec
from distjax.program.retraces import RetraceWatch
from distjax.program.step import Step
from distjax.replica.arguments import mark_static
from distjax.replica.feedback import Feedback
from distjax.replica.static import mark_modules
from distjax.typing import PyTree
from distjax.variables.creation_log import CreationLog, require_no_trace
from distjax.variables.donation import copy_handles

#: What may mend a call that `jit` refused: returns the arguments to go on with, or None.
Cure = Callable[[Exception, tuple[Any, ...], dict[str, Any]], Any]

#: Raises for arguments (args, kwargs) that no trace can refuse: a trace knows no layouts.
Require = Callable[[tuple[Any, ...], dict[str, Any]], None]


class Program:
    """A step as one compiled program.

    Whether calls bring objects with state is found at the first two; a later one that does is
    found when it is traced, so that a call without objects pays nothing.

    Args:
      step: what is compiled.
      on_second_call: is called once, at the second call.
      require: is called for the arguments of each signature that is new.
    """

    def __init__(
        self,
        step: Step,
        on_second_call: Callable[[], None] = lambda: None,
        require: Require | None = None,
    ):
        self._step = step
        self._on_second_call = on_second_call
        self._require = require
        self._build: Build | None = None
        self._tracing = threading.RLock()  # one thread at a time traces the step
        self._num_calls = 0
        self._feedback: Feedback | None = None
        self._is_plain = False  # a build, and nothing to do before it is started
        self._has_no_objects = False
        self._meets_user_mesh = False
        self._marks_objects = False
        self._recreated: tuple[str, ...] = ()
        self._watch = RetraceWatch(step.name, step.argument_names)

    # -- calling --------------------------------------------------------------

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the program and returns the user's results."""
        build = self._build
        if build is None or not self._is_plain:
            return self._call_with_care(args, kwargs)
        if self._step.donate_argnums:
            args = self._prepare_donated(args)
        try:
            result, spec = start(build, args, kwargs)
        except Exception as error:
            return self._call_with_care(args, kwargs, error)
        if spec.recreated:
            self._note_recreated(spec)
        return result

    def _call_with_care(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception | None = None
    ) -> Any:
        """Runs the program where a call is more than the start of a build.

        Args:
          args: positional arguments.
          kwargs: keyword arguments.
          error: what an attempt to start the build ended in, if there was one.
        """
        if self._step.ignores_user_mesh and user_mesh.has_user_mesh():
            self._meets_user_mesh, self._is_plain = True, False
            return user_mesh.ignores_user_mesh(self._call_with_care)(args, kwargs)
        if self._has_no_objects:
            try:
                return self._run(args, kwargs, error=error)
            except StateFound:
                self._has_no_objects = self._is_plain = False
        return self._run_first_calls(args, kwargs)

    def _run_first_calls(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call that may bring objects; the second is compared with the first's results."""
        former, self._feedback = self._feedback, None
        if former is not None:
            former.compare(args, kwargs)
        if self._num_calls:
            return self._with_objects(args, kwargs, self._run)
        feedback = Feedback(self._step.name, self._step.argument_names, args, kwargs)
        result = self._with_objects(args, kwargs, self._run)
        feedback.remember(result, self._build.facts if self._build is not None else ())
        self._feedback = feedback
        return result

    def _with_objects(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]
    ) -> Any:
        """Returns what `run` does of the arguments; its objects are claimed meanwhile."""
        held = HeldClaims()
        try:
            stateful = self._step.take_objects(args, kwargs, held)
            self._num_calls += 1
            if self._num_calls == 2:
                self._on_second_call()
            self._has_no_objects = self._num_calls > 1 and stateful is None
            return run(args, kwargs) if stateful is None else stateful.call(run)
        finally:
            try:
                held.release()
            except BaseException:  # a signal raised in it
                held.release()
                raise

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        finish: Finish | None = None,
        error: Exception | None = None,
    ) -> Any:
        """Runs the program and returns the user's results, or what `finish` makes of them.

        `finish` is part of the step: where a signal raises meanwhile, it is called once more.
        """
        build = self._build
        if build is None or self._marks_objects:
            args, kwargs = self._mark_objects(args, kwargs)
        if self._recreated:
            raise ContextError(_unguarded_text(self._step.name, self._recreated))
        if self._step.donate_argnums:
            args = self._prepare_donated(args)
        try:
            if error is not None:
                raise error
            if build is None:
                raise NotCompiled
            result, spec = start(build, args, kwargs, finish)
        except Exception as refused:
            result, spec = self._start_anew(refused, args, kwargs, finish)
        if spec.recreated:
            self._note_recreated(spec)
        self._is_plain = self._has_no_objects and not (
            self._marks_objects or self._recreated or self._meets_user_mesh
        )
        return result

    def _note_recreated(self, spec: OutputSpec) -> None:
        self._recreated, self._is_plain = spec.recreated, False

    def _start_anew(
        self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any], finish: Finish | None
    ) -> tuple[Any, OutputSpec]:
        """Starts the program after an attempt that ended in `error`, or raises it.

        Each round knows more than the one before: a signature that is compiled, more variables,
        or arguments that `jit` takes.
        """
        if self._require is not None:
            self._require(args, kwargs)
        cures = iter((self._compile_anew, _leave_explicit_meshes, self._place))
        while True:
            if isinstance(error, UnknownVariables):
                with self._tracing, phase(f"tracing {self._step.name}"):
                    self._rebuild(error.discovered, args, kwargs)
            elif not isinstance(error, NotCompiled):
                args, kwargs = self._retry_args(error, args, kwargs, cures)
            try:
                return self._start_compiled(args, kwargs, finish)
            except Exception as again:
                error = again

    def _start_compiled(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], finish: Finish | None
    ) -> tuple[Any, OutputSpec]:
        """Compiles the signature without any lock of variables, then starts the program."""
        with phase(f"compiling {self._step.name}"):
            build = self._compile(args, kwargs)
        if not build.writes or build.is_remote:
            return trace_and_start(build, args, kwargs, finish)
        try:
            return start_uninterrupted(build, args, kwargs, finish)
        except NotCompiled:  # JAX is configured for this thread alone, or compiles nothing at all
            return trace_and_start(build, args, kwargs, finish)

    def _retry_args(
        self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any], cures: Iterator[Cure]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns arguments that `jit` takes in place of those it refused, or raises `error`.

        Args:
          error: what `jit` raised.
          args: positional arguments.
          kwargs: keyword arguments.
          cures: what was not tried yet in this call.
        """
        build = self._build
        if build is not None:
            with build.lock:  # else an array that another thread just donates would seem deleted
                for variable in build.variables:
                    variable.stored.require()
                    variable.require_present()
        if "deleted" in str(error):
            self._require_undeleted(args)
        if not self._marks_objects:
            marked = self._mark_objects(args, kwargs)
            if self._marks_objects:
                return marked
        for cure in cures:
            cured = cure(error, args, kwargs)
            if cured is not None:
                return cured
        raise error

    def _compile_anew(
        self, error: Exception, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> Any:
        if not jax_compat.is_broken_cache(error):
            return None
        self._build = None  # the variables' arrays move to the next build
        return args, kwargs

    def _place(self, error: Exception, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Any:
        return self._step.place((args, kwargs)) if jax_compat.is_device_mismatch(error) else None

    def _mark_objects(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments with Python objects as static nodes, and notes if there are any."""
        names = tuple(self._step.argument_names)
        marked = mark_static(mark_modules((args, kwargs), names), names)
        if jax.tree.structure(marked) != jax.tree.structure((args, kwargs)):
            self._marks_objects, self._is_plain = True, False
        return marked

    # -- building -------------------------------------------------------------

    def lower(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> jax.stages.Lowered:
        """Returns the `jax.stages.Lowered` of the program for these arguments."""
        return self._with_objects(args, kwargs, self._lower)

    def _lower(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], finish: Finish | None = None
    ) -> jax.stages.Lowered:
        args, kwargs = self._mark_objects(args, kwargs)
        with self._tracing:
            try:
                return self._lower_traced(args, kwargs)
            except ValueError as error:
                if not jax_compat.is_device_mismatch(error):
                    raise
                args, kwargs = self._step.place((args, kwargs))
                return self._lower_traced(args, kwargs)

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Build:
        """Returns a build that has compiled this signature, or whose call compiles it."""
        with self._tracing:
            build = self._build
            if build is None or not build.variables:
                build = self._trace(args, kwargs)
            # Without variables there is no lock, and the call compiles; in a job it is timed.
            while build.variables or (build.spans_processes and not jax_compat.tracing()):
                require_outside_traces(build)
                try:
                    lowered = build.lower(args, kwargs)
                except NotCompiled:
                    build = self._trace(args, kwargs)
                    continue
                except Exception:
                    break  # a class among the arguments takes arrays only: the call compiles
                if build.spans_processes:
                    agree_on_program(build, lowered, self._step.argument_names, args, kwargs)
                with contextlib.suppress(Exception):  # the call will say it
                    lowered.compile()
                break
            return build

    def _lower_traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> jax.stages.Lowered:
        build = self._build or self._trace(args, kwargs)
        while True:
            try:
                return build.lower(args, kwargs)
            except NotCompiled:
                build = self._trace(args, kwargs)

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Build:
        """Traces the step; returns a build that threads its variables and is offered the trace."""
        build = self._build
        if build is not None:
            self._watch.record(args, kwargs)
        discovered = discover(self._step, args, kwargs, CreationLog())
        if build is None or not build.covers(discovered):
            return self._rebuild(discovered, args, kwargs)
        build.offer(discovered, args, kwargs)
        return build

    def _rebuild(
        self, discovered: Discovered, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Build:
        """Threads the variables of one more trace, once those it created exist."""
        created = discovered.created
        if created:
            require_no_trace(created[0].name)
            discovered.initialize_created(self._step, args, kwargs)
            discovered = discover(self._step, args, kwargs, CreationLog(made=created))
        build = make_build(self._step, discovered, self._build)
        build.offer(discovered, args, kwargs)
        self._build = build
        return build

    # -- donated arguments ----------------------------------------------------

    def _prepare_donated(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the arguments with copies of what variables would lose by the donation."""
        build = self._build
        if build is not None and build.spans_devices:
            self._require_undeleted(args)  # JAX 0.10 ends the process where it meets one
        copied = list(args)
        for number in self._step.donate_argnums:
            if number < len(args):
                copied[number] = copy_handles(args[number])
        return tuple(copied)

    def _require_undeleted(self, args: tuple[Any, ...]) -> None:
        """Raises a RuntimeError if an argument to donate has been donated before.

        Its first array tells: those of one argument are donated together.
        """
        for number in self._step.donate_argnums:
            for leaf in jax.tree.leaves(args[number])[:1]:
                is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax_compat.Tracer)
                if is_array and leaf.is_deleted():
                    names = self._step.argument_names
                    name = names[number] if number < len(names) else str(number)
                    raise RuntimeError(_deleted_text(self._step.name, name, leaf))


def _leave_explicit_meshes(
    error: Exception, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> Any:
    if not user_mesh.has_explicit_mesh((args, kwargs)):
        return None
    return user_mesh.off_explicit_meshes((args, kwargs))  # JAX raises a KeyError, and more


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
