"""Signatures: the compiled functions of a program, one `jax.jit` for each kind of arguments.

One `jit` could hold them all, but for this: where a first call raises, as it does to be traced
without the lock, JAX takes no fast path for those arguments ever again. So arguments that are new
meet the function of others, which refuses them, and get one of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Protocol

import jax
import numpy as np

from distjax.program.host_arguments import LeafPath, find_host_leaves
from distjax.typing import PyTree


class Jitted(Protocol):
    """``(written, read, kwargs, *args) -> (written anew, output spec, outputs, token)``, jitted."""

    def __call__(self, *operands: PyTree) -> tuple[PyTree, ...]:
        """Runs the program, compiled if it is not yet."""
        ...

    def lower(self, *operands: PyTree) -> jax.stages.Lowered:
        """Returns the program lowered for these operands."""
        ...


@dataclasses.dataclass(slots=True, eq=False)
class Signature:
    """One kind of arguments.

    Attributes:
      jitted: the compiled function.
      host_leaves: where it has numbers and arrays of the host.
      agreed: checksum of what the processes of a job agreed on before its first call; 0: nothing.
    """

    jitted: Jitted
    host_leaves: tuple[LeafPath, ...]
    agreed: int = 0


class Signatures:
    """The compiled functions of one program, by tree, shapes and dtypes of the arguments.

    Args:
      jit_anew: returns a new jitted function of the program.

    Attributes:
      only: the one signature; None where there are others, or none yet.
    """

    __slots__ = ("_by_key", "_jit_anew", "only")

    def __init__(self, jit_anew: Callable[[], Jitted]):
        self._jit_anew = jit_anew
        self._by_key: dict[Hashable, Signature] = {}
        self.only: Signature | None = None

    def find(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Signature | None:
        """Returns the signature of these arguments, None if they are new."""
        return self._by_key.get(_key_of(args, kwargs))

    def add(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> None:
        """Makes a function for these arguments, if there is none."""
        key = _key_of(args, kwargs)
        if key not in self._by_key:
            self._by_key[key] = Signature(self._jit_anew(), find_host_leaves(args, kwargs))
        self.only = next(iter(self._by_key.values())) if len(self._by_key) == 1 else None


def _key_of(args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Hashable:
    leaves, treedef = jax.tree_util.tree_flatten((args, kwargs))
    return (treedef, *map(_kind_of, leaves))


def _kind_of(leaf: object) -> Hashable:
    aval = getattr(leaf, "aval", None)  # isinstance(leaf, jax.Array) would cost ten times as much
    if aval is not None:
        return aval.shape, aval.dtype, aval.weak_type
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.shape, leaf.dtype
    if isinstance(leaf, jax.ShapeDtypeStruct):  # stands for an array of JAX's
        return leaf.shape, leaf.dtype, leaf.weak_type
    return type(leaf)
