"""How the array results of a program become the user's results.

What belongs to one signature and is no array (Python results, the tree of results) leaves a
compiled call in the auxiliary data of its output tree, since a call that hits runs no Python of
ours inside `jit`. A compiled program returns ``(written, {spec: None}, arrays, token)``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from distjax.placement.per_replica import Form, with_form
from distjax.replica.arguments import PartitionedTree


class OutputSpec:
    """What the results of one signature are, apart from their arrays.

    Args:
      partitioned: the user's tree of results.
      forms: per array the form of its PerReplica, or None.
      recreated: the names of variables made before that constructors were handed.

    Attributes:
      unpack: ``unpack(arrays)`` returns the user's results; in C where all are bare arrays.
      recreated: as given.
    """

    __slots__ = ("recreated", "unpack")

    def __init__(
        self,
        partitioned: PartitionedTree,
        forms: tuple[Form | None, ...],
        recreated: tuple[str, ...],
    ):
        self.recreated = recreated
        combine = partitioned.combine
        if partitioned.is_of_arrays:
            combine = partitioned.treedef.unflatten
        has_forms = any(form is not None for form in forms)
        self.unpack: Callable[[Sequence[jax.Array]], Any] = (
            functools.partial(_unpack, combine, forms) if has_forms else combine
        )


def _unpack(
    combine: Callable[[Sequence[Any]], Any],
    forms: tuple[Form | None, ...],
    arrays: Sequence[jax.Array],
) -> Any:
    return combine(
        [
            array if form is None else with_form(array, form)
            for array, form in zip(arrays, forms, strict=True)
        ]
    )


def as_static_output(spec: OutputSpec) -> dict[OutputSpec, None]:
    """Returns the spec as a tree without leaves, for a result of `jit`.

    As a key, and no node of its own class: `jit` makes a dict without running Python, where a
    signal could raise and drop all results.
    """
    return {spec: None}


def spec_of(returned: tuple[Any, ...]) -> OutputSpec:
    """Returns the spec in what a compiled program returned."""
    (spec,) = returned[1]
    return spec
