import pytest

import distjax as dj
from tests.check.problem import R


@pytest.fixture
def strategy():
    return dj.VirtualStrategy(R)
