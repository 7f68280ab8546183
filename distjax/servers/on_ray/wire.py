"""Arrays as they travel between processes: numpy arrays, which need no copy to be sent."""

# JAX's own pickle is slower, keys are no numpy arrays, and numpy pickles what it does not know
# (bfloat16) through a copy.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from distjax import jax_compat
from distjax.placement.transfer import transfer_each


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


_SMALL = 1 << 20  # bytes that a call copies faster than they are put on a device before it

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


def from_wire(sent: Sequence[OnWire], device: jax.Device | None = None) -> list[jax.Array]:
    """Returns arrays on a device; on a CPU in the memory in which they came, where that is so."""
    with jax.enable_x64(True):  # or 64 bits would be cut, whoever may have sent them
        sharding = None if device is None else SingleDeviceSharding(device)
        arrays: list[jax.Array] = transfer_each([_as_host(x) for x in sent], sharding)
        return list(map(_as_key, sent, arrays))


def for_programs(sent: Sequence[OnWire], device: jax.Device) -> list[jax.Array]:
    """Returns arrays that a program on a device can take: small ones are left to its call."""
    if all(isinstance(x, np.ndarray) and x.itemsize < 8 and x.nbytes <= _SMALL for x in sent):
        return list(sent)  # type: ignore[arg-type]
    return from_wire(sent, device)


def _as_host(sent: OnWire) -> np.ndarray:
    if not isinstance(sent, Disguised) or sent.is_key:
        return sent.data if isinstance(sent, Disguised) else sent
    return sent.data.view(jax.numpy.dtype(sent.dtype))


def _as_key(sent: OnWire, array: jax.Array) -> jax.Array:
    if not isinstance(sent, Disguised) or not sent.is_key:
        return array
    return jax.random.wrap_key_data(array, impl=sent.dtype)
