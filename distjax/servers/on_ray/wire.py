"""The wire form of arrays: numpy arrays, sent between processes without a copy."""

# JAX's own pickle is slower, PRNG keys are not numpy arrays, and numpy pickles dtypes that it
# does not know (bfloat16) through a copy.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from distjax import jax_compat
from distjax.jax_compat import ShapedArray
from distjax.placement.transfer import transfer_each


class Disguised(NamedTuple):
    """An array of a dtype unknown to numpy, as one of a dtype that numpy knows.

    Attributes:
      data: the same bytes as unsigned integers.
      dtype: the name of the dtype; for a key, the name of its implementation.
      is_key: whether it is a PRNG key.
    """

    data: np.ndarray
    dtype: str
    is_key: bool


_SMALL = 1 << 20  # bytes: below this a call's own transfer is faster than placing the array first

#: The wire form of one array.
OnWire = np.ndarray | Disguised


def to_wire(arrays: Iterable[jax.Array | np.ndarray]) -> list[OnWire]:
    """Returns arrays in wire form; waits until they are computed."""
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
    """Returns arrays on a device; on a CPU, in the memory they arrived in if possible."""
    with jax.enable_x64(True):  # else 64-bit values would be truncated, whoever sent them
        sharding = None if device is None else SingleDeviceSharding(device)
        arrays: list[jax.Array] = transfer_each([_as_host(x) for x in sent], sharding)
        return list(map(_as_key, sent, arrays))


def for_programs(sent: Sequence[OnWire], device: jax.Device) -> list[jax.Array]:
    """Returns arrays for a program on a device; small ones stay in numpy, moved by its call."""
    placed = iter(from_wire([x for x in sent if not _stays_on_host(x)], device))
    return [x if _stays_on_host(x) else next(placed) for x in sent]  # type: ignore[misc]


def arrives_as(aval: ShapedArray, sharding: Sharding) -> jax.ShapeDtypeStruct:
    """Returns the struct of an array that `for_programs` will return."""
    is_plain = not jax_compat.is_key_dtype(aval.dtype) and aval.dtype.kind != "V"
    is_on_host = is_plain and _is_small(aval.dtype.itemsize, aval.size)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=None if is_on_host else sharding)


def _stays_on_host(sent: OnWire) -> bool:
    return isinstance(sent, np.ndarray) and _is_small(sent.itemsize, sent.size)


def _is_small(itemsize: int, size: int) -> bool:
    return itemsize < 8 and itemsize * size <= _SMALL


def _as_host(sent: OnWire) -> np.ndarray:
    if not isinstance(sent, Disguised) or sent.is_key:
        return sent.data if isinstance(sent, Disguised) else sent
    return sent.data.view(jax.numpy.dtype(sent.dtype))


def _as_key(sent: OnWire, array: jax.Array) -> jax.Array:
    if not isinstance(sent, Disguised) or not sent.is_key:
        return array
    return jax.random.wrap_key_data(array, impl=sent.dtype)
