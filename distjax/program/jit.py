"""dj.jit: a whole step as one program that tracks variables.

The result keeps one `Program` for each strategy and kind of context that it is called in. Inside a
distjax trace it calls the function itself.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.sharding import get_abstract_mesh

from distjax import user_mesh
from distjax.context import frames
from distjax.context.expectation import without_expectations
from distjax.context.frames import Frame
from distjax.errors import message
from distjax.integers import is_int
from distjax.objects.claims import HeldClaims
from distjax.objects.program_form import ObjectKeywords
from distjax.objects.stateful import active_bridge
from distjax.objects.stateful_args import StatefulArgs, emit_call, extract_objects
from distjax.placement.per_replica import off_their_devices
from distjax.program.ahead import LoweredProgram
from distjax.program.error_notes import add_argument_note, explain_devices
from distjax.program.program import Program, Require
from distjax.program.retraces import record_new_function
from distjax.replica.arguments import (
    as_static,
    function_name,
    is_module,
    positional_names,
    require_callable,
    unmark,
)
from distjax.tracebacks import keep_user_lines
from distjax.typing import PyTree
from distjax.user_mesh import NO_MESH
from distjax.variables.state import TraceState


class CompiledFunction:
    """The result of `dj.jit`: the function, compiled at its first call.

    Args:
      fn: the function.
      donate_argnums: the positional arguments whose buffers are donated.
      static: names of arguments that are Python values.
      require: for a function that passes its arguments on to `run`: raises for those that
        `run` rejects. Such a function receives static values still marked.
      renew: for such a function: returns the like for a copy of the user's function.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        donate_argnums: tuple[int, ...],
        static: frozenset[str],
        require: Require | None = None,
        renew: Callable[[Callable[..., Any]], CompiledFunction] | None = None,
    ):
        functools.update_wrapper(self, fn)
        self._fn, self._donate_argnums, self._static = fn, donate_argnums, static
        self._require, self._renew = require, renew
        self._programs: dict[Any, Program] = {}
        self._outermost: Program | None = None  # of the default context
        self._off_mesh: set[Program] = set()

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Any:
        """Runs the program; inside a distjax trace, calls the function itself."""
        program = None if frames.stack() else self._outermost
        if program is None:
            frame = frames.current()
            if frame.state is not None:
                return self._call_here(args, kwargs, frame.state)
            program = self._program(frame)
        try:
            if self._static:
                args, kwargs = self.mark_arguments(args, kwargs)
            if get_abstract_mesh() is not NO_MESH and user_mesh.has_user_mesh():
                return self._under_user_mesh(program, program.call, args, kwargs)
            return program.call(args, kwargs)
        except Exception as error:
            add_argument_note(error)
            keep_user_lines(error)
            explained = explain_devices(error, repr(self))
            if explained is not error:
                raise explained from error
            raise

    def _call_here(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], state: TraceState
    ) -> Any:
        """Calls the function in the trace of the code that calls it."""
        if self._require is None:
            args, kwargs = unmark((args, kwargs))
        args, kwargs = without_expectations(args, kwargs, state.expectations)
        return self._fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"dj.jit({function_name(self._fn)})"

    def lower(self, *args: PyTree, **kwargs: PyTree) -> LoweredProgram:
        """Returns the program for these arguments, lowered but not run."""
        frame = frames.current()
        program, marked = self._program(frame), self.mark_arguments(args, kwargs)
        try:
            if user_mesh.has_user_mesh():
                lowered = self._under_user_mesh(program, program.lower, *marked)
            else:
                lowered = program.lower(*marked)
        except Exception as error:
            keep_user_lines(error)
            raise
        static_kwargs = {k: v for k, v in kwargs.items() if k in self._static}
        call = functools.partial(_call_within, frame, self)
        names = positional_names(self._fn)
        return LoweredProgram(lowered, call, args, marked[0], static_kwargs, names)

    def _under_user_mesh(
        self,
        program: Program,
        call: Callable[..., Any],
        args: Sequence[PyTree],
        kwargs: dict[str, PyTree],
    ) -> Any:
        """Calls with or without the mesh that the user has set, as the function needs.

        User code may name the mesh; JAX rejects a strategy's code under it.
        """
        ignoring = user_mesh.ignores_user_mesh(call)
        if program in self._off_mesh or frames.current().has_strategy:
            return ignoring(args, kwargs)
        try:
            return call(args, kwargs)
        except ValueError as error:
            if not user_mesh.is_refusal(error):
                raise  # the user's function is not called again for an error of its own
            try:
                result = ignoring(args, kwargs)
            except Exception:
                raise error from None
            self._off_mesh.add(program)
            return result

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledFunction:
        """Returns one that compiles anew; of a method, bound to the copy of its object."""
        if self._renew is not None:
            return self._renew(copy.deepcopy(vars(self._fn)["__wrapped__"], memo))
        return CompiledFunction(copy.deepcopy(self._fn, memo), self._donate_argnums, self._static)

    def fresh_copy(self) -> CompiledFunction:
        """Returns a copy that shares no compiled program with this one."""
        own = self._donate_argnums, self._static, self._require, self._renew
        return CompiledFunction(self._fn, *own)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Binds a decorated method to its object."""
        if instance is None:
            return self
        bridge = active_bridge()
        is_stateful = bridge is not None and bridge.is_stateful(instance)
        is_argument = is_stateful or is_module(instance)
        return functools.partial(self, instance if is_argument else as_static(instance, "self"))

    def _program(self, frame: Frame) -> Program:
        key = (frame.strategy, frame.replica_context is None, frame.in_update)
        program = self._programs.get(key)
        if program is None:
            step = JitStep(self._fn, frame, self._donate_argnums, self._require is not None)
            on_second_call = record_new_function(self._fn, frame.strategy)
            program = Program(step, on_second_call, self._require)
            self._programs[key] = program
            if not frames.stack():
                self._outermost = program
        return program

    def mark_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments with static ones as Static."""
        if not self._static:
            return args, kwargs
        names = positional_names(self._fn)
        args = tuple(
            as_static(a, names[i]) if i < len(names) and names[i] in self._static else a
            for i, a in enumerate(args)
        )
        return args, {k: as_static(v, k) if k in self._static else v for k, v in kwargs.items()}


