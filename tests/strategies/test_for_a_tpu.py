"""CentralStorageStrategy's step, compiled for a TPU slice that is not there."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

import distjax as dj
from distjax.errors import UnsupportedError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: pip install 'distjax[plan]' (Linux only)",
)


@pytest.fixture(scope="module")
def devices():
    """Four chips of a v5e on one host, described by libtpu."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")  # else libtpu asks the network where it is
        patch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-4")
        patch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
        patch.setenv("TPU_WORKER_ID", "0")
        return topologies.get_topology_desc("v5e:2x2", platform="tpu").devices


def make_step(strategy):
    """Returns the four steps of an update, the variable that they train, and a batch of shapes."""
    with strategy.scope():
        w = dj.Variable(np.ones((256, 128), np.float32), name="w")

    def merge(strategy, gradient):
        mean = strategy.extended.reduce_to("mean", gradient, w)
        strategy.extended.update(w, lambda w, g: w.assign_sub(0.1 * g), args=(mean,))

    def replica_step(x):
        gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w.value)
        dj.get_replica_context().merge_call(merge, args=(gradient,))

    topology = strategy.extended.topology
    stacked = jax.ShapeDtypeStruct((4, 8, 256), np.float32, sharding=topology.per_replica)
    step = dj.jit(lambda x: strategy.run(replica_step, args=(x,)))
    return step, w, dj.PerReplica(stacked, topology)


def test_variables_stay_in_host_memory_and_are_donated(devices):
    step, w, batch = make_step(dj.CentralStorageStrategy(devices))
    compiled = step.lower(batch).compile()
    memory, share = compiled.memory_analysis(), w.size * 4 // len(devices)
    assert memory.host_argument_size_in_bytes == share  # one copy on the host, split over it
    assert memory.host_output_size_in_bytes == memory.host_alias_size_in_bytes == share
    # The batch, in the tiles of the device; no variable is among the device's arguments.
    assert memory.argument_size_in_bytes == batch.stacked.size * 4 // len(devices)
    layouts = compiled.as_text().partition("entry_computation_layout={(")[2]
    inputs, _, outputs = layouts.partition(")->")
    stored = f"f32[{w.size // len(devices)}]{{0:T(1024)S(5)}}"  # memory space 5 is the host's
    assert inputs.startswith(stored) and outputs.lstrip("(").startswith(stored)
    kinds = [s.memory_kind for s in jax.tree.leaves(compiled.output_shardings)]
    assert kinds[0] == "pinned_host"


def test_on_devices_that_are_there_they_stay_so_too():
    """The same program for CPU devices: what runs is what was compiled for the slice."""
    step, w, _ = make_step(dj.CentralStorageStrategy(jax.devices()[:4]))
    ones = w.strategy.distribute_values_from_function(lambda ctx: np.ones((8, 256), np.float32))
    step(ones)
    # d/dw mean((x w)^2) = 2 * 256 / 128 for x = w = 1
    np.testing.assert_allclose(w.value, np.full((256, 128), 1 - 0.1 * 4), rtol=1e-5)
    assert w.storage.sharding.memory_kind == "pinned_host"


def test_nothing_has_a_value_there(devices):
    strategy = dj.MirroredStrategy(devices)
    with strategy.scope():
        v = dj.Variable(lambda: jnp.ones(4), name="v", aggregation=dj.VariableAggregation.SUM)
    uses = (
        lambda: v.value,
        lambda: v.assign(jnp.zeros(4)),
        v.local_results,
        lambda: strategy.run(lambda: v.assign_add(jnp.ones(4))),
    )
    for use in uses:
        with pytest.raises(UnsupportedError, match="^variable 'v' needs real devices"):
            use()
