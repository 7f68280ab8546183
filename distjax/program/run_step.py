"""RunStep: a replica function as the step of a program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from distjax.context.contracts import ExtendedLike, StrategyLike
from distjax.context.frames import Frame
from distjax.objects.claims import HeldClaims
from distjax.objects.stateful import is_placeholder
from distjax.objects.stateful_args import StatefulArgs, emit_run, extract_objects
from distjax.placement.per_replica import PerReplica, is_per_replica, require_in_front
from distjax.placement.rows import require_not_split
from distjax.placement.topology import Topology
from distjax.placement.transfer import is_elsewhere, transfer
from distjax.program.jit import CompiledFunction, donated_numbers
from distjax.program.program import Program, Require
from distjax.program.retraces import record_new_function
from distjax.replica.arguments import function_name, positional_names, require_callable, user_path
from distjax.typing import PyTree
from distjax.variables.state import TraceState


class RunStep:
    """A replica function as the step of a program.

    Args:
      extended: the `extended` of the strategy whose replicas run it.
      resolve: returns the function, which a program does not keep alive.
    """

    donate_argnums = ()
    ignores_user_mesh = True

    def __init__(self, extended: ExtendedLike, resolve: Callable[[], Any]):
        self._extended, self._resolve = extended, resolve
        self.name = function_name(resolve())
        self.argument_names = positional_names(resolve())

    @property
    def function(self) -> Callable[..., Any]:
        """The user's function."""
        return self._resolve()

    def frame(self, state: TraceState) -> Frame:
        """Returns a frame of cross-replica context."""
        return Frame(self._extended.strategy, state=state)

    def emit(self, state: TraceState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the function on every replica."""
        return emit_run(self._extended.strategy, self._resolve(), args, kwargs, state)

    def place(self, tree: PyTree) -> Any:
        """Returns the arguments, with arrays on other devices moved to the strategy's."""
        return place_arguments(self._extended.topology, tree)

    def find_objects(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], held: HeldClaims | None
    ) -> StatefulArgs | None:
        """Returns the stateful objects that a call takes or the function captured."""
        return extract_objects(self._resolve(), args, kwargs, self._extended.strategy, (), held)


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
    """Raises for an array that is split over the replicas without being a PerReplica.

    Args:
      topology: the replicas.
      name: the name of the function.
      argument_names: the names of its positional arguments.
      args: positional arguments.
      kwargs: keyword arguments.
    """
    leaves = jax.tree_util.tree_leaves_with_path((args, kwargs), is_leaf=_is_one_argument)
    for path, leaf in leaves:
        if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, PerReplica)):
            where = f"argument {user_path(jax.tree_util.keystr(path), argument_names)} of {name}"
            if isinstance(leaf, PerReplica):
                require_in_front(leaf, topology, where)
            else:
                require_not_split(leaf, topology, where)


def _is_one_argument(value: object) -> bool:
    return is_per_replica(value) or is_placeholder(value)


def place_arguments(topology: Topology, tree: PyTree) -> Any:
    """Returns the arguments of `run`, with arrays moved to the strategy's devices."""
    devices = set(topology.devices)

    def place(leaf: PyTree) -> Any:
        return transfer(leaf, topology.mirrored) if is_elsewhere(leaf, devices) else leaf

    return jax.tree.map(place, tree, is_leaf=is_per_replica)


def make_run_program(extended: ExtendedLike, resolve: Callable[[], Any]) -> Program:
    """Returns the program of a replica function.

    Args:
      extended: the `extended` of the strategy whose replicas run it.
      resolve: returns the function, which a program does not keep alive.
    """
    fn = resolve()
    on_second_call = record_new_function(fn, extended.strategy)
    return Program(RunStep(extended, resolve), on_second_call, _bare_rows_check(extended, fn))


def compile_on_replicas(
    strategy: StrategyLike, fn: Callable[..., Any], donate_argnums: int | Sequence[int]
) -> CompiledFunction:
    """Returns the program that runs ``fn`` on every replica: see `Strategy.jit`."""
    require_callable(fn, "jit")

    @functools.wraps(fn)
    def run_on_replicas(*args: PyTree, **kwargs: PyTree) -> Any:
        return strategy.run(fn, args, kwargs)

    donated = donated_numbers(fn, donate_argnums)
    require = _bare_rows_check(strategy.extended, fn)
    renew = lambda copied: compile_on_replicas(strategy, copied, donate_argnums)
    return CompiledFunction(run_on_replicas, donated, frozenset(), require, renew)
