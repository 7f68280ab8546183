"""dj.jit: a whole step as one program that tracks variables.

The result keeps one `Program` for each strategy and kind of context that it is called in. Inside a
distjax trace it calls the function itself.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from distjax._src.context import ExtendedLike, Frame, StrategyLike, frames, without_expectations
from distjax._src.objects.stateful import (
    call_of,
    is_placeholder,
    is_stateful,
)
from distjax._src.placement import (
    PerReplica,
    Topology,
    is_elsewhere,
    is_per_replica,
    off_their_devices,
    require_in_front,
    require_not_split,
    transfer,
)
from distjax._src.program.discovery import Step
from distjax._src.program.functions import record_new_function
from distjax._src.program.program import Program, Require
from distjax._src.replica.arguments import (
    as_static,
    function_name,
    is_module,
    positional_names,
    require_callable,
    unmark,
    user_path,
)
from distjax._src.replica.trace import add_value_note, run_in_trace
from distjax._src.traces import is_struct
from distjax._src.typing import PyTree
from distjax._src.user_lines import keep_user_lines
from distjax._src.variables.state import TraceState
from distjax.errors import LocalityError, is_int, message

# -- error notes --------------------------------------------------------------
# Hints for JAX errors caused by how a step uses distjax.


def explain_devices(error: Exception, name: str) -> Exception:
    """Returns the error to raise instead of a JAX error in a program of `dj.jit`."""
    if not isinstance(error, ValueError) or "incompatible devices" not in str(error):
        return error
    return LocalityError(
        f"{name} needs all its variables, and all strategies that it runs, on one set of devices",
        got=str(error).splitlines()[0].removesuffix("."),
        why="dj.jit makes one program, which runs on one set of devices; it moves arguments, "
        "but not variables",
        fix="a dj.jit for each strategy, and np.asarray(v.value) of a variable of the other as "
        "an argument",
    )


def add_argument_note(error: Exception) -> None:
    """Adds a note to an error whose cause is that an argument is traced, or is a struct."""
    add_value_note(error)
    is_about_one = isinstance(error, (TypeError, AttributeError)) and "ShapeDtypeStruct" in str(
        error
    )
    if is_about_one and _STRUCT_NOTE not in getattr(error, "__notes__", ()):
        error.add_note(_STRUCT_NOTE)


_STRUCT_NOTE = (
    "A jax.ShapeDtypeStruct stands for an array where a step is lowered, explained or checked; "
    "a call treats it as a Python object, such as the result shape of a jax.pure_callback.\n"
    "  Fix: step.lower(struct).compile(); an array where the step is called"
)


def add_cause_note(error: Exception, strategy: StrategyLike) -> None:
    """Adds a note to a JAX error with what distjax knows about its cause."""
    add_argument_note(error)
    text = str(error)
    axis = re.search(r"unbound axis name: (\w+)", text)
    name = strategy.extended.public_axis_name
    within = [name for name, _ in strategy.extended.topology.model_axes]
    if isinstance(error, NameError) and axis is not None and axis[1] in within:
        error.add_note(
            f"{axis[1]!r} is an axis within each replica, over which the compiler adds what a step "
            "written for one device needs.\n"
            "  Fix: leave the collective out; or, by hand, in the step: "
            f"jax.shard_map(fn, in_specs=..., out_specs=..., axis_names={{{axis[1]!r}}})"
        )
    elif isinstance(error, NameError) and axis is not None:
        error.add_note(
            f"The replica axis of {strategy!r} {f'is named {name!r}' if name else 'has no name'}.\n"
            f"  Fix: dj.MirroredStrategy(axis_name={axis[1]!r}), dj.pmap(fn, {axis[1]!r}), or "
            "dj.get_replica_context().all_reduce('mean', x)"
        )
    elif isinstance(error, TypeError) and "is not a valid JAX array type" in text:
        error.add_note(
            "An array of strings or of Python objects is used in a computation: devices have no "
            "such arrays.\n"
            "  Fix: leave it out of the batch; or numbers in its place: "
            "np.unique(names, return_inverse=True)[1]"
        )
    elif within and isinstance(error, ValueError) and _NAMES_MANUAL_AXIS.search(text):
        error.add_note(
            f"The step is written for one replica: nothing in it is split over {name!r}.\n"
            f"  Fix: None in place of {name!r} in the spec, or in the rules that it comes from"
        )
    elif within and isinstance(error, ValueError) and "the mesh passed to shard_map" in text:
        error.add_note(
            "The step runs within a map over the replicas, whose mesh is in force.\n"
            "  Fix: jax.shard_map without mesh=, over axes within the replica: "
            f"axis_names={{{within[0]!r}}}"
        )
    elif isinstance(error, ValueError) and text.startswith("Triggering __jax_array__()"):
        error.add_note(
            "A distjax.Variable stands where JAX wants an array.\n"
            "  Fix: v.value in place of v, and jax.grad of a function of values"
        )


#: What JAX says of a constraint that names an axis over which a `shard_map` around it maps.
_NAMES_MANUAL_AXIS = re.compile("can only refer to Auto axes|contains a manual axes")


# -- ahead --------------------------------------------------------------------
# Ahead-of-time compilation: `lower(*args).compile()(*args)`, as with `jax.jit`.
#
# JAX's own stages take the operands of a program, its variables first, which users do not have. So
# the stages here forward everything to JAX's except the call, which calls the function itself: that
# finds what was compiled here.


class LoweredProgram:
    """A program lowered for some arguments: a `jax.stages.Lowered` that knows its function.

    `call` calls that with all its arguments; `marked` are these, the static ones wrapped in
    `Static`.
    """

    def __init__(
        self,
        lowered: jax.stages.Lowered,
        call: Callable[..., Any],
        args: tuple[PyTree, ...],
        marked: tuple[PyTree, ...],
        static_kwargs: Mapping[str, PyTree],
        names: Sequence[str],
    ):
        self._lowered, self._call = lowered, call
        pairs = enumerate(zip(args, marked, strict=True))
        self._static = {i: arg for i, (arg, mark) in pairs if arg is not mark}
        self._static_kwargs, self._names = static_kwargs, names

    def compile(self, compiler_options: dict[str, Any] | None = None) -> CompiledProgram:
        """Returns the compiled program; later calls of the function use it too."""
        compiled = self._lowered.compile(compiler_options)
        return CompiledProgram(compiled, self._call_with, compiler_options)

    def __getattr__(self, name: str) -> Any:
        return _find_attribute(self, "_lowered", name)

    def _call_with(self, *args: PyTree, **kwargs: PyTree) -> Any:
        """Calls the function with the static arguments that it was lowered for."""
        given, by_name = list(args), dict(self._static_kwargs)
        for i, static in self._static.items():
            if i <= len(given) or i >= len(self._names):
                given.insert(i, static)
            else:  # an argument before it comes by keyword
                by_name[self._names[i]] = static
        return self._call(*given, **kwargs, **by_name)


class CompiledProgram:
    """A compiled program: a `jax.stages.Compiled` that takes the function's arguments.

    As in JAX, static arguments are left out of the call. Unlike in JAX, arguments of other shapes
    do not raise but recompile.
    """

    def __init__(
        self,
        compiled: jax.stages.Compiled,
        call: Callable[..., Any],
        options: Mapping[str, Any] | None,
    ):
        self._compiled, self._call, self._options = compiled, call, options

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Any:
        """Runs the program.

        Raises:
          ValueError: it was compiled with options, which a call of the function cannot use.
        """
        if self._options:
            raise ValueError(
                message(
                    "a compiled program that is called needs the default compiler options",
                    got=f"lower(...).compile({dict(self._options)})",
                    why="calling it calls the function itself, which takes no options; with "
                    "options it can only be looked at",
                    fix="lower(...).compile(); options for all programs by XLA_FLAGS",
                )
            )
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return _find_attribute(self, "_compiled", name)


def _find_attribute(stage: LoweredProgram | CompiledProgram, of: str, name: str) -> Any:
    """Returns an attribute of JAX's stage, which a stage being copied does not hold yet."""
    if of not in vars(stage):
        raise AttributeError(name)
    return getattr(vars(stage)[of], name)


