"""Arrays as they travel between processes: numpy arrays, which need no copy to be sent."""

# JAX's own pickle is slower, keys are no numpy arrays, and numpy pickles what it does not know
# (bfloat16) through a copy.

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import jax
import numpy as np

from distjax import jax_compat


class Disguised(NamedTuple):
    """An array of a dtype that numpy does not know, as one of a dtype that it does.

    Attributes:
      data: the same bytes as unsigned numbers.
      dtype: the name of the dtype; of a key: of its implementation.
      is_key: whether it is one.
    """

    data: np.ndarray
    dtype: str
    is_key: bool


#: What is sent of one array.
OnWire = np.ndarray | Disguised


def to_wire(arrays: Iterable[jax.Array | np.ndarray]) -> list[OnWire]:
    """Returns what is to be sent; waits until it is computed."""
    return [_to_wire(x) for x in arrays]


def _to_wire(array: jax.Array | np.ndarray) -> OnWire:
    if isinstance(array, jax.Array) and jax_compat.is_key_dtype(array.dtype):
        data = np.asarray(jax.random.key_data(array))
        return Disguised(data, jax_compat.key_impl(array.dtype), True)
    host = np.asarray(array)
    if host.dtype.kind != "V":
        return host
    return Disguised(host.view(f"u{host.itemsize}"), host.dtype.name, False)


def from_wire(sent: Iterable[OnWire], device: jax.Device | None = None) -> list[jax.Array]:
    """Returns arrays on a device; on a CPU in the memory in which they came, where that is so."""
    with jax.enable_x64(True):  # or 64 bits would be cut, whoever may have sent them
        return [_from_wire(x, device) for x in sent]


def _from_wire(sent: OnWire, device: jax.Device | None) -> jax.Array:
    if not isinstance(sent, Disguised):
        return jax.device_put(sent, device)
    if sent.is_key:
        data = jax.device_put(sent.data, device)
        return jax.random.wrap_key_data(data, impl=sent.dtype)
    return jax.device_put(sent.data.view(jax.numpy.dtype(sent.dtype)), device)
