"""Running replica functions: compiled outside of traces, emitted inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from distjax import jax_compat
from distjax.context import frames
from distjax.context.frames import Frame
from distjax.objects.stateful_args import emit_run, run_here
from distjax.placement.per_replica import is_per_replica
from distjax.program.function_cache import FunctionCache
from distjax.program.program import Program
from distjax.program.retraces import fresh_functions
from distjax.program.stateful_program import StatefulProgram
from distjax.replica.arguments import function_name, positional_names


class ReplicaRunner:
    """Runs functions on the replicas of one strategy."""

    def __init__(self, extended: Any):
        self._extended = extended
        self._programs = FunctionCache()

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the results of ``fn`` on every replica, in the global view."""
        strategy, state = self._extended.strategy, frames.current().state
        if state is not None:
            return run_here(strategy, fn, args, kwargs, state)
        program = self._programs.get(fn, self._make_program)
        if jax_compat.has_user_mesh():
            return jax_compat.ignores_user_mesh(program)(args, kwargs)
        return program(args, kwargs)

    def _make_program(self, resolve: Callable[[], Any]) -> StatefulProgram:
        extended = self._extended

        def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            state = frames.current().state
            return emit_run(extended.strategy, resolve(), args, kwargs, state)

        program = Program(
            function_name(resolve()),
            call,
            lambda state: Frame(extended.strategy, state=state),
            self.place_arguments,
            argument_names=positional_names(resolve()),
        )
        on_second_call = fresh_functions.record(resolve(), extended.strategy)
        return StatefulProgram(
            program, resolve, lambda: extended.strategy, on_second_call=on_second_call
        )

    def place_arguments(self, tree: Any) -> Any:
        """Returns the arguments with arrays from elsewhere on the strategy's devices."""
        topology = self._extended.topology
        devices = set(topology.devices)

        def place(leaf: Any) -> Any:
            is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax_compat.Tracer)
            if not is_array or not leaf.committed or leaf.sharding.device_set == devices:
                return leaf
            return jax.device_put(leaf, topology.mirrored)

        return jax.tree.map(place, tree, is_leaf=is_per_replica)