class CompiledFunction:
    """The result of `dj.jit`: the function, compiled at its first call.

    With a strategy, that of `Strategy.jit`: the function runs on every replica, and its arguments
    are passed on to `run` with static values still marked.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        donate_argnums: tuple[int, ...],
        static: frozenset[str],
        strategy: StrategyLike | None = None,
    ):
        self._fn, self._donate_argnums, self._static = fn, donate_argnums, static
        self._strategy = strategy
        self._body = fn if strategy is None else _on_replicas(strategy, fn)
        self._require = None if strategy is None else _bare_rows_check(strategy.extended, fn)
        functools.update_wrapper(self, self._body)
        self._programs: dict[Any, Program] = {}
        self._outermost: Program | None = None  # of the default context

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
        if self._strategy is None:
            args, kwargs = unmark((args, kwargs))
        args, kwargs = without_expectations(args, kwargs, state.expectations)
        return self._body(*args, **kwargs)

    def __repr__(self) -> str:
        return f"dj.jit({function_name(self._fn)})"

    def lower(self, *args: PyTree, **kwargs: PyTree) -> LoweredProgram:
        """Returns the program for these arguments, lowered but not run."""
        frame = frames.current()
        program, marked = self._program(frame), self.mark_arguments(args, kwargs)
        try:
            lowered = program.lower(*marked)
        except Exception as error:
            keep_user_lines(error)
            raise
        static_kwargs = {k: v for k, v in kwargs.items() if k in self._static}
        call = functools.partial(_call_within, frame, self)
        names = positional_names(self._fn)
        return LoweredProgram(lowered, call, args, marked[0], static_kwargs, names)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledFunction:
        """Returns one that compiles anew; of a method, bound to the copy of its object."""
        own = self._donate_argnums, self._static, self._strategy
        return CompiledFunction(copy.deepcopy(self._fn, memo), *own)

    def fresh_copy(self) -> CompiledFunction:
        """Returns a copy that shares no compiled program with this one."""
        own = self._donate_argnums, self._static, self._strategy
        return CompiledFunction(self._fn, *own)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Binds a decorated method to its object."""
        if instance is None:
            return self
        is_argument = is_stateful(instance) or is_module(instance)
        return functools.partial(self, instance if is_argument else as_static(instance, "self"))

    def new_program(self) -> Program:
        """Returns a program of its own, for the context of the caller."""
        return Program(self._step(frames.current()), require=self._require)

    def _program(self, frame: Frame) -> Program:
        key = (frame.strategy, frame.replica_context is None, frame.in_update)
        program = self._programs.get(key)
        if program is None:
            on_second_call = record_new_function(self._fn, frame.strategy)
            program = Program(self._step(frame), on_second_call, self._require)
            self._programs[key] = program
            if not frames.stack():
                self._outermost = program
        return program

    def _step(self, frame: Frame) -> Step:
        """Returns the function as the step of a program, which does not keep `self` alive."""
        fn, body, is_plain = self._fn, self._body, self._strategy is None

        def emit(
            _: object, state: TraceState, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            if is_plain:
                args, kwargs = unmark((args, kwargs))
            if (call := call_of(kwargs)) is not None:
                return call.emit_call(body, args, kwargs, state)
            args, kwargs = without_expectations(args, kwargs, state.expectations)
            return body(*args, **kwargs)

        return Step(
            lambda: fn,
            emit,
            off_their_devices,
            function_name(fn),
            positional_names(fn),
            frame.strategy if frame.has_strategy else None,
            self._donate_argnums,
            keeps_context=True,
            ignores_user_mesh=False,  # its code may name the mesh
        )

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
    return CompiledFunction(fn, donate, _static_names(fn, static_argnums, static_argnames))


def _static_names(
    fn: Callable[..., Any], numbers: int | Sequence[int], names: str | Sequence[str]
) -> frozenset[str]:
    """Returns the names of the parameters that are static, given by position or by name."""
    all_names = positional_names(fn) if numbers != () else []
    why = "a static argument is found by the name of its parameter"
    found = _positions(fn, numbers, all_names, len(all_names), "static_argnums", why)
    static = frozenset((names,) if isinstance(names, str) else names)
    _require_names(fn, static)
    return static | {all_names[n] for n in found}


def donated_numbers(fn: Callable[..., Any], given: int | Sequence[int]) -> tuple[int, ...]:
    """Returns the positions of the arguments to donate, with negative ones resolved; or raises."""
    names = positional_names(fn)
    why = (
        "an argument is donated by the position of its parameter; a negative number is counted "
        "from the last of them"
    )
    most = _most_arguments(fn)
    numbers = _positions(fn, given, names, most, "donate_argnums", why)
    return tuple(n % len(names) if n < 0 else n for n in numbers)


def _positions(
    fn: Callable[..., Any],
    given: int | Sequence[int],
    names: Sequence[str],
    most: float,
    argument: str,
    why: str,
) -> tuple[int, ...]:
    """Returns numbers of positional arguments of a function that takes at most that many."""
    numbers = as_numbers(given, argument)
    unknown = [n for n in numbers if not -len(names) <= n < most]
    if unknown:
        raise ValueError(
            message(
                f"jit: {argument} needs positions of parameters of {function_name(fn)}",
                got=f"{unknown}; its positional parameters are {names}",
                why=why,
                fix=f"dj.jit(fn, {argument}=(0,))",
            )
        )
    return numbers


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
    """Returns one number of a positional argument, or several, as a tuple; or raises."""
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


# -- run ----------------------------------------------------------------------


def _bare_rows_check(extended: ExtendedLike, fn: Callable[..., Any]) -> Require:
    """Returns `_require_no_bare_rows` for the arguments of ``fn``."""
    names = function_name(fn), positional_names(fn)
    return functools.partial(_require_no_bare_rows, extended.topology, *names)


def _require_no_bare_rows(
    topology: Topology,
    name: str,
    argument_names: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Raises for an array that is split over the replicas without being a PerReplica."""
    leaves = jax.tree_util.tree_leaves_with_path((args, kwargs), is_leaf=_is_one_argument)
    for path, leaf in leaves:
        if isinstance(leaf, (jax.Array, PerReplica)) or is_struct(leaf):
            where = f"argument {user_path(jax.tree_util.keystr(path), argument_names)} of {name}"
            if isinstance(leaf, PerReplica):
                require_in_front(leaf, topology, where)
            else:
                require_not_split(leaf, topology, where)


def _is_one_argument(value: object) -> bool:
    return is_per_replica(value) or is_placeholder(value)


def place_arguments(topology: Topology, tree: PyTree) -> Any:
    """Returns the arguments of `run`, with arrays moved to the strategy's devices.

    Objects with state are handed on as they are: a tree map would part what they share.
    """
    devices = set(topology.devices)

    def place(leaf: PyTree) -> Any:
        return transfer(leaf, topology.mirrored) if is_elsewhere(leaf, devices) else leaf

    return jax.tree.map(place, tree, is_leaf=lambda x: is_per_replica(x) or is_stateful(x))


def make_run_program(extended: ExtendedLike, resolve: Callable[[], Any]) -> Program:
    """Returns the program of a replica function, which it does not keep alive."""
    strategy, given = extended.strategy, resolve()

    def emit(
        fn: Callable[..., Any], state: TraceState, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if (call := call_of(kwargs)) is not None:
            return call.emit_run(strategy, fn, args, kwargs, state)
        return run_in_trace(strategy, fn, args, kwargs, state)

    place = lambda tree: place_arguments(extended.topology, tree)
    names = function_name(given), positional_names(given)
    step = Step(resolve, emit, place, *names, strategy)
    on_second_call = record_new_function(given, strategy)
    return Program(step, on_second_call, _bare_rows_check(extended, given))


def compile_on_replicas(
    strategy: StrategyLike,
    fn: Callable[..., Any],
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> CompiledFunction:
    """Returns the program that runs ``fn`` on every replica: see `Strategy.jit`."""
    require_callable(fn, "jit")
    donated = donated_numbers(fn, donate_argnums)
    return CompiledFunction(
        fn, donated, _static_names(fn, static_argnums, static_argnames), strategy
    )


def _on_replicas(strategy: StrategyLike, fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def run_on_replicas(*args: PyTree, **kwargs: PyTree) -> Any:
        return strategy.run(fn, args, kwargs)

    run_on_replicas.__qualname__ = function_name(fn)  # of a partial, too, which has no name
    return run_on_replicas
