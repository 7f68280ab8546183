"""R replicas of two kinds, for the examples of the seeds."""

import pytest
from ages import replicas


@pytest.fixture(params=[1, 2, 3, 8])
def count(request):
    return request.param


@pytest.fixture(params=["mirrored", "virtual"])
def plain(request, count):
    """The strategy under distjax's own names."""
    return replicas(request.param, count)
