"""A program whose function may be given, or capture, objects with state."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax

from distjax.objects.claims import HeldClaims
from distjax.objects.stateful import StateFound
from distjax.objects.stateful_args import extract_objects
from distjax.program.program import Program
from distjax.replica.arguments import function_name, positional_names
from distjax.replica.feedback import Feedback


class StatefulProgram:
    """A program, and the objects with state that each call of it takes or captures.

    Whether it is, is found at the first calls; a later one that differs is found when
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
        strategy: Callable[[], Any],
        donated: Collection[int] = (),
        on_second_call: Callable[[], None] | None = None,
    ):
        self._program, self._resolve = program, resolve
        self._strategy, self._donated = strategy, donated
        self._on_second_call = on_second_call
        self._was_called = False
        self._names = function_name(resolve()), positional_names(resolve())
        self._feedback: Feedback | None = None
        self._is_plain = False  # there have been calls, and no objects

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the program and returns the user's results."""
        if self._is_plain:
            try:
                return self._program(args, kwargs)
            except StateFound:
                self._is_plain = False
        if self._was_called and self._on_second_call is not None:
            self._on_second_call()
            self._on_second_call = None
        if self._was_called:
            feedback, self._feedback = self._feedback, None
            if feedback is not None:
                feedback.compare(args, kwargs)
            return self._with_objects(args, kwargs, self._program)
        feedback = Feedback(*self._names, args, kwargs)
        result = self._with_objects(args, kwargs, self._program)
        feedback.remember(result)
        self._feedback = feedback
        return result

    def lower(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> jax.stages.Lowered:
        """Returns the `jax.stages.Lowered` of the program for these arguments."""
        lower = lambda args, kwargs, finish=None: self._program.lower(args, kwargs)
        return self._with_objects(args, kwargs, lower)

    def _with_objects(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], program: Callable[..., Any]
    ) -> Any:
        """Returns what `program` does of the arguments; its objects are claimed meanwhile."""
        held = HeldClaims()
        try:
            stateful = extract_objects(
                self._resolve(), args, kwargs, self._strategy(), self._donated, held
            )
            self._is_plain, self._was_called = self._was_called and stateful is None, True
            return program(args, kwargs) if stateful is None else stateful.call(program)
        finally:
            try:
                held.release()
            except BaseException:  # a signal raised in it
                held.release()
                raise
