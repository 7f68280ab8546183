"""A program whose function may be given, or capture, objects with state."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax

from distjax.replica.carrying import Carrier, carry
from distjax.replica.program import Program
from distjax.replica.stateful import StateFound


class CarryingProgram:
    """A program, and the objects with state that each call of it carries.

    Whether it is, is found at the first call; a later one that differs is found when
    it is traced, so that a call without objects pays nothing.

    Args:
      program: the program; its call emits with `emit_run` or `emit_call`.
      resolve: returns the user's function.
      strategy: the strategy to place the objects for, or None.
      donated: numbers of the positional arguments that are donated.
      called_again: is called once, at the second call.
    """

    def __init__(
        self,
        program: Program,
        resolve: Callable[[], Any],
        strategy: Any,
        donated: Collection[int] = (),
        called_again: Callable[[], None] | None = None,
    ):
        self._program, self._resolve = program, resolve
        self._strategy, self._donated = strategy, donated
        self._called_again = called_again
        self._carries: bool | None = None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the program and returns the user's results."""
        if self._called_again is not None and self._carries is not None:
            self._called_again()
            self._called_again = None
        if self._carries is False:
            try:
                return self._program(args, kwargs)
            except StateFound:
                self._carries = True
        carrier = self._carry(args, kwargs)
        if carrier is None:
            return self._program(args, kwargs)
        return self._program(carrier.args, carrier.kwargs, carrier.finish)

    def lower(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> jax.stages.Lowered:
        """Returns the `jax.stages.Lowered` of the program for these arguments."""
        carrier = self._carry(args, kwargs)
        if carrier is not None:
            args, kwargs = carrier.args, carrier.kwargs
        return self._program.lower(args, kwargs)

    def _carry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Carrier | None:
        carrier = carry(self._resolve(), args, kwargs, self._strategy(), self._donated)
        self._carries = self._carries or carrier is not None
        return carrier
