"""RemoteArray: an array that stays in the process of the worker that drew it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from distjax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an array is: in which element of which stream.

    Attributes:
      stream: the number of the stream.
      index: the number of the element in the stream.
      leaf: the number of the array among the leaves of the element.
      dtype: the dtype in which the array is wanted.
    """

    stream: int
    index: int
    leaf: int
    dtype: np.dtype


@dataclasses.dataclass(frozen=True, eq=False)
class RemoteArray:
    """An array of an element that a worker has drawn, as the coordinator knows it.

    The step is cut for a stand-in of its shape and dtype. The worker that runs the closure has the
    element itself, or makes it again.

    Attributes:
      place: where it is.
      shape: its shape.
      fetch: returns the array itself.
    """

    place: Place
    shape: tuple[int, ...]
    fetch: Callable[[Place], np.ndarray]

    @property
    def dtype(self) -> np.dtype:
        """The dtype in which it is wanted."""
        return self.place.dtype

    def __repr__(self) -> str:
        return f"RemoteArray(shape={self.shape}, dtype={self.dtype})"

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.fetch(self.place), dtype)

    def astype(self, dtype: np.dtype) -> RemoteArray:
        """Returns the same array, wanted in another dtype."""
        return dataclasses.replace(self, place=dataclasses.replace(self.place, dtype=dtype))

    def stand_in(self) -> np.ndarray:
        """Returns zeros of its shape and canonical dtype, which take the memory of one number."""
        dtype = jax.dtypes.canonicalize_dtype(self.dtype)
        return np.broadcast_to(np.zeros((), dtype), self.shape)


#: A flat argument of a closure.
Argument = jax.Array | np.ndarray | RemoteArray
