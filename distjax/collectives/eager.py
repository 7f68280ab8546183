"""Eager operations, compiled once per function and static arguments."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax

from distjax import jax_compat, user_mesh
from distjax.cluster.agreement import agree
from distjax.cluster.facts import ComparedFact, describe_structure
from distjax.cluster.job import job
from distjax.cluster.ledger import Launch, ledger
from distjax.collectives.throttle import is_throttled, make_token, throttle
from distjax.typing import PyTree


@functools.lru_cache(maxsize=1024)
def _compile(fn: Callable[..., Any], static: tuple[Any, ...]) -> Callable[..., Any]:
    def program(arrays: PyTree) -> tuple[Any, Any]:
        return fn(arrays, *static), make_token() if job() is not None or is_throttled() else None

    return jax.jit(program)


def _spans_processes(arrays: PyTree) -> bool:
    leaves = jax.tree.leaves(arrays)
    return not all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves)


def _agree(name: str, fn: Callable[..., Any], arrays: PyTree, static: tuple[object, ...]) -> int:
    """Has the processes compare an operation that spans them, the first time each kind is run.

    This catches, say, a read or reduction under ``if jax.process_index() == 0``, which would
    otherwise pair up with a different collective of the other processes. Returns a checksum of
    what they compared.
    """
    leaves, treedef = jax.tree.flatten(arrays)
    shapes = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
    shown = ", ".join(map(str, static))  # topologies, modes, axes: none prints a memory address
    what = f"{fn.__name__}({shown}) of {shapes} in {describe_structure(treedef)}"
    facts = [ComparedFact(name, what)]
    agree(name, facts, known_by=[ComparedFact("an operation over the replicas", what)])
    return zlib.crc32(what.encode())


@user_mesh.ignores_user_mesh
def call_compiled(
    fn: Callable[..., Any], arrays: PyTree, *static: object, name: str | None = None
) -> Any:
    """Returns ``fn(arrays, *static)``, compiled once per function and static args.

    Inside a trace, the call is inlined into it.

    Args:
      fn: a module-level function of a pytree of arrays and hashable values.
      arrays: the pytree of arrays.
      *static: hashable values.
      name: the operation in the user's words, for errors and the ledger, equal on all processes;
        default: that of ``fn``.
    """
    if jax_compat.tracing():
        return fn(arrays, *static)
    compiled = _compile(fn, static)
    if job() is not None and _spans_processes(arrays):
        name = name or fn.__name__
        launch = ledger.begin_launch(Launch(name, _agree(name, fn, arrays, static)))
        try:
            out, token = compiled(arrays)
        except BaseException:
            ledger.abandon_launch(launch)
            raise
        ledger.end_launch(launch, token)
    else:
        out, token = compiled(arrays)
    throttle(token)
    return out
