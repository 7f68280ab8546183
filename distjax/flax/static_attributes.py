"""Checks of the static attributes of NNX objects, which are part of a program's key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from distjax import jax_compat
from distjax.errors import TraceLeakError, describe_value, message
from distjax.flax.graph_cache import path_of


class _Attribute(NamedTuple):
    owner: str
    name: str
    value: Any


def require_hashable(objects: Sequence[Any]) -> None:
    """Raises for static attributes or metadata that cannot be part of a program's key.

    Raises:
      TypeError: an unhashable value, such as a list, a dict or a set.
    """
    for attribute in _static_attributes(objects):
        try:
            hash(attribute.value)
        except TypeError as error:
            raise TypeError(
                message(
                    f"{attribute.owner}.{attribute.name} needs a static value that is hashable",
                    got=describe_value(attribute.value),
                    why="a program is compiled for the static attributes of a module, and "
                    "looked up by them",
                    fix=f"self.{attribute.name} = tuple(...), or nnx.List([...]) where it holds "
                    "modules",
                )
            ) from error
    for metadata in _metadata(objects):
        try:
            hash(metadata.value)
        except TypeError as error:
            raise TypeError(
                message(
                    f"{metadata.owner} needs metadata that is hashable",
                    got=f"{metadata.name}={describe_value(metadata.value)}",
                    why="a program is compiled for the metadata of a variable, and looked up by it",
                    fix=f"variable.set_metadata({metadata.name}=tuple(...)), or a tuple where the "
                    "variable is made",
                )
            ) from error


def require_no_traced_values(objects: Sequence[Any]) -> None:
    """Raises for a static attribute that a step has set to a traced array.

    Raises:
      TraceLeakError: a tracer, which has no value outside the trace.
    """
    for attribute in _static_attributes(objects):
        if any(isinstance(x, jax_compat.Tracer) for x in jax.tree.leaves(attribute.value)):
            raise TraceLeakError(
                message(
                    f"{attribute.owner}.{attribute.name} needs to be a variable to hold an array "
                    "that a step computes",
                    got="an array set as a new attribute of the module",
                    why="inside a trace Flax keeps a new attribute as static, and an array of a "
                    "trace has no value when the step has run",
                    fix=f"self.{attribute.name} = nnx.Variable(jnp.zeros(...)) in __init__, and "
                    f"model.{attribute.name}[...] = ... in the step",
                )
            )


def _metadata(objects: Sequence[Any]) -> Iterator[_Attribute]:
    for path, node in nnx.iter_graph(tuple(objects)):
        if isinstance(node, nnx.Variable):
            for name, value in node.get_metadata().items():
                yield _Attribute(path_of(objects, path), name, value)


def _static_attributes(objects: Sequence[Any]) -> Iterator[_Attribute]:
    for _, node in nnx.iter_graph(tuple(objects)):
        if isinstance(node, nnx.Pytree):
            is_data = node._pytree__nodes  # pyright: ignore[reportPrivateUsage]
            for name, value in vars(node).items():
                if not is_data.get(name, False) and not name.startswith("_pytree__"):
                    yield _Attribute(type(node).__name__, name, value)
