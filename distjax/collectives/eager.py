"""Eager operations, compiled once per function and static values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from distjax import jax_compat, user_mesh
from distjax.collectives.throttle import make_token, throttle
from distjax.typing import PyTree


@functools.lru_cache(maxsize=1024)
def _compile(fn: Callable[..., Any], static: tuple[Any, ...]) -> Callable[..., Any]:
    def program(arrays: PyTree) -> tuple[Any, Any]:
        return fn(arrays, *static), make_token()

    return jax.jit(program)


@user_mesh.ignores_user_mesh
def call_compiled(fn: Callable[..., Any], arrays: PyTree, *static: object) -> Any:
    """Returns ``fn(arrays, *static)``, compiled once per function and static values.

    In a trace the call becomes part of it.

    Args:
      fn: a module-level function of a tree of arrays and hashable values.
      arrays: the tree of arrays.
      *static: hashable values.
    """
    if jax_compat.tracing():
        return fn(arrays, *static)
    out, token = _compile(fn, static)(arrays)
    throttle(token)
    return out
