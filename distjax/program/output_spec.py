"""How the array results of a program become the user's results.

What belongs to one signature and is no array (Python results, the tree of results) leaves a
compiled call in the auxiliary data of its output tree, since a call that hits runs no Python of
ours inside `jit`. A compiled program returns ``(written, {spec: None}, *arrays, token)``.
"""

from __future__ import annotations

from typing import Any

from distjax.placement.per_replica import Form, with_form
from distjax.replica.arguments import PartitionedTree


class OutputSpec:
    """What the results of one signature are, apart from their arrays.

    Attributes:
      partitioned: the user's tree of results.
      wrappers: per array the form of its PerReplica, or None.
      recreated: the names of variables made before that constructors were handed.
      treedef: the tree of results of which every leaf is an array or PerReplica, else None.
      is_plain: whether all results are bare arrays.
    """

    __slots__ = ("is_plain", "partitioned", "recreated", "treedef", "wrappers")

    def __init__(
        self,
        partitioned: PartitionedTree,
        wrappers: tuple[Form | None, ...],
        recreated: tuple[str, ...],
    ):
        self.partitioned, self.wrappers = partitioned, wrappers
        self.recreated = recreated
        self.treedef = partitioned.treedef if partitioned.is_of_arrays else None
        self.is_plain = self.treedef is not None and all(wrap is None for wrap in wrappers)

    def unpack(self, returned: tuple[Any, ...]) -> Any:
        """Returns the user's results, of what the compiled program returned."""
        arrays = [
            array if form is None else with_form(array, form)
            for array, form in zip(returned[2:-1], self.wrappers, strict=True)
        ]
        if self.treedef is not None:
            return self.treedef.unflatten(arrays)
        return self.partitioned.combine(arrays)


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
