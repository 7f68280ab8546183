"""Python objects among the arguments, and the arrays that they hold.

An object whose class JAX does not know as a pytree is part of the program, not an input of it. An
array that the function reads from its attributes is a constant of the program, and a value that
the function writes to them is a traced one. Both are found around the trace, by identity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
from jax.extend import core as jec

from distjax import jax_compat
from distjax.errors import TraceLeakError, message
from distjax.objects.held_arrays import find_arrays, leak_text
from distjax.replica.arguments import Static, is_static, user_path
from distjax.typing import PyTree


class _Argument(NamedTuple):
    """A Python object among the arguments.

    Attributes:
      name: the user's name of it.
      static: the object, as part of the program.
      held: the arrays that it held before the trace, by their names.
    """

    name: str
    static: Static
    held: dict[str, jax.Array]


class ObjectArguments:
    """The Python objects among the arguments of a function that is about to be traced.

    Args:
      call: (args, kwargs); objects among them are Static.
      names: names of the positional arguments.
    """

    def __init__(self, call: PyTree, names: Sequence[str]):
        pairs = jax.tree_util.tree_leaves_with_path(call, is_leaf=is_static)
        self._arguments: list[_Argument] = []
        for path, leaf in pairs:
            if isinstance(leaf, Static):
                name = user_path(jax.tree_util.keystr(path), names)
                self._arguments.append(_Argument(name, leaf, find_arrays(leaf.value, name)))

    @property
    def values(self) -> list[object]:
        """The objects."""
        return [each.static.value for each in self._arguments]

    def require_inputs(self, jaxpr: jax_compat.Jaxpr, consts: Sequence[object]) -> None:
        """Raises if the trace read an array of an object that the user did not mark as static.

        Args:
          jaxpr: the trace.
          consts: its constants.

        Raises:
          ValueError: it did.
        """
        implied = [each for each in self._arguments if each.static.is_implied and each.held]
        if not implied:
            return
        baked = {id(constant) for constant in _constants(jaxpr, consts)}
        for name, static, held in implied:
            paths = [path for path, array in held.items() if id(array) in baked]
            if paths:
                raise ValueError(_baked_text(name, static.value, paths))

    def require_no_leaks(self, function: str, results: Sequence[object]) -> None:
        """Raises if the trace has left a traced value in an object.

        Args:
          function: the name of the function that was traced.
          results: the Python objects among its results.

        Raises:
          TraceLeakError: it has.
        """
        before = {id(array) for each in self._arguments for array in each.held.values()}
        for name, static, _ in self._arguments:
            for path, array in find_arrays(static.value, name).items():
                if isinstance(array, jax_compat.Tracer) and id(array) not in before:
                    raise TraceLeakError(leak_text(function, path, array))
        for result in results:
            if isinstance(result, jax_compat.Tracer):  # no array: a `jax.Ref`
                raise TraceLeakError(_ref_text(function, result))
            for path, array in find_arrays(result, type(result).__name__).items():
                if isinstance(array, jax_compat.Tracer) and id(array) not in before:
                    raise TraceLeakError(_result_text(function, path, array))


def _constants(jaxpr: jax_compat.Jaxpr, consts: Sequence[object]) -> Iterator[object]:
    """Yields the constants of a jaxpr and of those in its equations, at any depth."""
    yield from consts
    for eqn in jaxpr.eqns:
        for param in eqn.params.values():
            for each in param if isinstance(param, (tuple, list)) else (param,):
                if isinstance(each, (jec.Jaxpr, jec.ClosedJaxpr)):
                    yield from _constants(*jax_compat.open_jaxpr(each))


def _baked_text(name: str, value: object, paths: Sequence[str]) -> str:
    return message(
        f"argument {name} needs to be a pytree, since the function reads arrays of it",
        got=f"{type(value).__name__}, with arrays at {', '.join(paths)}",
        why="JAX does not know its class, so the object is part of the compiled program, its "
        "arrays would be constants there, and later ones would never be read",
        fix=f"@jax.tree_util.register_dataclass, flax.struct.dataclass, or a dict of its arrays; "
        f"dj.static({name}) if constants are meant",
    )


def _ref_text(function: str, ref: PyTree) -> str:
    return message(
        f"{function} needs to return arrays, or pytrees of them",
        got=f"a {jax.typeof(ref)} that was made in the step",
        why="a reference made in a compiled program is gone when that has run",
        fix="return its value: return ref[...]",
    )


def _result_text(function: str, path: str, tracer: jax.Array) -> str:
    return message(
        f"{function} needs to return arrays, or pytrees of them",
        got=f"an object with a traced value of type {jax.typeof(tracer).str_short()} in {path}",
        why="JAX does not know its class, so its arrays are no results of the compiled program",
        fix="@jax.tree_util.register_dataclass, flax.struct.dataclass, or a dict of its arrays",
    )
