"""How the array results of a program become the user's results.

What is not an array in a signature's results (Python objects, the result tree) leaves a compiled
call in the auxiliary data of its output tree, since a cache hit runs none of our Python code
inside `jit`. A compiled program returns ``(written, {spec: None}, outputs, token)``, where
`outputs` are the array results or, if JAX can build these in C, directly the user's results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from distjax import jax_compat
from distjax.placement.per_replica import AuxData, with_aux
from distjax.replica.arguments import PartitionedTree
from distjax.trees import nodes_of
from distjax.typing import PyTree

#: Trees that JAX builds in C.
_BUILT_IN = (tuple, list, dict, type(None))


class OutputSpec:
    """The results of one signature, apart from their arrays.

    Args:
      partitioned: the user's tree of results.
      per_replica: for each array, the aux data of its PerReplica, or None.
      recreated: the names of existing variables that constructors returned again.

    Attributes:
      unpack: ``unpack(arrays)`` returns the user's results; in C if all are bare arrays. None:
        the program returns the user's results.
      recreated: as given.
      completion: the index of the array that is ready when the program has completed; None: its
        token is.
    """

    __slots__ = ("_is_built_in", "completion", "recreated", "unpack")

    def __init__(
        self,
        partitioned: PartitionedTree,
        per_replica: tuple[AuxData | None, ...],
        recreated: tuple[str, ...],
    ):
        self.recreated = recreated
        self.completion: int | None = None
        combine = partitioned.combine
        if partitioned.is_of_arrays:
            combine = partitioned.treedef.unflatten
        has_per_replica = any(aux is not None for aux in per_replica)
        self.unpack: Callable[[Sequence[jax.Array]], Any] | None = (
            functools.partial(_unpack, combine, per_replica) if has_per_replica else combine
        )
        self._is_built_in = (
            partitioned.is_of_arrays and not has_per_replica and _is_built_in(partitioned.treedef)
        )

    def pack(self, arrays: Sequence[Any]) -> Any:
        """Returns the outputs of a program whose results are these arrays."""
        if not self._is_built_in or self.unpack is None:
            return arrays
        outputs, self.unpack = self.unpack(arrays), None
        return outputs

    def results(self, outputs: PyTree) -> Any:
        """Returns the user's results."""
        return outputs if self.unpack is None else self.unpack(outputs)


def _is_built_in(treedef: jax.tree_util.PyTreeDef) -> bool:
    """Returns whether a tree is built without running Python, where a signal could drop it."""
    return all(kind in _BUILT_IN for kind, _ in nodes_of(treedef))


def _unpack(
    combine: Callable[[Sequence[Any]], Any],
    per_replica: tuple[AuxData | None, ...],
    arrays: Sequence[jax.Array],
) -> Any:
    return combine(
        [
            array if aux is None else with_aux(array, aux)
            for array, aux in zip(arrays, per_replica, strict=True)
        ]
    )


def as_static_output(spec: OutputSpec) -> dict[OutputSpec, None]:
    """Returns the spec as a tree without leaves, for a result of `jit`.

    A key, not a node of its own class: `jit` builds a dict without running Python, where a
    signal could raise and drop all results.
    """
    return {spec: None}


def spec_of(returned: tuple[Any, ...]) -> OutputSpec:
    """Returns the spec in the result of a compiled program."""
    (spec,) = returned[1]
    return spec


# -- which result shows that a program has completed ---------------------------

#: Elements of a result that may be held for the next launch.
_SMALL = 256


def show_end(
    spec: OutputSpec,
    results: Sequence[Any],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    donate_argnums: Sequence[int],
) -> jax.Array | None:
    """Sets in `spec` which result shows that the program has completed; if none, returns a token.

    The token is one more result, which shows it. It costs ten microseconds on eight devices.
    """
    donated = [arg for i, arg in enumerate(args) if i in donate_argnums]
    spec.completion = _find_completion(results, (args, kwargs), donated)
    return jnp.zeros((), jnp.int8) if spec.completion is None else None


def completion_of(returned: tuple[Any, ...]) -> Any:
    """Returns what is ready when the program that returned this is done; None: nothing tells."""
    completion = spec_of(returned).completion
    return returned[3] if completion is None else jax.tree.leaves(returned[2])[completion]


def _find_completion(results: Sequence[Any], inputs: PyTree, donated: PyTree) -> int | None:
    """Returns the number of a result that shows that the program has completed, as a loss does.

    It is held for a while (see `Ledger`, `throttle`), so it has to be small; JAX hands on an input
    at once; and what takes the place of a donated input is gone with the next call.
    """
    kinds = {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(donated)}
    given = {id(leaf) for leaf in jax.tree.leaves(inputs)}
    for number, x in enumerate(results):
        if not isinstance(x, jax.Array):  # a constant of the program
            continue
        is_kept = x.size <= _SMALL and (x.shape, x.dtype) not in kinds
        if is_kept and id(x) not in given and not jax_compat.is_key_dtype(x.dtype):
            return number
    return None
