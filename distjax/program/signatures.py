"""Signatures: the compiled functions of a program, one `jax.jit` for each kind of arguments.

One `jit` could hold them all, but for this: where a first call raises, as it does to be traced
without the lock, JAX takes no fast path for those arguments ever again. So arguments that are new
meet the function of others, which refuses them, and get one of their own. That holds for arguments
of the same shapes on another mesh, too: the zeros that a loop begins with, and its results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

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
    """One kind of arguments, by shapes and dtypes.

    Attributes:
      jitted: the compiled function for arguments that lie where the latest did.
      variants: the compiled functions by JAX's types of all operands, which name their meshes.
      host_leaves: where it has numbers and arrays of the host.
      agreed: checksum of what the processes of a job agreed on before its first call; 0: nothing.
    """

    jitted: Jitted
    host_leaves: tuple[LeafPath, ...]
    variants: dict[Hashable, Jitted]
    agreed: int = 0

    def switch(self, operands: PyTree) -> bool:
        """Calls the function for these operands from now on; returns whether it is another one."""
        jitted = self.variants.get(_types_of(operands), self.jitted)
        is_another, self.jitted = jitted is not self.jitted, jitted
        return is_another


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

    def add(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], variables: Sequence[Any]
    ) -> None:
        """Makes a function for these arguments and arrays of variables, if there is none."""
        key, types = _key_of(args, kwargs), _types_of((args, kwargs, variables))
        signature = self._by_key.get(key)
        if signature is None:
            jitted = self._jit_anew()
            host_leaves = find_host_leaves(args, kwargs)
            self._by_key[key] = Signature(jitted, host_leaves, {types: jitted})
        else:
            if types not in signature.variants:
                signature.variants[types] = self._jit_anew()
            signature.jitted = signature.variants[types]
        self.only = next(iter(self._by_key.values())) if len(self._by_key) == 1 else None


def _types_of(operands: PyTree) -> Hashable:
    return tuple(map(_type_of, jax.tree.leaves(operands)))


def _type_of(leaf: object) -> Hashable:
    try:
        return jax.typeof(leaf)
    except TypeError:  # not for a program, as the call will say
        return type(leaf)


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
