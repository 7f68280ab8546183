"""A replica of several devices, and steps written for pmap."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import distjax as dj
from distjax.testing.hlo import count_collectives
from tests.replicas import ids, local, per_replica

RATE = 0.1


@pytest.fixture
def four_by_two():
    return dj.MirroredStrategy(model_axes={"model": 2})


@pytest.fixture
def params():
    rng = np.random.default_rng(0)
    return {
        "up": rng.normal(size=(4, 8)).astype(np.float32),
        "down": rng.normal(size=(8, 4)).astype(np.float32),
    }


BATCH = np.random.default_rng(1).normal(size=(4, 3, 4)).astype(np.float32)


def sharded(x, *axes):
    return lax.with_sharding_constraint(x, PartitionSpec(*axes))


def unsharded(x, *axes):
    return x


def loss(params, x, shard):
    up = shard(params["up"], None, "model")
    down = shard(params["down"], "model", None)
    hidden = shard(jax.nn.relu(x @ up), None, "model")
    return jnp.mean((hidden @ down) ** 2)


def step(params, x, shard=sharded):
    value, grads = jax.value_and_grad(loss)(params, x, shard)
    value, grads = dj.get_replica_context().all_reduce("mean", (value, grads))
    return value, jax.tree.map(lambda p, g: p - RATE * g, params, grads)


def expected(params, steps):
    """The same steps on the whole batch, on one device, without a strategy."""
    for _ in range(steps):
        value, grads = jax.value_and_grad(loss)(params, BATCH.reshape(12, 4), unsharded)
        params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
    return value, params


def assert_close(got, want):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6)


@pytest.mark.api_row("model parallelism (in the future)")
def test_tensor_parallel_layer_equals_the_unsharded_one(four_by_two, params, how):
    x = per_replica(four_by_two, list(BATCH))
    train = how(lambda params, x: four_by_two.run(step, args=(params, x)))
    state = params
    for _ in range(2):  # the second takes what the first gave, sharded over the model axis
        value, state = train(state, x)
    assert_close((value, state), expected(params, 2))


def test_tensor_parallel_variables(four_by_two, params, how):
    with four_by_two.scope():
        variables = {name: dj.Variable(p, name=name) for name, p in params.items()}

    def fn(x):
        values = {name: v.value for name, v in variables.items()}
        value, grads = jax.value_and_grad(loss)(values, x, sharded)

        def merge(strategy, grads):
            for name, g in grads.items():
                g = strategy.extended.reduce_to("mean", g, variables[name])
                strategy.extended.update(variables[name], lambda v, g: v.assign_sub(RATE * g), (g,))

        dj.get_replica_context().merge_call(merge, args=(grads,))
        return value

    train = how(lambda x: four_by_two.reduce("mean", four_by_two.run(fn, args=(x,))))
    for _ in range(2):
        value = train(per_replica(four_by_two, list(BATCH)))
    got = {name: v.value for name, v in variables.items()}
    assert_close((value, got), expected(params, 2))


def test_merges_in_a_loop_next_to_sharded_values(four_by_two, how):
    """The mesh of the replica function, its model axis, is not that of the merge function."""

    def fn(x):
        def body(c, _):
            c = sharded(c * 2, "model")
            mean = dj.get_replica_context().merge_call(lambda s, c: s.reduce("mean", c), args=(c,))
            return sharded(mean, "model") + x, None

        return lax.scan(body, x, length=2)[0]

    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    out = how(lambda x: four_by_two.run(fn, args=(x,)))(per_replica(four_by_two, list(x)))
    want = x
    for _ in range(2):
        want = (want * 2).mean(0) + x
    np.testing.assert_allclose(local(four_by_two, out), want)


@pytest.mark.api_row("model parallelism (in the future)")
def test_one_all_reduce_per_gradient(four_by_two, params):
    compiled = dj.jit(lambda params, x: four_by_two.run(step, args=(params, x)))
    lowered = compiled.lower(params, per_replica(four_by_two, list(BATCH)))
    assert lowered.as_text().count("stablehlo.all_reduce") == 3  # the loss and two gradients
    counts = count_collectives(lowered.compile().as_text())
    # One packed all-reduce over the replicas, of the loss and of each device's half of the
    # gradients [4, 4]; one over the model axis, of the activations [3, 4]: nothing else moves.
    assert counts == {"all-reduce": (2, 4 + 2 * 64 + 48)}


def test_results_keep_their_model_sharding(four_by_two, params):
    compiled = dj.jit(lambda params, x: four_by_two.run(step, args=(params, x)))
    _, state = compiled(params, per_replica(four_by_two, list(BATCH)))
    assert state["up"].sharding.spec == PartitionSpec(None, "model")
    assert state["down"].sharding.spec == PartitionSpec("model")
    assert {s.data.shape for s in state["up"].addressable_shards} == {(4, 4)}


def test_cross_replica_operations(four_by_two, how):
    def run():
        out = four_by_two.run(
            lambda: jnp.full(2, dj.get_replica_context().replica_id_in_sync_group, jnp.float32)
        )
        return out, four_by_two.reduce("sum", out), four_by_two.gather(out, 0)

    out, total, gathered = how(run)()
    assert local(four_by_two, out) == [[float(r)] * 2 for r in range(4)]
    np.testing.assert_array_equal(total, [6, 6])
    np.testing.assert_array_equal(gathered, [0, 0, 1, 1, 2, 2, 3, 3])
    assert float(four_by_two.reduce("sum", four_by_two.run(lambda: jnp.ones(())))) == 4.0


def test_sync_on_read_variables(four_by_two, how):
    with four_by_two.scope():
        c = dj.Variable(
            0.0,
            synchronization=dj.VariableSynchronization.ON_READ,
            aggregation=dj.VariableAggregation.SUM,
        )
    how(
        lambda: four_by_two.run(
            lambda: c.assign_add(jnp.float32(dj.get_replica_context().replica_id_in_sync_group))
        )
    )()
    assert float(c.value) == 6.0
    assert local(four_by_two, c) == [0.0, 1.0, 2.0, 3.0]
    how(lambda: dj.lax.cond(c.value > 5, lambda: c.assign(8.0), lambda: c.value))()
    assert local(four_by_two, c) == [2.0] * 4


TOTALS = {
    "reduce": lambda s, x: s.reduce("sum", x),
    "reduce_to": lambda s, x: s.extended.reduce_to("sum", x, None),
    "gather": lambda s, x: s.gather(s.run(jnp.atleast_1d, args=(x,)), 0).sum(),
    "all_reduce": lambda s, x: s.run(
        lambda x: dj.get_replica_context().all_reduce("sum", x), args=(x,)
    ),
}
AROUND = {
    "grad": lambda total: jax.grad(total)(1.0),
    "jvp": lambda total: jax.jvp(total, (1.0,), (1.0,))[1],
    "vmap": lambda total: jax.vmap(total)(jnp.ones(2))[1],
    "loop": lambda total: dj.lax.fori_loop(0, 2, lambda i, c: c + total(0.5), 0.0),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", TOTALS)
def test_what_is_around_a_call_compiles_nothing(four_by_two, around, name):
    """Before 0.12, JAX maps over some axes of a mesh in compiled code only."""
    x = ids(four_by_two)

    def total(w):
        return TOTALS[name](four_by_two, four_by_two.run(lambda w, x: w * x, args=(w, x)))

    assert float(AROUND[around](total)) == 0 + 1 + 2 + 3


@pytest.mark.parametrize("name", TOTALS)
def test_without_jit(four_by_two, name):
    with jax.disable_jit():
        x = four_by_two.run(lambda x: x + 1, args=(ids(four_by_two),))
        assert float(TOTALS[name](four_by_two, x)) == 1 + 2 + 3 + 4


def test_axis_name_of_the_model_is_no_axis_for_collectives(four_by_two):
    with pytest.raises(Exception, match="model"):
        four_by_two.run(lambda: lax.psum(1.0, "model"))


# -- written for pmap ----------------------------------------------------------


def pmap_era_step(params, batch):
    """Unchanged code: it names its axis and knows nothing of distjax."""

    def loss(p):
        return jnp.mean((batch @ p["up"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    grads = lax.pmean(grads, "batch")
    correct = lax.psum((batch > 0).sum(), axis_name="batch")
    offset = lax.axis_index("batch") * 1.0
    everyone = lax.all_gather(batch[0, 0], "batch")
    new = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
    return new, lax.pmean(value, "batch"), correct, offset + batch.sum(), everyone


@pytest.mark.parametrize("kind", ["mirrored", "virtual", "scanned"])
def test_a_pmap_era_step_runs_unchanged(params, how, kind):
    devices = jax.devices()[:4]
    batches = np.stack(list(BATCH))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        replicated = jax.tree.map(lambda p: np.stack([p] * 4), params)
        pmapped = jax.pmap(pmap_era_step, axis_name="batch", devices=devices)
        want = pmapped(replicated, batches)
    strategy = (
        dj.VirtualStrategy(4, axis_name="batch")
        if kind == "virtual"
        else dj.MirroredStrategy(devices, axis_name="batch")
    )
    fn = pmap_era_step
    if kind == "scanned":
        fn = lambda p, x: jax.tree.map(
            lambda y: y[0], lax.scan(lambda c, _: (c, pmap_era_step(p, x)), 0, length=1)[1]
        )
    got = how(lambda p, x: strategy.run(fn, args=(p, x)))(params, per_replica(strategy, batches))
    new, value, correct, own, everyone = got
    assert isinstance(own, dj.PerReplica)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves((new, value, correct, everyone)))
    for g, w in zip(
        jax.tree.leaves((new, value, correct, everyone)),
        jax.tree.leaves((want[0], want[1], want[2], want[4])),
        strict=True,
    ):
        np.testing.assert_allclose(g, w[0], rtol=1e-6)
    np.testing.assert_allclose(local(strategy, own), want[3], rtol=1e-6)


IN_A_TRACE = {
    "run": lambda s: s.run(lambda: jnp.ones(4)),
    "a key": lambda s: s.run(lambda: jax.random.key(0)),
    "broadcast": lambda s: s.broadcast(jnp.ones(4)),
}


@pytest.mark.parametrize("name", IN_A_TRACE)
def test_what_a_single_replica_makes_of_nothing_is_on_its_devices(name):
    """It is not mapped over devices, so nothing else says so."""
    strategy = dj.MirroredStrategy(jax.devices()[4:], model_axes={"model": 4})
    out = jax.jit(lambda: IN_A_TRACE[name](strategy))()
    assert out.devices() == set(jax.devices()[4:])


def test_collectives_of_a_single_replica():
    strategy = dj.MirroredStrategy(jax.devices()[:4], model_axes={"model": 4})

    def step(x):
        x = lax.with_sharding_constraint(x, PartitionSpec("model"))
        moved = lax.ppermute(x, "replica", [(0, 0)]), lax.ppermute(x, "replica", [])
        parts = lax.psum_scatter(x, "replica", tiled=True), lax.all_to_all(x[None], "replica", 0, 0)
        return lax.psum(x, "replica"), lax.all_gather(x, "replica"), moved, parts

    x = np.arange(4.0, dtype=np.float32)
    total, rows, (same, none), (part, exchanged) = strategy.run(step, args=(x,))
    for found in (total, rows[0], same, part, exchanged[0]):
        np.testing.assert_array_equal(found, x)
    assert not none.any() and total.sharding.spec == PartitionSpec("model")
