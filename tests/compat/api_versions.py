"""The three API versions, each with a strategy of R replicas under its own names, for tests."""

import jax
import pytest

import distjax as dj
from distjax.compat import v1_12, v1_13, v1_15

ADAPTERS = {"v1_12": v1_12.DistributionStrategy, "v1_13": v1_13.Strategy, "v1_15": v1_15.Strategy}


def replicas(kind, count):
    """Returns a strategy of `count` replicas on devices of their own, or on one."""
    if kind == "mirrored":
        return dj.MirroredStrategy(jax.devices()[:count])
    return dj.VirtualStrategy(count)


def numbers(values):
    return [float(v) for v in values]


@pytest.fixture(params=[1, 2, 3, 8])
def count(request):
    return request.param


@pytest.fixture(params=["mirrored", "virtual"])
def plain(request, count):
    """The strategy under distjax's own names."""
    return replicas(request.param, count)
