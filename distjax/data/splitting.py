"""Splitter: the contract for turning source elements into elements for R replicas."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from distjax.data.batch import Batch
from distjax.data.elements import HostTree, read_element
from distjax.data.source import find_length
from distjax.errors import BatchError
from distjax.typing import PyTree


class Position(NamedTuple):
    """How far a source has been read.

    Attributes:
      consumed: the number of its elements used.
      full_size: the leading dimension of the first one; None: unknown.
      example: the last example read, leaves [1, ...], for padding; None: none yet.
      is_resumed: whether the source was set to a saved state of its own, and nothing has
        been delivered since.
      checksum: of the last element used; None: none was used, or it is not known.
    """

    consumed: int = 0
    full_size: int | None = None
    example: HostTree | None = None
    is_resumed: bool = False
    checksum: int | None = None


class Splitter(abc.ABC):
    """Turns elements of a source into one element for all replicas."""

    @abc.abstractmethod
    def pull(self, source: Iterator[Any], position: Position) -> tuple[HostTree, Position]:
        """Returns the next element, leaves [R, B, ...], and the position after it.

        Its arrays may be the source's memory: copy them before the next pull.

        Raises:
          StopIteration: the source has ended.
          BatchError: the element cannot be split.
        """

    @abc.abstractmethod
    def require_splittable(self, dataset: Sequence[PyTree]) -> None:
        """Raises a BatchError if a sized dataset's items show that it cannot be split."""

    @abc.abstractmethod
    def count(self, dataset: Sequence[PyTree]) -> int:
        """Returns the number of elements for a dataset with a length.

        Raises:
          TypeError: the number cannot be told without iterating the dataset.
        """


def as_batch(tree: HostTree, mask: np.ndarray) -> HostTree:
    """Returns the leaves of ``Batch(tree, mask)``."""
    data = jax.tree.unflatten(tree.treedef, tree.leaves)
    leaves, treedef = jax.tree.flatten(Batch(data, mask))
    return HostTree(treedef, leaves)


def find_sizes(dataset: Sequence[PyTree]) -> list[int] | None:
    """Returns the leading dimensions that `dataset` shows before it is iterated.

    All of them for a list or tuple; those of the first and last element if it has a
    length and items; None if a size cannot be determined (the loop then reports
    why).
    """
    length = find_length(dataset)
    if not length or not hasattr(dataset, "__getitem__"):
        return None
    is_list = isinstance(dataset, (list, tuple))
    indices = range(length) if is_list else sorted({0, length - 1})
    sizes = []
    for i in indices:
        try:
            element = dataset[i]
        except Exception:  # a source's own error should be raised in the loop
            return None
        sizes.append(_leading_size(element))
    return None if None in sizes else sizes


def _leading_size(element: PyTree) -> int | None:
    leaves = jax.tree.leaves(element)
    if leaves and all(hasattr(leaf, "shape") for leaf in leaves):
        sizes = {tuple(leaf.shape)[:1] for leaf in leaves}
        return int(sizes.pop()[0]) if len(sizes) == 1 and () not in sizes else None
    with contextlib.suppress(BatchError):
        return read_element(element, "an element").leading_size
    return None
