"""A program whose function may be given, or capture, objects with state."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax

from distjax.objects.stateful import StateFound
from distjax.objects.stateful_args import StatefulArgs, extract_objects
from distjax.program.program import Program


class StatefulProgram:
    """A program, and the objects with state that each call of it takes or captures.

    Whether it is, is found at the first call; a later one that differs is found when
    it is traced, so that a call without objects pays nothing.

    Args:
      program: the program; its call emits with `emit_run` or `emit_call`.
      resolve: returns the user's function.
      strategy: the strategy to place the objects for, or None.
      donated: numbers of the positional arguments that are donated.
      on_second_call: is called once, at the second call.
    """

    def __init__(
        self,
        program: Program,
        resolve: Callable[[], Any],
        strategy: Any,
        donated: Collection[int] = (),
        on_second_call: Callable[[], None] | None = None,
    ):
        self._program, self._resolve = program, resolve
        self._strategy, self._donated = strategy, donated
        self._on_second_call = on_second_call
        self._has_objects: bool | None = None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the program and returns the user's results."""
        if self._on_second_call is not None and self._has_objects is not None:
            self._on_second_call()
            self._on_second_call = None
        if self._has_objects is False:
            try:
                return self._program(args, kwargs)
            except StateFound:
                self._has_objects = True
        stateful = self._extract(args, kwargs)
        if stateful is None:
            return self._program(args, kwargs)
        return self._program(stateful.args, stateful.kwargs, stateful.finish)

    def lower(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> jax.stages.Lowered:
        """Returns the `jax.stages.Lowered` of the program for these arguments."""
        stateful = self._extract(args, kwargs)
        if stateful is not None:
            args, kwargs = stateful.args, stateful.kwargs
        return self._program.lower(args, kwargs)

    def _extract(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StatefulArgs | None:
        stateful = extract_objects(self._resolve(), args, kwargs, self._strategy(), self._donated)
        self._has_objects = self._has_objects or stateful is not None
        return stateful
