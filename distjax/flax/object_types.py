"""Which values are NNX objects, asked of their types: `isinstance` runs Python code of Flax."""

from __future__ import annotations

import functools

from flax import nnx

from distjax.jax_compat import Tracer

_OBJECTS = (nnx.Pytree, nnx.Variable)
_VARIABLES = (nnx.Variable,)


def is_object(value: object) -> bool:
    """Returns whether `value` is a module, an optimizer, a metric, Rngs or a variable."""
    return _is_of(value, _OBJECTS)


def is_variable(value: object) -> bool:
    """Returns whether `value` is a variable."""
    return _is_of(value, _VARIABLES)


def _is_of(value: object, types: tuple[type, ...]) -> bool:
    known = _is_of_type(type(value), types)
    return isinstance(value, types) if known is None else known


@functools.lru_cache(maxsize=4096)
def _is_of_type(kind: type, types: tuple[type, ...]) -> bool | None:
    """Returns whether values of type `kind` are of `types`; None: each value says it itself."""
    # A variable made with hijax=True is of another type, and a tracer may stand for one.
    if issubclass(kind, (Tracer, nnx.variablelib.HijaxVariable)):
        return None
    return issubclass(kind, types)
