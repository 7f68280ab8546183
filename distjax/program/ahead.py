"""Ahead-of-time compilation: `lower(*args).compile()(*args)`, as with `jax.jit`.

JAX's own stages take the operands of a program, its variables first, which users do not have. So
the stages here forward everything to JAX's except the call, which calls the function itself: that
finds what was compiled here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from distjax.errors import message
from distjax.typing import PyTree


class LoweredProgram:
    """A program lowered for some arguments: a `jax.stages.Lowered` that knows its function.

    Args:
      lowered: JAX's stage.
      call: calls the function with all its arguments.
      args: its positional arguments.
      marked: the same, with the static ones wrapped in `Static`.
      static_kwargs: the keyword arguments that are static.
      names: the names of the function's positional parameters.
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

    Args:
      compiled: JAX's stage.
      call: calls the function, given the arguments that are not static.
      options: the compiler options, if any.
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
