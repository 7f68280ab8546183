"""A function of `dj.pmap` as the step of a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from distjax.context.contracts import StrategyLike
from distjax.context.frames import Frame
from distjax.objects.stateful_args import emit_run
from distjax.replica.run_options import RunOptions
from distjax.strategies.pmap_arguments import MappedArguments
from distjax.typing import PyTree
from distjax.variables.state import TraceState


class PmapStep:
    """A mapped function on the replicas of one strategy.

    Args:
      strategy: the strategy on whose replicas it runs.
      fn: the function.
      arguments: how its arguments are mapped.
      options: how its results are mapped, and the name of its axis.
      donate_argnums: the positional arguments whose buffers are donated.
    """

    ignores_user_mesh = takes_objects = True

    def __init__(
        self,
        strategy: StrategyLike,
        fn: Callable[..., Any],
        arguments: MappedArguments,
        options: RunOptions,
        donate_argnums: tuple[int, ...],
    ):
        self.strategy, self._arguments = strategy, arguments
        self.function = self._fn = fn
        self._options = dataclasses.replace(options, leaves_program=True)
        self.name, self.argument_names = arguments.function, arguments.names
        self.donate_argnums = donate_argnums

    def frame(self, state: TraceState) -> Frame:
        """Returns a frame of cross-replica context."""
        return Frame(self.strategy, state=state)

    def emit(self, state: TraceState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the function on every replica, each on its rows."""
        args, kwargs = self._arguments.as_values(args, kwargs, self.strategy.extended.topology)
        return emit_run(self.strategy, self._fn, args, kwargs, state, self._options)

    def place(self, tree: PyTree) -> Any:
        """Returns the arguments with arrays from elsewhere on the strategy's devices."""
        args, kwargs = tree
        return self._arguments.placed(args, kwargs, self.strategy.extended.topology)
