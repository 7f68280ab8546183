"""Program: a step compiled per signature, with its variables threaded through.

A program grows. The first call traces the step and finds the variables that it touches; a build
threads them (see `build`) through a `jax.jit` for each signature (see `signatures`). A signature
that touches more variables replaces the build by one that threads these too. All of this happens
before any lock on variables is taken; then the call starts (see `calls`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from distjax import jax_compat, user_mesh
from distjax.cluster.alone import warn_unless_joined
from distjax.cluster.phases import phase
from distjax.errors import ContextError
from distjax.objects.claims import HeldClaims
from distjax.objects.stateful import StatefulObjectFound
from distjax.placement.per_replica import is_per_replica, return_to_replicas
from distjax.program.agreement import agree_on_program
from distjax.program.build import Build, NotCompiled, UnknownVariables, make_build
from distjax.program.calls import (
    Finish,
    require_guarded,
    require_no_nan,
    require_outside_traces,
    start,
    start_uninterrupted,
    trace_and_start,
)
from distjax.program.discovery import Discovered, discover
from distjax.program.former_builds import FormerBuilds
from distjax.program.output_spec import OutputSpec
from distjax.program.retraces import RetraceWatch
from distjax.program.step import Step
from distjax.replica.feedback import Feedback
from distjax.replica.partitioned_tree import is_array, is_array_or_struct, mark_static
from distjax.replica.static import mark_modules
from distjax.typing import PyTree
from distjax.variables.creation_log import CreationLog, require_no_trace
from distjax.variables.donation import copy_handles, handed_out, require_undeleted

#: A possible remedy for a call that `jit` rejected: returns new arguments, or None.
Fix = Callable[[Exception, tuple[Any, ...], dict[str, Any]], Any]

#: Raises for (args, kwargs) that a trace, which does not see layouts, cannot reject.
Require = Callable[[tuple[Any, ...], dict[str, Any]], None]


class Program:
    """A step as one compiled program.

    Args:
      step: the step to compile.
      on_second_call: called once, at the second call.
      require: called with the arguments of each new signature.
    """

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
        self._formers = FormerBuilds()
        self._tracing = threading.RLock()  # one thread at a time traces the step
        self._num_calls = 0
        self._feedback: Feedback | None = None
        self._is_plain = False  # there is a build, and nothing to do before starting it
        self._has_no_objects = False
        self._meets_user_mesh = False
        self._marks_objects = False
        self._recreated: tuple[str, ...] = ()
        self._watch = RetraceWatch(step.name, step.argument_names)

    # -- calling --------------------------------------------------------------

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the program and returns the user's results."""
        build = self._build
        if build is None or not self._is_plain:
            return self._call_slowly(args, kwargs)
        is_current = build.reached.is_current
        if is_current is not None and not is_current():
            return self._call_slowly(args, kwargs)
        if self._step.donate_argnums and (handed_out or build.spans_devices):
            args = self._prepare_donated(args)
        try:
            outputs, spec = start(build, args, kwargs)
        except Exception as error:
            refused = error
        else:
            if spec.recreated:
                self._recreated, self._is_plain = spec.recreated, False
            return outputs if spec.unpack is None else spec.unpack(outputs)
        try:  # outside the handler, so that the user's errors are not chained to `refused`
            return self._call_slowly(args, kwargs, refused)
        finally:
            del refused  # its traceback holds this frame, and the arguments

    def _call_slowly(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception | None = None
    ) -> Any:
        """Runs the program when a call is more than the start of a build.

        Args:
          args: positional arguments.
          kwargs: keyword arguments.
          error: the error of an attempt to start the build, if any.
        """
        require_no_nan(error, self._step, self._build, args)  # first: it donated the arguments
        if self._step.ignores_user_mesh and user_mesh.has_user_mesh():
            self._meets_user_mesh, self._is_plain = True, False
            return user_mesh.ignores_user_mesh(self._call_slowly)(args, kwargs)
        if self._has_no_objects:
            try:
                return self._run(args, kwargs, error=error)
            except StatefulObjectFound:
                self._has_no_objects = self._is_plain = False
        return self._run_first_calls(args, kwargs)

    def _run_first_calls(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call that may pass objects; compares the second with the first's results."""
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
        """Returns ``run``'s result for the arguments, holding the claims of their objects."""
        held = HeldClaims()
        try:
            stateful = self._step.find_objects(args, kwargs, held)
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
        """Runs the program and returns the user's results; what `finish` returns builds them.

        `finish` is part of the step: it is called again if a signal raises meanwhile.
        """
        build = self._current_build()
        if build is None or self._marks_objects:
            args, kwargs = self._mark_objects(args, kwargs)
        require_guarded(self._step.name, self._recreated)
        if self._step.donate_argnums:
            args = self._prepare_donated(args)
        started = None
        if build is not None and error is None:
            try:
                started = start(build, args, kwargs, finish)
            except Exception as refused:
                error = refused
        try:
            result, spec = started or self._start_after(
                error or NotCompiled(), args, kwargs, finish
            )
        finally:
            del error
        self._recreated = spec.recreated
        self._is_plain = self._has_no_objects and not (
            self._marks_objects or self._recreated or self._meets_user_mesh
        )
        return spec.results(result) if finish is None else result()

    def _current_build(self) -> Build | None:
        """Returns the build for the objects that the function reaches now; None: there is none."""
        build = self._build
        if build is None or not build.reached.is_the_same():
            with self._tracing:
                if self._build is build:
                    self._build = self._formers.exchange(build)
        return self._build

    def _start_after(
        self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any], finish: Finish | None
    ) -> tuple[Any, OutputSpec]:
        """Starts the program after an attempt that ended in `error`, or raises it.

        Each round makes progress: a compiled signature, more variables, or arguments that
        `jit` accepts.
        """
        self.require(args, kwargs)
        fixes = iter((self._compile_anew, user_mesh.leave_explicit_meshes, self._place))
        try:
            while True:
                require_no_nan(error, self._step, self._build, args)
                if isinstance(error, UnknownVariables):
                    with self._tracing, phase(f"tracing {self._step.name}"):
                        self._rebuild(error.discovered, args, kwargs)
                elif not isinstance(error, NotCompiled):
                    args, kwargs = self._retry_args(error, args, kwargs, fixes)
                try:
                    return self._start_compiled(args, kwargs, finish)
                except Exception as again:
                    error = again
        finally:
            del error  # its traceback holds this frame, and the arguments

    def _start_compiled(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], finish: Finish | None
    ) -> tuple[Any, OutputSpec]:
        """Compiles the signature without any variable lock, then starts the program."""
        build = self._build
        if build is not None and build.switch(args, kwargs):
            with contextlib.suppress(NotCompiled):
                return start(build, args, kwargs, finish)
        with phase(f"compiling {self._step.name}"):
            build = self._compile(args, kwargs)
        if not build.writes or build.is_remote:
            return trace_and_start(build, args, kwargs, finish)
        with contextlib.suppress(NotCompiled):
            return start_uninterrupted(build, args, kwargs, finish)
        # JAX is configured for this thread only, or compiles nothing at all.
        return trace_and_start(build, args, kwargs, finish)

    def _retry_args(
        self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any], fixes: Iterator[Fix]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns arguments that `jit` accepts in place of these, or raises `error`.

        Args:
          error: the error that `jit` raised.
          args: positional arguments.
          kwargs: keyword arguments.
          fixes: those not yet tried in this call.
        """
        build = self._build
        if build is not None:
            try:
                with build.lock:  # else an array being donated by another thread would seem deleted
                    for variable in build.variables:
                        variable.stored.require()
                        variable.stored.require_present()
            except ContextError as lost:  # by this launch, unless that says the same
                raise lost from None if isinstance(error, ContextError) else error
        if "deleted" in str(error):
            self._require_undeleted(args)
        if not self._marks_objects:
            marked = self._mark_objects(args, kwargs)
            if self._marks_objects:
                return marked
        for fix in fixes:
            fixed = fix(error, args, kwargs)
            if fixed is not None:
                return fixed
        raise error

    def _compile_anew(
        self, error: Exception, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> Any:
        if not jax_compat.is_broken_cache(error):
            return None
        self._build = None  # the variables' arrays move to the next build
        return args, kwargs

    def _place(self, error: Exception, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Any:
        return self._on_devices(args, kwargs) if jax_compat.is_device_mismatch(error) else None

    def _on_devices(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Any:
        """Returns the arguments on devices where the program can run."""
        for leaf in jax.tree.leaves((args, kwargs), is_leaf=is_per_replica):
            if is_per_replica(leaf):
                return_to_replicas(leaf)
        return self._step.place((args, kwargs))

    def _mark_objects(
        self, *call: PyTree, is_data: Callable[[Any], bool] = is_array
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns (args, kwargs) with Python objects as static nodes; records if any."""
        names = tuple(self._step.argument_names)
        marked = mark_static(mark_modules(call, names, is_data), names, is_data)
        if jax.tree.structure(marked) != jax.tree.structure(call):
            self._marks_objects, self._is_plain = True, False
        return marked

    # -- building -------------------------------------------------------------

    def lower(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> jax.stages.Lowered:
        """Returns the program lowered for these arguments; structs among them stand for arrays."""
        return self._with_objects(args, kwargs, self._lower)

    def _lower(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], finish: Finish | None = None
    ) -> jax.stages.Lowered:
        self.require(args, kwargs)
        self._current_build()
        args, kwargs = self._mark_objects(args, kwargs, is_data=is_array_or_struct)
        with self._tracing:
            try:
                return self._lower_traced(args, kwargs)
            except ValueError as error:
                if not jax_compat.is_device_mismatch(error):
                    raise
                args, kwargs = self._on_devices(args, kwargs)
                return self._lower_traced(args, kwargs)

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Build:
        """Returns a build that has compiled this signature, or whose call will compile it."""
        with self._tracing:
            build = self._build
            if build is None or not build.variables:
                build = self._trace(args, kwargs)
            if not jax_compat.compiles():
                return build  # the call evaluates the trace
            # Without variables there is no lock, so the call compiles; in a job it is timed.
            while build.variables or (build.spans_processes and not jax_compat.tracing()):
                require_outside_traces(build)
                try:
                    lowered = build.lower(args, kwargs)
                except Exception:
                    break  # a class among the arguments takes only arrays: the call compiles
                if lowered is None:
                    build = self._trace(args, kwargs)
                    continue
                if build.spans_processes:
                    names = self._step.argument_names
                    agreed = agree_on_program(build, lowered, names, args, kwargs)
                    build.record_agreed(args, kwargs, agreed)
                with contextlib.suppress(Exception):  # the call will raise it
                    lowered.compile()
                break
            return build

    def _lower_traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> jax.stages.Lowered:
        build = self._build or self._trace(args, kwargs)
        while (lowered := build.lower(args, kwargs)) is None:
            build = self._trace(args, kwargs)
        return lowered

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Build:
        """Traces the step; returns a build with its variables, offered the trace."""
        build = self._build
        if build is not None or self._formers.is_replacing:
            self._watch.record(args, kwargs, is_replacing=build is None)
        discovered = discover(self._step, args, kwargs, CreationLog())
        if build is None or not build.covers(discovered):
            return self._rebuild(discovered, args, kwargs)
        build.offer(discovered, args, kwargs)
        return build

    def _rebuild(
        self, discovered: Discovered, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Build:
        """Adds the variables of one more trace to the build, after initializing new ones."""
        created = discovered.created
        if created:
            require_no_trace(created[0].name)
            discovered.initial_values.store(self._step, args, kwargs)
            discovered = discover(self._step, args, kwargs, CreationLog(made=created))
        warn_unless_joined(self._step.name)
        build = make_build(self._step, discovered, self._build)
        build.offer(discovered, args, kwargs)
        self._build = build
        self._formers.replace_by(build)
        return build

    # -- donated arguments ----------------------------------------------------

    def _prepare_donated(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the arguments, copying arrays that variables would lose by donation."""
        build = self._build
        if not jax_compat.REFUSES_TO_DONATE_DELETED and build is not None and build.spans_devices:
            self._require_undeleted(args)
        return copy_handles(args, self._step.donate_argnums)

    def _require_undeleted(self, args: tuple[Any, ...]) -> None:
        step = self._step
        require_undeleted(step.name, step.argument_names, step.donate_argnums, args)
