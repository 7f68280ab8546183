"""Arrays on a device, with no call of JAX's where they are there."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from distjax.placement.transfer import transfer


def place(arrays: Iterable[jax.Array | np.ndarray], device: jax.Device) -> list[jax.Array]:
    """Returns arrays that a program on `device` can take.

    Numpy arrays are left to the program, which brings them where its other arguments are.
    """
    return [
        x
        if isinstance(x, np.ndarray) or x.device == device
        else transfer(x, SingleDeviceSharding(device))
        for x in arrays
    ]  # type: ignore[return-value]
