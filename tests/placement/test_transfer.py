"""Batches on their way to the devices: as `jax.device_put` would place them."""

import jax
import ml_dtypes
import numpy as np
import pytest

import distjax as dj
from distjax._src.placement.transfer import transfer_each

DTYPES = [np.float64, np.int64, np.int8, np.bool_, np.complex64, np.float16, ml_dtypes.bfloat16]
KINDS = {
    "arrays": lambda x: x,
    "not contiguous": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "a subclass": lambda x: x.view(np.memmap),
    "on a device": jax.numpy.asarray,
}


@pytest.mark.pairwise
@pytest.mark.parametrize("guard", [None, "disallow"])
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["mirrored", "split_along"])
def test_as_device_put(place, kind, x64, guard):
    topology = dj.MirroredStrategy(jax.devices()[:4]).extended.topology
    sharding = topology.mirrored if place == "mirrored" else topology.split_along(0)
    host = [np.arange(24).reshape(8, 3).astype(dtype) for dtype in DTYPES] + [np.zeros((4, 0, 2))]
    with jax.enable_x64(x64):
        values = list(map(KINDS[kind], host))
        wanted = jax.device_put(values, sharding)
        with jax.transfer_guard_host_to_device(guard):
            found = transfer_each(values, sharding)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.dtype, ours.sharding) == (theirs.dtype, theirs.sharding)
        assert (ours.committed, ours.weak_type) == (theirs.committed, theirs.weak_type)
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_a_guard_of_explicit_transfers_is_heard():
    options = dj.InputOptions(prefetch=0)
    iterator = iter(dj.VirtualStrategy(2).distribute_dataset([np.ones(4)] * 2, options))
    with jax.transfer_guard("disallow_explicit"), pytest.raises(Exception, match="Disallowed"):
        next(iterator)
