"""Batch: examples, and which of them count."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """What ``InputOptions(partial="pad")`` makes of every element. A pytree.

    Examples that fill a batch up are copies of real ones, so that no loss or
    gradient of theirs is NaN; weighted by the mask, results equal the unpadded ones.

    Attributes:
      data: the user's structure, leaves [B, ...] per replica.
      mask: bool [B] per replica: True for the examples that count. One bool [] where
        the elements of `distribute_datasets_from_function` have no common leading
        dimension.

    Example:
      >>> strategy = dj.VirtualStrategy(2)
      >>> batches = [np.arange(4.0), np.arange(3.0)]
      >>> dataset = strategy.distribute_dataset(batches, dj.InputOptions(partial="pad"))
      >>> for batch in dataset:
      ...     squares = strategy.run(lambda x: x * x, args=(batch.data,))
      ...     print(strategy.reduce("sum", squares, axis=0, mask=batch.mask))
      14.0
      5.0
    """

    #: Tells steps that are traced with a batch to read its mask.
    masks_examples: ClassVar[bool] = True

    data: Any
    mask: Any
