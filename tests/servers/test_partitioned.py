"""Partitioned variables: shards at servers, one variable to everybody else."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distjax as dj
from distjax._src.servers.storage import ServerPlacement
from tests.servers.serial import SerialStrategy
from tests.servers.test_cut import assert_same
from tests.servers.test_refusals import assert_refused

ROWS, WIDTH = 200_000, 32


def make(servers=2, shards=2, **options):
    return SerialStrategy(servers, partitioner=dj.parts.FixedShards(shards), **options)


def train(strategy, tx, rows=10, **options):
    with strategy.scope():
        w = dj.Variable(jnp.linspace(-1, 1, 3 * rows).reshape(rows, 3), name="w")
        b = dj.Variable(jnp.ones(()), name="b")
        optimizer = dj.optim.Optimizer(tx, **options)
        optimizer.init([w, b])

    def step(x):
        loss_fn = lambda w, b: jnp.mean((x @ w + b) ** 2)
        loss, gradients = jax.value_and_grad(loss_fn, argnums=(0, 1))(w.value, b.value)
        optimizer.apply_gradients(zip(gradients, (w, b), strict=True))
        return loss, w.value[:2]

    outs = [strategy.run(step, args=(jnp.ones((2, rows)) * k,)) for k in (1.0, 0.5, 2.0)]
    return outs, w.value, b.value


OPTIMIZERS = {
    "sgd": (optax.sgd(0.1, momentum=0.9), {}),
    "adamw": (optax.adamw(0.1), {}),
    "clipped": (optax.chain(optax.clip_by_global_norm(0.05), optax.adam(0.1)), {}),
    "if finite": (optax.apply_if_finite(optax.adam(0.1), 3), {}),
    "accumulated": (optax.adam(0.1), {"accumulate_steps": 2}),
}


@pytest.mark.parametrize(
    "name, cut", [*((name, "least_bytes") for name in OPTIMIZERS), ("accumulated", "arguments")]
)
def test_training_is_that_of_one_device(name, cut):
    tx, options = OPTIMIZERS[name]
    found = train(make(3, 4, cut=cut), tx, **options)
    assert_same(found, train(dj.OneDeviceStrategy(), tx, **options), rtol=2e-6)


@pytest.mark.api_row("partitioned variable (in the future)")
@pytest.mark.parametrize("cut", ["arguments", "least_bytes"])
def test_each_server_takes_its_own_rows(cut):
    strategy = make(3, 4, cut=cut)
    found = train(strategy, optax.sgd(0.1, momentum=0.5))
    expected = train(dj.OneDeviceStrategy(), optax.sgd(0.1, momentum=0.5))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert strategy.engine.pushed == 3 * 4 * (30 + 1)
    assert strategy.engine.answered == 3 * 4 * 30


def test_more_rows_come_first_and_servers_in_turn():
    strategy = make(3, 4, cut="least_bytes")
    with strategy.scope():
        v = dj.Variable(jnp.zeros((10, 2)), name="v")
        optimizer = dj.optim.Optimizer(optax.adam(0.1))
        optimizer.init([v])
        scalar = dj.Variable(1.0, name="scalar")
        with strategy.extended.colocate_vars_with(v):
            beside = dj.Variable(jnp.zeros((10, 5)), name="beside")
            other = dj.Variable(jnp.zeros(7), name="other")
        with strategy.extended.colocate_vars_with(scalar):
            whole = dj.Variable(jnp.zeros((10, 5)), name="whole")
    assert [(s.server, s.num_rows) for s in v.layout.shards] == [(0, 3), (1, 3), (2, 2), (0, 2)]
    assert str(v.layout) == "in shards at servers 0, 1, 2, 0"
    mu, nu = (x for x in strategy.extended.variables if x.name.startswith("v/"))
    assert beside.layout == mu.layout == nu.layout == v.layout
    assert not other.layout.shards and other.layout.server == 0
    assert not scalar.layout.shards and not whole.layout.shards
    assert whole.layout.server == scalar.layout.server
    read = lambda: v.value
    lives = {x.name: x.lives for x in strategy.describe_cut(read, (), None)[0].variables}
    assert lives == {f"v/part_{i}": f"at server {k}" for i, k in enumerate((0, 1, 2, 0))}


@pytest.mark.parametrize(
    "partitioner, shape, rows",
    [
        (dj.parts.FixedShards(4), (10, 2), [3, 3, 2, 2]),
        (dj.parts.FixedShards(4), (2,), [1, 1]),
        (dj.parts.FixedShards(4), (), []),
        (dj.parts.FixedShards(4), (0, 3), []),
        (dj.parts.MinSize(16, max_shards=8), (10,), [4, 3, 3]),
        (dj.parts.MaxSize(16), (10,), [4, 3, 3]),
        (lambda shape, dtype: [100, 1], (3, 2), [1, 1, 1]),
        (lambda shape, dtype: [0], (3,), []),
    ],
)
def test_how_rows_are_split(partitioner, shape, rows):
    layout = ServerPlacement(2, jax.devices()[0], partitioner).layout(shape, jnp.float32)
    assert [shard.num_rows for shard in layout.shards] == rows


def test_one_variable_to_the_user(tmp_path):
    strategy = dj.ParameterServerStrategy(2, 3, partitioner=dj.parts.FixedShards(4))
    with strategy.scope():
        v = dj.Variable(lambda: jnp.arange(20.0).reshape(10, 2), name="v")
        key = dj.Variable(lambda: jax.random.split(jax.random.key(0), 4), name="key")
    assert not key.layout.shards
    v.assign_add(jnp.ones((10, 2)))
    expected = np.arange(20.0).reshape(10, 2) + 1
    np.testing.assert_array_equal(v.value, expected)
    checkpointer = dj.checkpoint.Checkpointer(tmp_path)
    checkpointer.save(1, {"v": v})
    v.assign(jnp.zeros((10, 2)))
    with dj.MirroredStrategy().scope():
        mirrored = dj.Variable(jnp.zeros((10, 2)), name="v")
    checkpointer.restore({"v": mirrored})
    np.testing.assert_array_equal(mirrored.value, expected)
    mirrored.assign(mirrored.value * 2)
    checkpointer.save(2, {"v": mirrored})
    checkpointer.restore({"v": v})
    np.testing.assert_array_equal(v.value, 2 * expected)

    def step(x):
        v.assign_add(x)
        return v.value.sum()

    with dj.Coordinator(strategy) as coordinator:
        sizes = [server["bytes"] for server in coordinator.stats()["servers"]]
        assert sum(sizes) == 4 * 20 + 8 * 4 and min(sizes) >= 4 * 4
        snapshot = coordinator.snapshot()
        schedule = lambda: coordinator.schedule(step, args=(jnp.ones((10, 2)),))
        assert schedule().get() == (2 * expected + 1).sum()  # alone: all shards of one version
        for _ in range(19):
            schedule()
        coordinator.join()
        np.testing.assert_array_equal(v.value, 2 * expected + 20)
        coordinator.restore(snapshot)
        np.testing.assert_array_equal(v.value, 2 * expected)


def test_rows_of_a_table_are_looked_up_and_added_where_they_are():
    def run(strategy, ids_of):
        with strategy.scope():
            init = lambda: jnp.arange(ROWS, dtype=jnp.float32)[:, None] + jnp.zeros(WIDTH)
            table = dj.Variable(init, name="table")

        def step(ids):
            context = dj.get_replica_context()
            rows = context.merge_call(lambda s, ids: table.value[ids], args=(ids,))
            update = lambda s, ids, g: table.assign(table.value.at[ids].add(g))
            context.merge_call(update, args=(ids, 2 * rows))
            return rows

        seen = [np.asarray(strategy.run(step, args=(ids,))) for ids in ids_of]
        return seen, np.asarray(table.value[np.unique(np.concatenate(ids_of))])

    rng = np.random.default_rng(0)
    ids_of = [rng.integers(-ROWS, ROWS, 128).astype(np.int32) for _ in range(3)]
    strategy = make(2, 2, cut="least_bytes")
    found = run(strategy, ids_of)
    jax.tree.map(np.testing.assert_array_equal, found, run(dj.OneDeviceStrategy(), ids_of))
    row_bytes, id_bytes = 4 * 128 * WIDTH, 4 * 128
    engine = strategy.engine
    assert engine.pulled == 0
    assert engine.answered == 3 * 2 * row_bytes  # each server answers for all ids
    assert engine.pushed <= 3 * 2 * (row_bytes + 3 * id_bytes)


def test_rows_that_are_added_make_no_dense_update():
    strategy = make(2, 2, cut="least_bytes")
    with strategy.scope():
        table = dj.Variable(lambda: jnp.ones((ROWS, WIDTH)), name="table")

    def step(ids, rows):
        def update(s, ids, rows):
            table.assign_sub(0.5 * jnp.zeros_like(table.value).at[ids].add(rows))

        dj.get_replica_context().merge_call(update, args=(ids, rows))

    strategy.run(step, args=(jnp.array([3, ROWS - 1]), jnp.ones((2, WIDTH))))
    np.testing.assert_array_equal(table.value[np.array([0, 3, -1]), 0], [1, 0.5, 0.5])
    assert strategy.engine.pushed == 2 * (2 * 4 + 2 * WIDTH * 4)


def test_answers_of_several_servers_are_joined_by_the_worker():
    def run(strategy):
        with strategy.scope():
            v = dj.Variable(jnp.arange(10.0), name="v")
            w = dj.Variable(jnp.arange(3.0), name="w")

        def halve(carry):
            return carry[0] + 1, carry[1] / 2

        def step(x):
            def merge(s, x):
                v.assign_add(x * v.value)
                w.assign_add(jnp.ones(3))
                halved = jax.lax.while_loop(lambda c: c[0] < 2, halve, (0, v.value))[1]
                return {
                    "norm": jnp.sqrt(v.value @ v.value),
                    "mixed": w.value * v.value[2] + x,
                    "made with others": (jnp.argsort(-v.value), halved),
                }

            found = dj.get_replica_context().merge_call(merge, args=(x * 2,))
            v.assign_sub(found["norm"] * jnp.ones(10))
            return found, v.value

        return [strategy.run(step, args=(jnp.float32(x),)) for x in (1, 2)], v.value, w.value

    for cut in ("arguments", "least_bytes"):
        found = run(make(3, 3, cut=cut))
        assert_same(found, run(dj.OneDeviceStrategy()), rtol=1e-6)


# -- what is refused ----------------------------------------------------------


@pytest.mark.parametrize(
    "tx, cut",
    [
        (optax.lamb(0.1), "arguments"),
        (optax.lamb(0.1), "least_bytes"),
        (optax.adafactor(0.1, min_dim_size_to_factor=2), "least_bytes"),
        (optax.chain(optax.sgd(0.1), optax.scale_by_trust_ratio()), "least_bytes"),
    ],
    ids=["lamb-arguments", "lamb", "adafactor", "trust ratio"],
)
def test_a_norm_over_shards_is_refused(tx, cut):
    strategy = make(2, 2, cut=cut)
    text = "needs merges whose variables live at one server.\n  Got: variable 'w/part_"
    assert_refused(dj.errors.MergeError, text, train, strategy, tx)
    assert strategy.engine.closures == 0


def test_a_norm_over_shards_at_one_server_is_that_of_the_whole():
    whole = train(dj.OneDeviceStrategy(), optax.lamb(0.1))
    assert_same(train(make(1, 3), optax.lamb(0.1)), whole, rtol=2e-6)


def test_the_way_out_of_a_norm_is_a_whole_variable():
    strategy = SerialStrategy(2, partitioner=lambda shape, dtype: [1] * len(shape))
    whole = train(dj.OneDeviceStrategy(), optax.lamb(0.1))
    assert_same(train(strategy, optax.lamb(0.1)), whole, rtol=2e-6)


def test_partitioners_that_are_none():
    make = dj.ParameterServerStrategy
    text = "ParameterServerStrategy: partitioner needs a function of shape and dtype, or None."
    assert_refused(TypeError, text, make, 1, 2, partitioner=2)
    strategy = make(1, 2, partitioner=lambda shape, dtype: [1, 2])
    with strategy.scope():
        text = "partitioner needs to split the first axis only.\n  Got: [1, 2] shards"
        assert_refused(ValueError, text, dj.Variable, jnp.ones((2, 2)))
        text = "partitioner needs to return a number of shards for each axis"
        assert_refused(ValueError, text, dj.Variable, jnp.ones(2))


def test_a_snapshot_as_argument_is_cut_like_any_other():
    """DC-ASGD on shards: the worker's rows of the snapshot go with its gradients."""

    def run(strategy):
        with strategy.scope():
            w = dj.Variable(jnp.linspace(0, 1, 10), name="w")

        def step(x):
            def merge(s, g, then):
                w.assign_sub(0.1 * (g + g * g * (w.value - then)))

            dj.get_replica_context().merge_call(merge, args=(w.value * x, w.value))

        strategy.run(step, args=(jnp.float32(2.0),))
        return w.value

    strategy = make(2, 2, cut="arguments")
    np.testing.assert_array_equal(run(strategy), run(dj.OneDeviceStrategy()))
    assert strategy.engine.pushed == 2 * 4 * 10
