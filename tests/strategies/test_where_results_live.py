"""Where results live, and how many collectives they cost: apart from their values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import distjax as dj
from distjax.testing.hlo import count_collectives
from tests.replicas import ids

DEVICES = tuple(jax.devices()[2:5])


@pytest.fixture
def three():
    """Three replicas that are not on the first devices."""
    return dj.MirroredStrategy(DEVICES)


def is_mirrored(strategy, x):
    return x.sharding == NamedSharding(strategy.mesh, PartitionSpec()) and x.committed


@pytest.mark.api_row("per-replica value (T)", "mirrored value (M)", "several devices of one host")
def test_inputs_and_results_of_run(three, how):
    x = ids(three)
    assert x.stacked.sharding == NamedSharding(three.mesh, PartitionSpec("replica"))

    def fn(x, m):
        total = dj.get_replica_context().all_reduce("sum", x)
        return {"t": x + m, "m": m * 2, "reduced": total, "constant": jnp.ones(4), "host": m}

    out = how(lambda x, m: three.run(fn, args=(x, m)))(x, np.float32(3))
    t = out.pop("t")
    assert t.stacked.sharding == NamedSharding(three.mesh, PartitionSpec("replica"))
    assert [s.device for s in t.stacked.addressable_shards] == list(DEVICES)
    for name, m in out.items():
        assert is_mirrored(three, m), name


def test_results_of_merge_functions(three, how):
    def merge(strategy, x):
        return x, strategy.reduce("sum", x), jnp.zeros(2)

    fn = lambda x: dj.get_replica_context().merge_call(merge, args=(x,))
    t, reduced, constant = how(lambda x: three.run(fn, args=(x,)))(ids(three))
    assert t.stacked.sharding == NamedSharding(three.mesh, PartitionSpec("replica"))
    assert is_mirrored(three, reduced) and is_mirrored(three, constant)


def test_reductions_are_mirrored(three, how):
    def step(x):
        m = three.reduce("sum", x)
        return {
            "sum": m,
            "mean": three.reduce("mean", x),
            "of mirrored": three.reduce("sum", three.run(lambda: jnp.ones(2))),
            "gather": three.gather(three.run(lambda x: x[None], args=(x,)), 0),
            "to all": three.extended.reduce_to("sum", x, None),
            "to its devices": three.extended.reduce_to("sum", x, x),
            "batch": three.extended.batch_reduce_to("sum", [(x, None)])[0],
            "broadcast": three.extended.broadcast_to(np.ones(2)),
        }

    for name, out in how(step)(ids(three)).items():
        assert is_mirrored(three, out), name


def test_masked_reductions_are_mirrored(three, how):
    x = three.run(lambda x: x[None], args=(ids(three),))
    out = how(lambda x: three.reduce("sum", x, axis=0, mask=np.array([True])))(x)
    assert is_mirrored(three, out)


@pytest.mark.api_row("worker_devices")
def test_local_results_are_on_the_replicas_devices(three):
    for value in (ids(three), three.run(lambda: jnp.ones(2))):
        parts = three.local_results(value)
        assert [p.devices() for p in parts] == [{d} for d in DEVICES]


@pytest.mark.api_row("mirrored variable", "sync-on-read variable (replica-local)")
def test_variables(three, how):
    with three.scope():
        m = dj.Variable(np.ones(2))
        c = dj.Variable(
            0.0,
            synchronization=dj.VariableSynchronization.ON_READ,
            aggregation=dj.VariableAggregation.SUM,
        )

    def check():
        assert is_mirrored(three, m.storage)
        assert c.storage.sharding == NamedSharding(three.mesh, PartitionSpec("replica"))
        for v in (m, c):
            assert [p.devices() for p in v.local_results()] == [{d} for d in DEVICES]
        assert is_mirrored(three, m.value) and is_mirrored(three, c.value)

    check()
    how(lambda: (m.assign(np.zeros(2)), c.assign(3.0)))()
    check()
    how(lambda: three.run(lambda x: c.assign_add(x), args=(ids(three),)))()
    check()
    how(lambda: three.extended.update(c, lambda v: v.assign(1.0)))()
    check()


@pytest.mark.api_row("destinations: a variable, a value, a device")
def test_destinations(three):
    """V(destination) for each kind of destination."""
    x, last = ids(three), jax.devices()[7]
    other = dj.MirroredStrategy(jax.devices()[:2])
    with other.scope():
        v = dj.Variable(1.0)
    on_last = jax.device_put(jnp.ones(3), last)
    cases = [
        (last, SingleDeviceSharding(last)),
        (str(last), SingleDeviceSharding(last)),
        (f"/device:{last.platform.upper()}:{last.id}", SingleDeviceSharding(last)),
        ([last], SingleDeviceSharding(last)),
        (on_last, SingleDeviceSharding(last)),
        (v, NamedSharding(other.mesh, PartitionSpec())),
        (ids(other), NamedSharding(other.mesh, PartitionSpec())),
        (DEVICES, NamedSharding(three.mesh, PartitionSpec())),
        (None, NamedSharding(three.mesh, PartitionSpec())),
    ]
    for destinations, sharding in cases:
        for made in (
            three.extended.reduce_to("sum", x, destinations),
            three.extended.batch_reduce_to("sum", [(x, destinations)])[0],
            three.extended.broadcast_to(np.float32(3), destinations),
        ):
            assert made.sharding == sharding, destinations
            assert float(made) == 3.0
    pair = three.extended.reduce_to("sum", x, jax.devices()[:2])
    assert pair.sharding.is_fully_replicated
    assert pair.sharding.device_set == set(jax.devices()[:2])


def test_a_variable_as_destination_gives_its_locality(three):
    with three.scope():
        v = dj.Variable(1.0)
    g = three.extended.reduce_to("sum", ids(three), v)
    assert dj.locality(g) == dj.locality(v)
    assert dj.locality(three.extended.broadcast_to(3.0, v)) == dj.locality(v)


@pytest.mark.parametrize("make", [lambda d: dj.VirtualStrategy(2, d), dj.OneDeviceStrategy])
def test_one_device_strategies_stay_on_their_device(make, how):
    device = jax.devices()[6]
    strategy = make(device)
    with strategy.scope():
        v = dj.Variable(1.0)
    x = ids(strategy)

    def step(x):
        out = strategy.run(lambda x: (x + v.value, v.value), args=(x,))
        return out, strategy.reduce("sum", out[0])

    out = how(step)(x)
    for leaf in jax.tree.leaves((out, v.storage)):
        assert leaf.sharding.device_set == {device}


def test_one_device_brings_host_values_to_its_device(how):
    device = jax.devices()[6]
    strategy = dj.OneDeviceStrategy(device)
    out = how(lambda x: strategy.run(lambda x: x + 1, args=(x,)))(np.float32(1))
    assert out.sharding.device_set == {device}


# -- what moves ----------------------------------------------------------------


def collectives(step, *args):
    text = dj.jit(step).lower(*args).compile().as_text()
    return {kind: count.num_ops for kind, count in count_collectives(text).items()}


def test_equal_values_move_nothing(three):
    m = three.run(lambda: jnp.arange(4.0))

    def step(m):
        out = three.run(lambda m: m * 2, args=(m,))
        gathered, summed = three.gather(out, 0), three.reduce("sum", out, axis=0)
        return gathered, summed, three.reduce("mean", m), three.extended.broadcast_to(m)

    assert collectives(step, m) == {}


def test_values_that_differ_stay_where_they_are(three):
    assert collectives(lambda x: three.run(lambda x: x * 2 + 1, args=(x,)), ids(three)) == {}


def test_one_all_reduce_per_reduction(three):
    x = ids(three)
    assert collectives(lambda x: three.reduce("sum", x), x) == {"all-reduce": 1}
    assert collectives(lambda x: three.reduce("mean", x, axis=()), x) == {"all-reduce": 1}
    y = three.run(lambda x: x + 1, args=(x,))

    def both(x, y):
        return three.extended.batch_reduce_to("sum", [(x, None), (y, None)])

    assert collectives(both, x, y) == {"all-reduce": 1}  # XLA packs the two into one


def test_one_all_gather_per_gather(three):
    x = three.run(lambda x: jnp.full((2, 2), x), args=(ids(three),))
    assert collectives(lambda x: three.gather(x, 0), x) == {"all-gather": 1}


def test_a_four_step_update_moves_the_gradient_once(three):
    with three.scope():
        w = dj.Variable(np.ones(5, np.float32))

    def merge(strategy, g):
        g = strategy.extended.reduce_to("sum", g, w)
        strategy.extended.update(w, lambda v, g: v.assign_sub(g), (g,))

    def fn(x):
        g = jax.grad(lambda w: (w * x).sum())(w.value)
        dj.get_replica_context().merge_call(merge, args=(g,))

    text = dj.jit(lambda x: three.run(fn, args=(x,))).lower(ids(three)).compile().as_text()
    assert dict(count_collectives(text)) == {"all-reduce": (1, 20)}


@pytest.mark.parametrize(
    "make", [dj.OneDeviceStrategy, lambda device: dj.VirtualStrategy(4, device)]
)
def test_one_device_is_the_one_that_was_chosen(make):
    """Also where no argument is on it, so that nothing but the strategy says so."""
    device = jax.devices()[3]
    strategy = make(device)
    result = strategy.run(lambda x: x + jnp.ones(3), args=(3.0,))
    assert result.devices() == {device}
    total = strategy.reduce("sum", result)
    assert float(total[0]) == 4.0 * strategy.num_replicas_in_sync
    assert total.devices() == {device}
