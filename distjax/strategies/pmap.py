"""dj.pmap: the semantics of `jax.pmap` on the replicas of a strategy.

A call finds its replicas (those of `strategy`, of the active strategy, or one for each row on
the local devices) and runs one program for them. Rows become per-replica values, and results are
stacked, inside that program, so the call itself touches no array.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from distjax.context import frames
from distjax.context.contracts import StrategyLike
from distjax.context.frames import Frame
from distjax.context.scoping import require_strategy
from distjax.errors import ContextError, describe_value, message
from distjax.objects.stateful_args import run_here
from distjax.placement.topology import local_devices, require_axis_name
from distjax.program.ahead import LoweredProgram
from distjax.program.error_notes import add_cause_note
from distjax.program.jit import as_numbers
from distjax.program.program import Program
from distjax.program.retraces import record_new_function
from distjax.replica.arguments import (
    FIX_OF_UNHASHABLE,
    as_static,
    function_name,
    is_array,
    positional_names,
    require_callable,
)
from distjax.replica.run_options import AS_VALUES, RunOptions
from distjax.strategies.job_devices import warn_if_alone
from distjax.strategies.mirrored import MirroredStrategy
from distjax.strategies.pmap_arguments import MappedArguments, as_axes
from distjax.strategies.pmap_step import PmapStep
from distjax.strategies.strategy import Strategy
from distjax.tracebacks import keep_user_lines
from distjax.typing import PyTree
from distjax.variables.state import TraceState


class MappedFunction:
    """The result of `dj.pmap`: the function, compiled for the replicas of each call."""

    def __init__(
        self,
        fn: Callable[..., Any],
        arguments: MappedArguments,
        options: RunOptions,
        devices: tuple[jax.Device, ...] | None,
        strategy: Strategy | None,
        donate_argnums: tuple[int, ...],
    ):
        functools.update_wrapper(self, fn)
        self._fn, self._arguments, self._options = fn, arguments, options
        if strategy is not None and strategy.extended.is_default:
            strategy = None
        self._devices, self._strategy, self._donate_argnums = devices, strategy, donate_argnums
        self._programs: dict[StrategyLike, Program] = {}
        self._own: dict[int, Strategy] = {}  # by R, for calls without a strategy

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Any:
        """Runs the program for the call's replicas; in a distjax trace, emits it there."""
        strategy = None
        try:
            args = self._mark_static(args)
            frame = frames.current()
            strategy = self._find_strategy(frame, args, kwargs)
            if frame.state is not None:
                return self._emit_here(strategy, args, kwargs, frame.state)
            return self._program_of(strategy).call(args, kwargs)
        except Exception as error:
            if strategy is not None:
                add_cause_note(error, strategy, self._options.axis_name)
            keep_user_lines(error)
            raise

    def lower(self, *args: PyTree, **kwargs: PyTree) -> LoweredProgram:
        """Returns the program for these arguments, lowered but not run."""
        marked = self._mark_static(args)
        strategy = self._find_strategy(frames.current(), marked, kwargs)
        lowered = self._program_of(strategy).lower(marked, kwargs)
        return LoweredProgram(lowered, self, args, marked, {}, self._arguments.names)

    def __repr__(self) -> str:
        return f"dj.pmap({function_name(self._fn)})"

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Binds a decorated method to its object."""
        return self if instance is None else types.MethodType(self, instance)

    def __deepcopy__(self, memo: dict[int, Any]) -> MappedFunction:
        """Returns one that compiles anew; of a method, bound to the copy of its object."""
        return MappedFunction(
            copy.deepcopy(self._fn, memo),
            self._arguments,
            self._options,
            self._devices,
            self._strategy,
            self._donate_argnums,
        )

    def _mark_static(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        static = self._arguments.static
        if not static:
            return args
        if max(static) >= len(args):
            raise ValueError(_missing_text(self._arguments, len(args)))
        names = self._arguments.names
        return tuple(
            as_static(a, names[i] if i < len(names) else f"args[{i}]", fix=_static_fix(a))
            if i in static
            else a
            for i, a in enumerate(args)
        )

    # -- whose replicas --------------------------------------------------------

    def _find_strategy(
        self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StrategyLike:
        """Returns the strategy whose replicas run a call with these arguments."""
        has_strategy = frame.has_strategy
        if has_strategy and frame.replica_context is not None:
            raise ContextError(_nested_text(self._arguments.function, frame.name))
        count = self._arguments.num_rows(args, kwargs)
        if self._arguments.axis_size not in (None, count):
            raise ValueError(_axis_size_text(self._arguments, count))
        strategy = frame.strategy if self._strategy is None and has_strategy else self._strategy
        if strategy is None:
            return self._own.get(count) or self._make_own(count)
        if self._devices is not None:
            raise ValueError(_devices_text(strategy))
        if has_strategy:
            frames.require_enterable(strategy, "pmap")
        if count != strategy.num_replicas_in_sync:
            raise ValueError(_count_text(self._arguments.function, count, strategy))
        return strategy

    def _make_own(self, count: int) -> Strategy:
        if not count:
            raise ValueError(_no_rows_text(self._arguments.function))
        if self._devices is None:
            warn_if_alone("pmap without a strategy", "devices=jax.local_devices()")
        devices = local_devices() if self._devices is None else self._devices
        if count > len(devices):
            raise ValueError(_too_few_text(self._arguments.function, count, devices))
        return self._own.setdefault(count, strategy_of(tuple(devices[:count])))

    # -- programs --------------------------------------------------------------

    def _program_of(self, strategy: StrategyLike) -> Program:
        program = self._programs.get(strategy)
        if program is None:
            step = PmapStep(
                strategy, self._fn, self._arguments, self._options, self._donate_argnums
            )
            program = Program(step, record_new_function(self._fn, strategy))
            program = self._programs.setdefault(strategy, program)
        return program

    def _emit_here(
        self,
        strategy: StrategyLike,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: TraceState,
    ) -> Any:
        args, kwargs = self._arguments.as_values(args, kwargs, strategy.extended.topology)
        return run_here(strategy, self._fn, args, kwargs, state, self._options)


@functools.cache
def strategy_of(devices: tuple[jax.Device, ...]) -> MirroredStrategy:
    """Returns the strategy on these devices that all calls without a strategy share."""
    return MirroredStrategy(devices)


def pmap(
    fn: Callable[..., Any],
    axis_name: str | None = None,
    *,
    in_axes: PyTree = 0,
    out_axes: PyTree = 0,
    static_broadcasted_argnums: int | Iterable[int] = (),
    devices: Sequence[jax.Device] | None = None,
    backend: str | None = None,
    axis_size: int | None = None,
    donate_argnums: int | Iterable[int] = (),
    strategy: Strategy | None = None,
    results: str = "stacked",
) -> MappedFunction:
    """Returns ``fn`` mapped over rows, one per replica, as `jax.pmap` maps it.

    R is the size of the mapped axes. The replicas are those of `strategy` or of the active
    strategy; without either, one on each of the first R local devices. The body is a replica
    function: `merge_call`, variables and `dj.get_replica_context()` work in it.

    Args:
      fn: the replica function.
      axis_name: the name of the replica axis in this function; None: the strategy's.
      in_axes: a prefix of the positional arguments: the axis of the rows, or None for a
        value shared by all replicas. Keyword arguments use axis 0.
      out_axes: a prefix of the results: the position of their replica axis, or None for one
        value. If that is not proved equal, replica 0's is returned with a LocalityWarning,
        which `dj.expect` silences.
      static_broadcasted_argnums: numbers of positional arguments that are Python values,
        compiled into the program.
      devices: the replicas' devices; the first R are used.
      backend: the backend whose local devices are used if `devices` is None.
      axis_size: R again, to be checked.
      donate_argnums: positional arguments whose buffers the program may reuse; -1 is the last.
      strategy: the strategy to run on; it must have R replicas.
      results: "stacked": arrays [R, ...], as in `jax.pmap`; "values": as `run` returns them.

    Locality: in: rows, a PerReplica, or M for None; out: stacked, M for None, or as for `run`.
    Context: cross-replica or default; also inside `dj.jit`, `jit`, `vmap`, `grad` and loops.
    Cost: as for `run`. Source: jax.pmap.

    Raises:
      TypeError: not a function; an axis that is not an int.
      ValueError: the number of rows is not that of replicas, exceeds that of devices, or is 0;
        axes that do not fit; an unhashable static argument; an axis name that is not a string.
      LocalityError: a PerReplica where the axis is None.
      ContextError: inside another replica function.

    Example:
      >>> step = dj.pmap(lambda x: x / jax.lax.psum(x, "i"), axis_name="i")
      >>> step(jnp.arange(4.0))
      Array([0.        , 0.16666667, 0.33333334, 0.5       ], dtype=float32)
    """
    require_callable(fn, "pmap")
    options = _options(axis_name, out_axes, results)
    name, names = function_name(fn), positional_names(fn)
    static, donated = _static_and_donated(static_broadcasted_argnums, donate_argnums, len(names))
    own = _own_devices(name, devices, backend, strategy)
    arguments = MappedArguments(name, names, as_axes(in_axes, "in_axes"), axis_size, static)
    return MappedFunction(fn, arguments, options, own, strategy, donated)


def _static_and_donated(
    static_argnums: int | Iterable[int], donate_argnums: int | Iterable[int], num_parameters: int
) -> tuple[frozenset[int], tuple[int, ...]]:
    static = as_numbers(static_argnums, "static_broadcasted_argnums", "pmap", 0)
    donated = as_numbers(donate_argnums, "donate_argnums", "pmap", -num_parameters)
    donated = tuple(n + num_parameters if n < 0 else n for n in donated)  # counted from the last
    if set(static) & set(donated):
        raise ValueError(_both_text(static, donated))
    return frozenset(static), donated


def _own_devices(
    name: str,
    devices: Sequence[jax.Device] | None,
    backend: str | None,
    strategy: Strategy | None,
) -> tuple[jax.Device, ...] | None:
    """Returns the devices that the user named for the replicas, or None."""
    require_strategy(strategy, "pmap")
    if devices is None and backend is None:
        return None
    if strategy is not None:
        raise ValueError(_devices_text(strategy))
    devices = jax.local_devices(backend=backend) if devices is None else devices
    if not len(devices):
        raise ValueError(_too_few_text(name, 1, ()))
    return tuple(devices)


def _options(axis_name: str | None, out_axes: PyTree, results: str) -> RunOptions:
    if axis_name is not None:
        require_axis_name(axis_name, "dj.pmap(fn, axis_name='batch')")
    if results not in ("stacked", "values"):
        raise ValueError(_results_text(results))
    return RunOptions(
        axis_name, as_axes(out_axes, "out_axes") if results == "stacked" else AS_VALUES
    )


# -- error texts ----------------------------------------------------------------


def _static_fix(value: object) -> str:
    if is_array(value):
        return "leave it out of static_broadcasted_argnums; in_axes=None for what all share"
    return FIX_OF_UNHASHABLE


def _no_rows_text(function: str) -> str:
    return message(
        f"pmap of {function} needs a row for each replica",
        got="0 rows in the mapped arguments",
        why="without a strategy there are as many replicas as rows",
        fix="leave the call out where there is no data",
    )


def _both_text(static: Sequence[int], donated: Sequence[int]) -> str:
    return message(
        "pmap: static_broadcasted_argnums and donate_argnums need to name different arguments",
        got=f"both name {sorted(set(static) & set(donated))}",
        why="a Python value has no buffer to reuse",
        fix="donate_argnums for arrays only",
    )


def _results_text(results: object) -> str:
    return message(
        'pmap: results needs "stacked" or "values"',
        got=describe_value(results),
        why="results come back as arrays [R, ...], or as strategy.run returns them",
        fix='dj.pmap(fn, results="values")',
    )


def _devices_text(strategy: StrategyLike) -> str:
    return message(
        "pmap needs devices, or a backend, or a strategy",
        got=f"devices or a backend, and {strategy!r}, whose replicas have devices of their own",
        why="replicas run where their strategy has them",
        fix="leave devices out; or strategy=dj.MirroredStrategy(devices)",
    )


def _missing_text(arguments: MappedArguments, count: int) -> str:
    return message(
        f"pmap: static_broadcasted_argnums={tuple(sorted(arguments.static))} needs all these "
        f"arguments of {arguments.function} by position",
        got=f"{count} positional argument{'' if count == 1 else 's'}",
        why="such an argument is found by its position",
        fix=f"{arguments.function}(x, value), not {arguments.function}(x, name=value)",
    )


def _nested_text(function: str, context: str) -> str:
    return message(
        f"pmap of {function} needs to stand outside of replica functions",
        got=f"a call in {context}",
        why="a replica has no replicas of its own (nor has jax.pmap inside jax.pmap)",
        fix=f"one dj.pmap over all rows, with jax.vmap({function}, axis_name=...) in its body for "
        "the inner axis",
    )


def _axis_size_text(arguments: MappedArguments, count: int) -> str:
    return message(
        f"pmap: axis_size={arguments.axis_size} needs to be the size of the mapped axes of "
        f"{arguments.function}",
        got=f"{count} rows",
        why="there is one replica for each row",
        fix="leave axis_size out",
    )


def _too_few_text(function: str, count: int, devices: Sequence[jax.Device]) -> str:
    return message(
        f"pmap of {function} needs a device for each row",
        got=f"{count} rows and {len(devices)} devices",
        why="each row is a replica, and each replica has a device of its own",
        fix=f"dj.pmap({function}, strategy=dj.VirtualStrategy({count})) for replicas that share a "
        "device; or rows [num_devices, k, ...] and jax.vmap in the body",
    )


def _count_text(function: str, count: int, strategy: StrategyLike) -> str:
    return message(
        f"pmap of {function} needs {strategy.num_replicas_in_sync} rows: {strategy!r} has as many "
        "replicas",
        got=f"{count} rows in the mapped arguments",
        why="a scope, and strategy=, say whose replicas run; each takes one row",
        fix=f"x.reshape({strategy.num_replicas_in_sync}, -1, ...); or the call outside of the "
        "scope, for as many replicas as rows",
    )
