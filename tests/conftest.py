"""Eight CPU devices for every test, and the one table of strategies that laws run over."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # read when JAX is imported; children inherit it

import jax

jax.config.update("jax_num_cpu_devices", 8)  # before a backend starts

import pytest
from seed_table import pytest_addoption, pytest_configure  # noqa: F401  (hooks)

import distjax as dj

REPLICA_COUNTS = (1, 2, 3, 8)

#: Every way to run a step: a name for the test id, and what makes the strategy.
STRATEGIES = {
    "default": lambda: dj.get_strategy(),
    "one_device": lambda: dj.OneDeviceStrategy(),
    **{f"mirrored{n}": lambda n=n: dj.MirroredStrategy(jax.devices()[:n]) for n in REPLICA_COUNTS},
    **{f"virtual{n}": lambda n=n: dj.VirtualStrategy(n) for n in REPLICA_COUNTS},
}


@pytest.fixture(params=list(STRATEGIES))
def strategy(request):
    """Each strategy of the table, made anew."""
    return STRATEGIES[request.param]()


@pytest.fixture(params=["mirrored2", "virtual2"])
def pair(request):
    """Two replicas, on two devices and on one."""
    return STRATEGIES[request.param]()


@pytest.fixture
def mirrored():
    """Two replicas on two devices."""
    return STRATEGIES["mirrored2"]()


@pytest.fixture(params=["eager", "jit"])
def how(request):
    """What a cross-replica function is passed through: nothing, or `dj.jit`."""
    return dj.jit if request.param == "jit" else (lambda fn: fn)


@pytest.fixture
def checkpointer(tmp_path):
    """A Checkpointer of a directory that does not exist yet."""
    with dj.checkpoint.Checkpointer(tmp_path / "checkpoints") as checkpointer:
        yield checkpointer


@pytest.fixture(autouse=True)
def clean_context():
    """After each test, whatever it raised, the default context is in force."""
    yield
    clean = not dj.has_strategy() and not dj.in_cross_replica_context()
    dj.set_strategy(None)  # so that one test that fails does not fail the next
    assert clean, "the test left a strategy in force"
