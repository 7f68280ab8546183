"""One call of a compiled program: arrays in, arrays out, never half done.

The order of events makes a call safe, whatever raises and whichever other thread runs:

1. Under the lock of the variables, the program takes the arrays that other programs hold.
2. It marks itself as starting, then copies arrays that a user still holds: see `donation`.
3. The compiled call gets the list of arrays, and its result replaces the list, in one C call:
   Python raises a pending signal only between bytecodes, so at no moment are arrays donated
   while their successors are not yet stored.
4. `finish`, the write-back of objects, belongs to the step. No code of the user runs in it: the
   classes of the tree that the step returns are called by the caller of `start`, which starts
   nothing again because they raise.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from itertools import starmap
from typing import Any

import jax
import jax.numpy as jnp

from distjax import jax_compat
from distjax.cluster.ledger import Launch, ledger
from distjax.cluster.phases import lone_programs
from distjax.collectives.throttle import awaiting, count_launch, record_completion, throttle
from distjax.context.thread_settings import modes_of_this_thread, probe_modes
from distjax.errors import ContextError, TraceLeakError, message
from distjax.jax_compat import EVAL_TRACE, trace_state
from distjax.program.build import Build, NotCompiled
from distjax.program.host_arguments import checksum, require_arguments_held
from distjax.program.output_spec import OutputSpec, completion_of, spec_of
from distjax.program.signatures import Signature
from distjax.program.step import Step
from distjax.uninterrupted import call_uninterrupted
from distjax.variables.donation import copy_aliased

#: Writes results back, and returns what builds the user's; called again if a signal raises in it.
Finish = Callable[[Any], Callable[[], Any]]


def start(
    build: Build, args: tuple[Any, ...], kwargs: dict[str, Any], finish: Finish | None = None
) -> tuple[Any, OutputSpec]:
    """Starts the compiled program once.

    Args:
      build: the program.
      args: positional arguments; Python objects among them are static nodes.
      kwargs: keyword arguments.
      finish: finalizes the results.

    Returns:
      The results of `finish`, or without it the outputs; and how results are built from those.

    Raises:
      NotCompiled: the signature is new; nothing has happened.
    """
    signature = build.signatures.expected or build.require_signature(args, kwargs)
    if signature.narrowed:
        require_arguments_held(signature.narrowed, args, kwargs, build.name)
    if not build.writes:
        return _start_reader(build, signature, args, kwargs, finish)
    if build.is_remote:
        return _start_remote_writer(build, signature, args, kwargs, finish)
    if trace_state.value is not EVAL_TRACE:
        require_outside_traces(build)
    owned, cell, jitted = build.owned, build.owned.cell, signature.jitted
    launch = returned = None
    with build.lock:
        if not owned.is_whole:
            owned.take([variable.stored for variable in build.writes])
        owned.is_starting = True
        try:
            owned.num_starts += 1
            if owned.aliased:
                copy_aliased(owned)
            read = build.collect_read() if build.reads else []
            try:
                if build.is_in_job:
                    launch = _begin(build, signature, args, kwargs)
                cell.extend(starmap(jitted, ((cell[0], read, kwargs, *args),)))
                returned = cell[0]
                cell[0] = returned[0]
                if launch is not None:
                    _end_launch(launch, returned)
                    launch = None
                (spec,) = returned[1]
                result = returned[2] if finish is None else finish(spec.results(returned[2]))
            except BaseException:
                _complete_raised(build, returned, finish, launch)
                raise
        finally:
            owned.is_starting = False
    if spec.is_throttled:  # what `throttle` does, without its calls: most launches are only counted
        number = count_launch()
        if number == 0 or awaiting or build.is_in_job:
            record_completion(completion_of(returned), number)
    return result, spec


def start_uninterrupted(
    build: Build, args: tuple[Any, ...], kwargs: dict[str, Any], finish: Finish | None
) -> tuple[Any, OutputSpec]:
    """Starts a signature for the first time, on a thread that no signal reaches.

    The first execution runs Python code of JAX, which a signal could stop between the donation of
    arrays and the return of their successors.

    Raises:
      NotCompiled: the caller has JAX settings that no other thread has; nothing has happened.
    """
    are_others, modes = probe_modes(), modes_of_this_thread()

    def start_first() -> tuple[Any, OutputSpec]:
        if are_others():
            raise NotCompiled
        with modes():
            started = start(build, args, kwargs, finish)
        if build.spans_processes:
            ledger.wait()  # else unordered with what the caller's thread launches next
        return started

    return call_uninterrupted(start_first)


def require_no_nan(
    error: Exception | None, step: Step, build: Build | None, args: tuple[Any, ...]
) -> None:
    """Raises a FloatingPointError if `error` comes from `jax.debug_nans` or `debug_infs`.

    JAX then calls the function again, operation by operation, with arrays that are gone.

    Args:
      error: the error of an attempt to start the program, if any.
      step: what the program compiles.
      build: the program.
      args: the positional arguments.
    """
    cause = None if error is None else error.__context__
    if not isinstance(error, NotCompiled) or "FloatingPoint" not in type(cause).__name__:
        return
    donated = jax.tree.leaves([arg for i, arg in enumerate(args) if i in step.donate_argnums])
    are_gone = any(isinstance(x, jax.Array) and x.is_deleted() for x in donated)
    raise FloatingPointError(_nan_text(step, build, are_gone)) from cause


def _nan_text(step: Step, build: Build | None, are_gone: bool) -> str:
    writes = build is not None and build.writes
    if writes:
        fix = (
            "restore a checkpoint or assign them; to find the operation, call a part of the "
            "step that writes no variable"
        )
    else:
        fix = (
            "jax.jit(part)(rows of one replica) for a part of the step without reductions: JAX "
            "then names the operation"
        )
    gone = "variables that it writes have no value now" if writes else "JAX looks at its results"
    if are_gone:
        gone += ", and arguments named in donate_argnums are gone"
    return message(
        f"{step.name} needs finite values while jax.debug_nans or jax.debug_infs is on",
        got="nan or inf in a result" + (", or in a variable that it writes" if writes else ""),
        why=f"the step has run: {gone}",
        fix=fix,
    )


def require_guarded(name: str, recreated: tuple[str, ...]) -> None:
    """Raises if variables are `recreated` by every trace of the step of that name.

    Raises:
      ContextError: naming them.
    """
    if not recreated:
        return
    raise ContextError(
        message(
            f"{name} needs to create its variables once",
            got=f"in a second call, an unguarded constructor of {', '.join(map(repr, recreated))}",
            why="the constructor runs at every trace, but a compiled call runs none",
            fix="create the variables outside, or guard them: "
            "`if self.v is None: self.v = dj.Variable(...)`",
        )
    )


def trace_and_start(
    build: Build, args: tuple[Any, ...], kwargs: dict[str, Any], finish: Finish | None
) -> tuple[Any, OutputSpec]:
    """Starts the program; `jit` traces and compiles new signatures, under the lock.

    Raises:
      UnknownVariables: the signature touches more variables; nothing has happened.
    """
    thread = threading.get_ident()
    build.offered.setdefault(thread, None)
    try:
        return start(build, args, kwargs, finish)
    finally:
        build.offered.pop(thread, None)


def _start_reader(
    build: Build,
    signature: Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    finish: Finish | None,
) -> tuple[Any, OutputSpec]:
    """Starts a program that writes no variables."""
    if build.is_in_job or finish is not None:
        return _start_watched_reader(build, signature, args, kwargs, finish)
    if build.reads:
        require_outside_traces(build)
        with build.lock:  # else another program may donate what is read
            returned = signature.jitted([], build.collect_read(), kwargs, *args)
    else:
        returned = signature.jitted([], [], kwargs, *args)
    (spec,) = returned[1]
    if spec.is_throttled and trace_state.value is EVAL_TRACE:
        number = count_launch()
        if number == 0 or awaiting:
            record_completion(completion_of(returned), number)
    return returned[2], spec


def _start_watched_reader(
    build: Build,
    signature: Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    finish: Finish | None,
) -> tuple[Any, OutputSpec]:
    """Starts a program that writes no variables, but objects, or that the ledger records."""
    cell: list[Any] = []
    launch = None
    try:
        if build.reads:
            require_outside_traces(build)
        with build.lock if build.reads else contextlib.nullcontext():
            operands = [], build.collect_read(), kwargs, *args
            if build.is_in_job and trace_state.value is EVAL_TRACE:
                launch = _begin(build, signature, args, kwargs)
            cell[:] = starmap(signature.jitted, (operands,))
            returned = cell[0]
            if launch is not None:
                _end_launch(launch, returned)
                launch = None
        spec = spec_of(returned)
        result = returned[2] if finish is None else finish(spec.results(returned[2]))
    except BaseException:
        if launch is not None:
            _end_launch(launch, cell[0] if cell else None)
        if cell and finish is not None:
            finish(spec_of(cell[0]).results(cell[0][2]))
        raise
    if spec.is_throttled:
        throttle(completion_of(returned))
    return result, spec


def _start_remote_writer(
    build: Build,
    signature: Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    finish: Finish | None,
) -> tuple[Any, OutputSpec]:
    """Starts a program that writes remote variables, while no one else does.

    Their values are fetched, and the new ones sent after the program has run: if it fails or is
    interrupted, nothing has been sent.
    """
    require_outside_traces(build)
    stored = [variable.stored for variable in build.writes]
    with contextlib.ExitStack() as stack:
        for extended in dict.fromkeys(v.strategy.extended for v in build.writes):
            stack.enter_context(extended.pause_writers())
        stack.enter_context(build.lock)
        # A program donates the arrays it steps; give it copies here.
        before: list[Any] = [s.require() for s in stored]
        before = [x if s.is_remote else jnp.copy(x) for s, x in zip(stored, before, strict=True)]
        returned = signature.jitted(before, build.collect_read(), kwargs, *args)
        jax.block_until_ready(returned[0])
        spec = spec_of(returned)

        def store() -> Any:
            for each, array in zip(stored, returned[0], strict=True):
                each.swap(array)
            return returned[2] if finish is None else finish(spec.results(returned[2]))

        try:
            result = store()
        except BaseException:
            store()  # a signal raised in it: write all of the step or nothing
            raise
    return result, spec


def _begin(
    build: Build, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Launch | None:
    """Records that a program is about to run; None if only this process runs it."""
    if not build.spans_processes:
        lone_programs.record(build.name, ledger.count)
        return None
    paths = signature.host_leaves
    arguments = checksum(paths, args, kwargs) if paths else 0
    return ledger.begin_launch(Launch(build.name, signature.agreed, arguments))


def _end_launch(launch: Launch, returned: tuple[Any, ...] | None) -> None:
    """Records that a program runs, and the array that is ready when it completes.

    If nothing was returned, the call has raised before the program ran.
    """
    if returned is None:
        ledger.abandon_launch(launch)
        return
    _, _, arrays, token = returned
    if token is None and arrays:
        token = arrays[spec_of(returned).completion or 0]
    ledger.end_launch(launch, token)


def _complete_raised(
    build: Build,
    returned: tuple[Any, ...] | None,
    finish: Finish | None,
    launch: Launch | None,
) -> None:
    """Completes a call that raised: either its step happened, or its arrays are lost."""
    cell = build.owned.cell
    if isinstance(cell[0], tuple):
        returned = cell[0]
        cell[0] = returned[0]
    if launch is not None:
        _end_launch(launch, returned)
    if returned is not None:
        if finish is not None:
            finish(spec_of(returned).results(returned[2]))
        return
    for variable, array in zip(build.writes, build.owned.arrays, strict=True):
        if isinstance(array, jax.Array) and array.is_deleted():
            variable.stored.lose()


# -- foreign traces ------------------------------------------------------------


def require_outside_traces(build: Build) -> None:
    """Raises if the program is called in a JAX trace that would bake in its variables.

    Derivatives of a read-only program are legal: their traces hold no constants.
    """
    if jax_compat.tracing() and (build.writes or jax_compat.staging()):
        raise TraceLeakError(_leak_text(build))


def _leak_text(build: Build) -> str:
    """Returns the error text for calling a program with variables in a JAX trace."""
    name, variable = build.name, build.variables[0].name
    return message(
        f"{name} reads or writes variable {variable!r} and needs to be called "
        "outside of JAX traces, or inside distjax.jit",
        got="a call inside jax.jit, grad or another JAX trace",
        why="the trace would bake in the variable's current value and lose its new one",
        fix="compile the step with distjax.jit in place of jax.jit: it follows variables",
    )
