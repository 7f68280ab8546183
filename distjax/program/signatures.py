"""Signatures: the compiled functions of a program, one `jax.jit` for each kind of arguments.

One `jit` could hold them all, but for this: where a first call raises, as it does to be traced
without the lock, JAX takes no fast path for those arguments ever again. So arguments that are new
meet the function of others, which refuses them, and get one of their own. That holds for arguments
of the same shapes on another mesh, too: the zeros that a loop begins with, and its results.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np

from distjax.program.host_arguments import LeafPath, find_host_leaves, find_narrowed
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
      host_leaves: the paths to host numbers and arrays among the arguments.
      narrowed: those of integers that JAX narrows, which each call checks.
      agreed: checksum of what the processes of a job agreed on before its first call; 0: nothing.
    """

    jitted: Jitted
    host_leaves: tuple[LeafPath, ...]
    variants: dict[Hashable, Jitted]
    narrowed: tuple[LeafPath, ...] = ()
    agreed: int = 0

    def switch(self, operands: PyTree) -> bool:
        """Selects the function compiled for these operands; returns whether it is another one."""
        jitted = self.variants.get(_types_of(operands), self.jitted)
        is_another, self.jitted = jitted is not self.jitted, jitted
        return is_another


class Signatures:
    """The compiled functions of one program, by tree, shapes and dtypes of the arguments.

    Args:
      jit_anew: returns a new jitted function of the program.

    Attributes:
      expected: the signature of the next arguments, which are not looked at: the only one, or that
        of many calls in a row; None: it has to be found. The function of a wrong one refuses them.
    """

    __slots__ = ("_by_key", "_guesses", "_in_a_row", "_jit_anew", "_latest", "expected")

    def __init__(self, jit_anew: Callable[[], Jitted]):
        self._jit_anew = jit_anew
        self._by_key: dict[_Key, Signature] = {}
        # By tree: which leaves tell its signatures apart, and the signature by their kinds.
        self._guesses: dict[Hashable, tuple[Sequence[int], dict[Hashable, Signature]]] = {}
        self.expected: Signature | None = None
        self._latest: Signature | None = None
        self._in_a_row = 0

    def guess(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Signature | None:
        """Returns the signature that these arguments have if it is a known one.

        Looks only at the leaves that tell the known ones apart, such as the batch beside the state.
        """
        leaves, treedef = jax.tree_util.tree_flatten((args, kwargs))
        telling, by_kinds = self._guesses.get(treedef, _NO_GUESS)
        found = by_kinds.get(tuple([_kind_of(leaves[i]) for i in telling]))
        self._in_a_row = self._in_a_row + 1 if found is self._latest else 0
        self._latest = found
        if self._in_a_row >= _STEADY:
            self.expected = found
        return found

    def expect_any(self) -> Signature | None:
        """Looks at the next arguments again; returns the signature that was expected, if any."""
        former, self._in_a_row = self.expected, 0
        self.expected = self._only()
        return former

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
            narrowed = find_narrowed(host_leaves, args, kwargs)
            self._by_key[key] = Signature(jitted, host_leaves, {types: jitted}, narrowed)
            self._guesses[key[0]] = self._tell_apart(key[0])
        else:
            if types not in signature.variants:
                signature.variants[types] = self._jit_anew()
            signature.jitted = signature.variants[types]
        self.expected = self._only()

    def _only(self) -> Signature | None:
        return next(iter(self._by_key.values())) if len(self._by_key) == 1 else None

    def _tell_apart(self, treedef: Hashable) -> tuple[Sequence[int], dict[Hashable, Signature]]:
        """Returns leaves whose kinds differ between any two signatures of a tree, and by kinds."""
        known = {kinds: x for (tree, kinds), x in self._by_key.items() if tree == treedef}
        telling: list[int] = []
        for one, other in itertools.combinations(known, 2):
            if all(one[i] == other[i] for i in telling):
                telling.append(next(i for i, kind in enumerate(one) if kind != other[i]))
        return telling, {tuple([kinds[i] for i in telling]): x for kinds, x in known.items()}


#: After how many calls in a row a signature is expected: a call of another one then costs a
#: millisecond or two more, while looking at 100 leaves costs some 20 microseconds.
_STEADY = 200
#: What is known of a tree that no signature has.
_NO_GUESS: tuple[Sequence[int], dict[Hashable, Signature]] = (), {}
_Key: TypeAlias = tuple[Hashable, tuple[Hashable, ...]]


def _types_of(operands: PyTree) -> Hashable:
    return tuple(map(_type_of, jax.tree.leaves(operands)))


def _type_of(leaf: object) -> Hashable:
    try:
        return jax.typeof(leaf)
    except TypeError:  # not for a program, as the call will say
        return type(leaf)


def _key_of(args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> _Key:
    leaves, treedef = jax.tree_util.tree_flatten((args, kwargs))
    return treedef, tuple(map(_kind_of, leaves))


def _kind_of(leaf: object) -> Hashable:
    aval = getattr(leaf, "aval", None)  # isinstance(leaf, jax.Array) would cost ten times as much
    if aval is not None:
        return aval.shape, aval.dtype, aval.weak_type
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.shape, leaf.dtype
    if isinstance(leaf, jax.ShapeDtypeStruct):  # stands for an array of JAX's
        return leaf.shape, leaf.dtype, leaf.weak_type
    return type(leaf)
