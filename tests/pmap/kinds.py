"""The replicas that every case of pmap runs on, and the comparison with `jax.pmap`."""

import jax
import numpy as np
import pytest

import distjax as dj

#: (R, kind): as many local devices as rows, an own mirrored strategy, replicas on one device.
KINDS = [(1, "local"), (2, "mirrored"), (8, "local"), *((r, "virtual") for r in (1, 2, 8))]


class Replicas:
    """R replicas of one kind; `pmap` is `dj.pmap` on them."""

    def __init__(self, count, kind):
        self.count, self.kind = count, kind
        self._strategies = {}

    @property
    def strategy(self):
        """The strategy whose axis has the default name."""
        return self.strategy_of("replica")

    def strategy_of(self, name):
        """Returns the strategy whose replica axis is called `name`; None for local devices."""
        devices = jax.devices()[: self.count]
        if name not in self._strategies:
            self._strategies[name] = {
                "local": lambda: None,
                "mirrored": lambda: dj.MirroredStrategy(devices, axis_name=name),
                "virtual": lambda: dj.VirtualStrategy(self.count, axis_name=name),
            }[self.kind]()
        return self._strategies[name]

    def pmap(self, fn, axis_name=None, **options):
        """Returns ``fn`` mapped by distjax."""
        strategy = self.strategy_of(axis_name or "replica")
        return dj.pmap(fn, axis_name, strategy=strategy, **options)

    def rows(self, *shape, dtype=np.float32, seed=0):
        """Returns random rows [R, *shape], of few digits so that sums are exact."""
        random = np.random.default_rng(seed)
        return random.integers(-8, 8, size=(self.count, *shape)).astype(dtype)

    def assert_as_jax(self, fn, *args, axis_name="i", **options):
        """Asserts that both pmaps give equal trees of equal shapes and dtypes; returns ours."""
        ours = self.pmap(fn, axis_name, **options)(*args)
        theirs = jax.pmap(fn, axis_name, devices=jax.devices()[: self.count], **options)(*args)
        assert_equal(ours, theirs)
        return ours


def assert_equal(ours, theirs, rtol=1e-6):
    """Asserts that two trees of arrays are equal, to rounding."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=rtol, atol=rtol)


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[1]}{kind[0]}")
def replicas(request):
    """Replicas of each kind and number."""
    return Replicas(*request.param)
