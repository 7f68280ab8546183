"""Batch: examples, and a mask that says which of them count."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """An element under ``InputOptions(partial="pad")``; a pytree.

    Padding consists of copies of real examples, so that their losses and gradients
    are never NaN; weighted by the mask, results equal the unpadded ones.

    Attributes:
      data: the user's structure, leaves [B, ...] per replica.
      mask: bool [B] per replica: True for the examples that count. A single bool []
        if elements of `distribute_datasets_from_function` have no common leading
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

    #: Lets the trace check that a step using a batch reads its mask.
    masks_examples: ClassVar[bool] = True

    data: Any
    mask: Any