def _call_within(frame: Frame, fn: CompiledFunction, *args: PyTree, **kwargs: PyTree) -> Any:
    """Calls a function under the strategy that it was lowered under."""
    if frames.current().strategy is frame.strategy:
        return fn(*args, **kwargs)
    with frames.with_frame(frame):
        return fn(*args, **kwargs)


class JitStep:
    """A function of `dj.jit`, as the step of a program.

    Args:
      fn: the function.
      frame: the frame that it was called in.
      donate_argnums: the positional arguments whose buffers are donated.
      hands_on_static: whether the function receives static values still marked, since it
        passes its arguments on to `run`.
    """

    ignores_user_mesh = False  # its code may name the mesh

    def __init__(
        self,
        fn: Callable[..., Any],
        frame: Frame,
        donate_argnums: tuple[int, ...],
        hands_on_static: bool,
    ):
        self._fn, self._frame, self._hands_on_static = fn, frame, hands_on_static
        self.function = vars(fn)["__wrapped__"] if hands_on_static else fn
        self.name, self.argument_names = function_name(fn), positional_names(fn)
        self.donate_argnums = donate_argnums

    def frame(self, state: TraceState) -> Frame:
        """Returns the frame of the call, with variables in `state`."""
        return dataclasses.replace(frames.current(), state=state)

    def emit(self, state: TraceState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the function in the global view."""
        if not self._hands_on_static:
            args, kwargs = unmark((args, kwargs))
        own = kwargs.kwargs if isinstance(kwargs, ObjectKeywords) else kwargs
        args, own = without_expectations(args, own, state.expectations)
        if isinstance(kwargs, ObjectKeywords):
            return emit_call(self._fn, args, dataclasses.replace(kwargs, kwargs=own))
        return emit_call(self._fn, args, own)

    def place(self, tree: PyTree) -> Any:
        """Returns uncommitted arguments, which the program may move to its devices."""
        return off_their_devices(tree)

    def find_objects(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], held: HeldClaims | None
    ) -> StatefulArgs | None:
        """Returns the stateful objects that a call takes or the function captured."""
        strategy = self._frame.strategy if self._frame.has_strategy else None
        return extract_objects(self._fn, args, kwargs, strategy, self.donate_argnums, held)


def jit(
    fn: Callable[..., Any] | None = None,
    *,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Any:
    """Returns ``fn`` compiled into one program that tracks variables.

    It is to variables what `nnx.jit` is to Flax modules. All calls to `run` and `reduce` and all
    assignments become one XLA program; variables that are read become inputs, and variables that
    are written become donated inputs and outputs.

    Args:
      fn: a function of pytrees of arrays, PerReplica and hashable Python objects.
      donate_argnums: positional arguments whose buffers the program may reuse.
      static_argnums: positions of parameters that are Python values, part of the program.
      static_argnames: the same, by name.

    Locality: that of ``fn``; every JAX array that is not PerReplica is Mirrored inside.
    Context: any; inside another `dj.jit` or `run` it calls the function itself.

    Raises:
      TypeError: ``fn`` is not callable.
      ValueError: ``fn`` has no parameter of a given number or name; or a number is not an int.

    Example:
      >>> strategy = dj.VirtualStrategy(2)
      >>> with strategy.scope():
      ...     count = dj.Variable(0, name="count")
      >>> @dj.jit
      ... def step(x):
      ...     total = strategy.reduce("sum", strategy.run(lambda x: x * 2, args=(x,)))
      ...     count.assign_add(1)
      ...     return total
      >>> step(jnp.float32(3)), int(count.value)
      (Array(12., dtype=float32), 1)
    """
    if fn is None:
        return functools.partial(
            jit,
            donate_argnums=donate_argnums,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
        )
    require_callable(fn, "jit")
    donate = donated_numbers(fn, donate_argnums)
    numbers = as_numbers(static_argnums, "static_argnums")
    static = frozenset((static_argnames,) if isinstance(static_argnames, str) else static_argnames)
    _require_names(fn, static)
    return CompiledFunction(fn, donate, static | _names_of(fn, numbers))


def donated_numbers(fn: Callable[..., Any], given: int | Sequence[int]) -> tuple[int, ...]:
    """Returns the positions of the arguments to donate, with negative ones resolved.

    Raises:
      ValueError: one is not an int, or is out of range.
    """
    numbers, names = as_numbers(given, "donate_argnums"), positional_names(fn)
    unknown = [n for n in numbers if not -len(names) <= n < _most_arguments(fn)]
    if unknown:
        raise ValueError(
            message(
                f"jit: donate_argnums needs positions of parameters of {function_name(fn)}",
                got=f"{unknown}; its positional parameters are {names}",
                why="an argument is donated by the position of its parameter; a negative number is "
                "counted from the last of them",
                fix="dj.jit(fn, donate_argnums=(0,))",
            )
        )
    return tuple(n % len(names) if n < 0 else n for n in numbers)


def _most_arguments(fn: Callable[..., Any]) -> float:
    """Returns how many positional arguments ``fn`` may take; infinite if unknown."""
    try:
        kinds = [p.kind for p in inspect.signature(fn).parameters.values()]
    except (TypeError, ValueError):
        return math.inf
    return math.inf if inspect.Parameter.VAR_POSITIONAL in kinds else len(positional_names(fn))


def as_numbers(
    given: int | Iterable[int], argument: str, method: str = "jit", at_least: float = -math.inf
) -> tuple[int, ...]:
    """Returns one number of a positional argument, or several, as a tuple.

    Args:
      given: what the user gave.
      argument: what the user gave it for, as in "donate_argnums".
      method: the function that the user called.
      at_least: the smallest number that is allowed.

    Raises:
      ValueError: one is not an int, or is less than `at_least`.
    """
    numbers = tuple(given) if isinstance(given, Iterable) else (given,)
    if all(is_int(n) and n >= at_least for n in numbers):
        return numbers
    raise ValueError(
        message(
            f"{method}: {argument} needs numbers of positional arguments",
            got=f"{numbers}",
            why="such an argument is found by its position",
            fix=f"dj.{method}(fn, {argument}=(0,))",
        )
    )


def _names_of(fn: Callable[..., Any], numbers: Sequence[int]) -> frozenset[str]:
    """Returns the names of the positional parameters with these numbers."""
    names = positional_names(fn) if numbers else []
    unknown = [n for n in numbers if not -len(names) <= n < len(names)]
    if unknown:
        raise ValueError(
            message(
                f"jit: static_argnums needs positions of parameters of {function_name(fn)}",
                got=f"{unknown}; its positional parameters are {names}",
                why="a static argument is found by the name of its parameter",
                fix="dj.jit(fn, static_argnums=(0,))",
            )
        )
    return frozenset(names[n] for n in numbers)


def _require_names(fn: Callable[..., Any], static: frozenset[str]) -> None:
    if not static:
        return
    parameters = inspect.signature(fn).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    unknown = sorted(static - set(parameters))
    if unknown:
        raise ValueError(
            message(
                f"jit: static_argnames needs names of parameters of {function_name(fn)}",
                got=f"{unknown}; it has {list(parameters)}",
                why="a static argument is found by its name",
                fix=f"dj.jit(fn, static_argnames=({next(iter(parameters), 'name')!r},))",
            )
        )
