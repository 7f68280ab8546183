"""ShardedStrategy and CentralStorageStrategy: where state lives, and that it trains the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.parts import FixedShards, MaxSize, MinSize

RNG = np.random.default_rng(0)
W0, B0 = RNG.normal(size=(16, 8)).astype(np.float32), np.zeros((3,), np.float32)
X = RNG.normal(size=(8, 5, 16)).astype(np.float32)


def make_strategy(kind, count):
    devices = jax.devices()[:count]
    if kind == "mirrored":
        return dj.MirroredStrategy(devices)
    if kind == "central":
        return dj.CentralStorageStrategy(devices)
    return dj.ShardedStrategy(devices, partition=kind, min_split_bytes=0)


KINDS = ["optimizer", "gradients", "parameters", "central"]


def momentum_training(strategy, steps=3):
    """Trains w, b with momentum by the four steps of an update; returns state and losses."""
    extended = strategy.extended
    with strategy.scope():
        w, b = dj.Variable(W0, name="w"), dj.Variable(B0, name="b")
        slots = []
        for v in (w, b):
            with extended.colocate_vars_with(v):
                slots.append(dj.Variable(jnp.zeros(v.shape), name=f"{v.name}/momentum"))

    def loss(params, x):
        return jnp.mean((x @ params[0]) ** 2) + jnp.sum((params[1] - 1) ** 2)

    def apply(strategy, grads):
        pairs = list(zip(grads, (w, b), strict=True))
        for v, m, g in zip((w, b), slots, extended.batch_reduce_to("mean", pairs), strict=True):
            extended.update(m, lambda m, g: m.assign(0.9 * m.value + g), args=(g,))
            extended.update(v, lambda v, m: v.assign_sub(0.1 * m), args=(m.value,))

    def step(x):
        value, grads = jax.value_and_grad(loss)([w.value, b.value], x)
        ctx = dj.get_replica_context()
        ctx.merge_call(apply, args=(grads,))
        return ctx.all_reduce("mean", value)

    count = strategy.num_replicas_in_sync
    per_replica = X.reshape(count, -1, 16)
    batch = strategy.distribute_values_from_function(
        lambda ctx: per_replica[ctx.replica_id_in_sync_group]
    )
    train = dj.jit(lambda x: strategy.run(step, args=(x,)))
    losses = [float(train(batch)) for _ in range(steps)]
    return (w, b, *slots), losses, train.lower(batch)


@pytest.mark.api_row("partitioned variable (in the future)", "parameter server, synchronous")
@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_training_equals_mirrored(kind, count):
    state, losses, _ = momentum_training(make_strategy(kind, count))
    expected, expected_losses, _ = momentum_training(make_strategy("mirrored", count))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for got, want in zip(state, expected, strict=True):
        np.testing.assert_allclose(got.value, want.value, rtol=1e-5, atol=1e-6)


@pytest.mark.api_row("partitioned variable (in the future)", "parameter server, synchronous")
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("optimizer", ["mirrored", "mirrored", "partitioned", "partitioned"]),
        ("gradients", ["mirrored", "mirrored", "partitioned", "partitioned"]),
        ("parameters", ["partitioned"] * 4),
        ("central", ["host"] * 4),
    ],
)
def test_where_variables_live(kind, expected):
    """b [3] is padded to 8, and whatever the layout, no more than 8 elements are added."""
    state, _, _ = momentum_training(make_strategy(kind, 8), steps=1)
    assert [dj.locality(v).kind for v in state] == expected
    for v in state:
        held = sum(s.data.nbytes for s in v.storage.addressable_shards)
        copies = {"mirrored": 8, "partitioned": 1, "host": 1}[dj.locality(v).kind]
        padding = 0 if v.size % 8 == 0 else 8 * 4
        assert v.size * 4 * copies <= held <= v.size * 4 * copies + padding
    if kind == "central":
        assert {v.storage.sharding.memory_kind for v in state} == {"pinned_host"}


AGGREGATED = {
    "SUM": lambda base, xs: base + sum(xs),
    "MEAN": lambda base, xs: base + sum(xs) / len(xs),
    "ONLY_FIRST_REPLICA": lambda base, xs: base + xs[0],
}


@pytest.mark.parametrize("aggregation", AGGREGATED)
@pytest.mark.parametrize("kind", ["parameters", "central"])
def test_writes_in_a_replica_function(kind, aggregation):
    strategy = make_strategy(kind, 2)
    with strategy.scope():
        v = dj.Variable(W0, aggregation=dj.VariableAggregation[aggregation])
    deltas = [np.float32(1.0), np.float32(4.0)]
    delta = strategy.distribute_values_from_function(
        lambda ctx: np.full(W0.shape, deltas[ctx.replica_id_in_sync_group])
    )

    def fn(delta):
        seen = v.assign_add(delta)
        return seen, v.value

    seen, after = strategy.run(fn, args=(delta,))
    expected = AGGREGATED[aggregation](W0, deltas)
    for value in (seen, after, v.value):
        np.testing.assert_allclose(value, expected, rtol=1e-6)
    v.assign(np.zeros_like(W0))
    np.testing.assert_array_equal(v.value, np.zeros_like(W0))
    assert [c.shape for c in v.local_results()] == [W0.shape]


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_is_reduced_to_the_devices_of_a_variable(kind):
    strategy = make_strategy(kind, 2)
    with strategy.scope():
        v = dj.Variable(W0)
    losses = strategy.distribute_values_from_function(
        lambda ctx: np.float32(ctx.replica_id_in_sync_group)
    )
    reduce = lambda x: strategy.extended.reduce_to("sum", x, v)
    assert float(reduce(losses)) == float(dj.jit(reduce)(losses)) == 1.0


@pytest.mark.parametrize("kind", ["parameters", "central"])
def test_update_without_group_has_one_element(kind):
    strategy = make_strategy(kind, 2)
    with strategy.scope():
        v = dj.Variable(W0)
    results = strategy.extended.update(v, lambda v: v.assign_add(np.ones_like(W0)), group=False)
    assert isinstance(results, list) and len(results) == 1
    np.testing.assert_allclose(results[0], W0 + 1, rtol=1e-6)


@pytest.mark.parametrize(("kind", "count"), [("parameters", 2), ("central", 1)])
def test_update_non_slot_without_group_has_an_element_per_copy_of_a_counter(kind, count):
    """A counter in host memory is there once; one that nothing can split, on each replica."""
    strategy = make_strategy(kind, 2)
    extended = strategy.extended
    devices = extended.non_slot_devices([])
    with strategy.scope(), extended.colocate_vars_with(devices):
        counter = dj.Variable(0)
    results = extended.update_non_slot(devices, lambda: counter.assign_add(1), group=False)
    assert [int(x) for x in results] == [1] * count == [1] * len(counter.local_results())


@pytest.mark.parametrize("kind", ["parameters", "central"])
def test_values_and_initial_values_stay_valid(kind):
    strategy = make_strategy(kind, 2)
    initial = jnp.asarray(W0)
    with strategy.scope():
        v = dj.Variable(initial, aggregation=dj.VariableAggregation.MEAN)
        made = dj.Variable(lambda: jnp.ones((4, 2)))
    held = v.value
    for _ in range(2):
        strategy.run(lambda: v.assign(jnp.zeros(W0.shape)))
    np.testing.assert_array_equal(held, W0)
    np.testing.assert_array_equal(initial, W0)
    np.testing.assert_array_equal(made.value, np.ones((4, 2)))


def test_r335_fixed_shards_over_two_replicas():
    """[6, 1] is stored as 3 + 3 rows; [5, 2], 3 + 2 in TensorFlow, as 3 + 2 and a row of zeros."""
    strategy = dj.ShardedStrategy(
        jax.devices()[:2], partition="parameters", partitioner=FixedShards(2)
    )
    with strategy.scope():
        even, odd = dj.Variable(jnp.zeros((6, 1))), dj.Variable(jnp.zeros((5, 2)))
    for v in (even, odd):
        assert dj.locality(v).kind == "partitioned"
        assert [s.data.shape[0] for s in v.storage.addressable_shards] == [3, 3]
    assert odd.shape == odd.value.shape == (5, 2)


def test_r339_assign_sums_over_the_replicas():
    strategy = make_strategy("parameters", 2)
    with strategy.scope():
        v = dj.Variable(jnp.zeros(8), aggregation=dj.VariableAggregation.SUM)
    x = np.arange(8, dtype=np.float32)
    halves = strategy.distribute_values_from_function(
        lambda ctx: x * (ctx.replica_id_in_sync_group + 1)
    )
    strategy.run(lambda x: v.assign(x), args=(halves,))
    assert dj.locality(v).kind == "partitioned"
    np.testing.assert_array_equal(v.value, 3 * x)


@pytest.mark.parametrize(
    ("method", "sign", "base"), [("assign", 1, 0), ("assign_add", 1, 1), ("assign_sub", -1, 1)]
)
def test_r343_whole_arrays_are_written_by_rows(method, sign, base):
    """Each replica keeps its rows; the value is all of them, end to end."""
    strategy = make_strategy("parameters", 4)
    start = np.float32([[0, 0], [1, 1], [2, 2], [3, 3]])
    x = np.float32([[5, 6], [7, 8], [9, 10], [11, 12]])
    with strategy.scope():
        v = dj.Variable(start)
    getattr(v, method)(x)
    expected = base * start + sign * x
    np.testing.assert_array_equal(v.value, expected)
    for row, shard in enumerate(v.storage.addressable_shards):
        np.testing.assert_array_equal(shard.data, expected[row : row + 1])


def test_r337_a_small_variable_is_not_split():
    strategy = dj.ShardedStrategy(partition="parameters", partitioner=MinSize(64 << 20, 8))
    with strategy.scope():
        v = dj.Variable(jnp.zeros((16, 8)))
    assert dj.locality(v).kind == "mirrored"


def test_r345_partitioners_follow_tensorflow():
    """[10, 3] and [6, 1] float32."""
    assert FixedShards(2)((10, 3), np.float32) == [2, 1]
    assert MinSize(4, max_shards=2)((6, 1), np.float32) == [2, 1]
    assert MinSize(4, max_shards=10)((6, 1), np.float32) == [6, 1]
    assert MinSize(16, max_shards=8)((10,), np.float32) == [3]  # 40 bytes: a begun shard counts
    assert MaxSize(4)((6, 1), np.float32) == [6, 1]
    assert MaxSize(4, max_shards=2)((6, 1), np.float32) == [2, 1]
    assert MaxSize(1024)((6, 1), np.float32) == [1, 1]
    assert MinSize()((10, 3), np.float32) == [1, 1]
    assert FixedShards(4)((), np.float32) == []


def test_a_partitioner_decides_what_is_split():
    big = MinSize(min_shard_bytes=64, max_shards=8)
    strategy = dj.ShardedStrategy(partition="parameters", partitioner=big)
    with strategy.scope():
        small, large = dj.Variable(jnp.zeros(16)), dj.Variable(jnp.zeros((64, 8)))
    assert dj.locality(small).kind == "mirrored"
    assert dj.locality(large).kind == "partitioned"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: FixedShards(0), "FixedShards: num_shards needs an int of 1 or more"),
        (lambda: MinSize(0), "MinSize: min_shard_bytes needs an int of 1 or more"),
        (lambda: MinSize(1, 0), "MinSize: max_shards needs an int of 1 or more"),
        (lambda: MaxSize(0), "MaxSize: max_shard_bytes needs an int of 1 or more"),
        (lambda: MaxSize(1, 0), "MaxSize: max_shards needs an int of 1 or more"),
        (
            lambda: dj.ShardedStrategy(partition="all", min_split_bytes=0),
            "partition needs one of optimizer, grad",
        ),
        (
            lambda: dj.CentralStorageStrategy(parameter_memory="disk"),
            "parameter_memory needs one of device, pinned_host",
        ),
    ],
)
def test_wrong_options(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_a_split_variable_of_bools_is_summed_as_a_whole_one():
    """A sum of bools in a bool is: is any True."""
    strategy = make_strategy("parameters", 2)
    with strategy.scope():
        v = dj.Variable(np.zeros(4, bool), aggregation=dj.VariableAggregation.SUM)
    rows = [np.array([True, False, False, True]), np.array([True, True, False, False])]
    x = strategy.distribute_values_from_function(lambda c: rows[c.replica_id_in_sync_group])
    strategy.run(lambda x: v.assign(x), args=(x,))
    assert v.value.tolist() == [True, True, False, True]


def test_r249_central_storage_needs_an_aggregation():
    strategy = make_strategy("central", 2)
    with strategy.scope():
        v = dj.Variable(1.0, name="v")
    with pytest.raises(ValueError, match="You must specify an aggregation method"):
        strategy.run(lambda: v.assign_add(jnp.float32(1)))
    assert float(v.value) == 1.0


def test_r253_no_variables_at_all():
    """Decision 15: `non_slot_devices([])` works (TF: ValueError)."""
    strategy = make_strategy("central", 2)
    devices = strategy.extended.non_slot_devices([])
    assert devices == tuple(jax.devices()[:2])
    with strategy.scope(), strategy.extended.colocate_vars_with(devices):
        step = dj.Variable(0, name="step")
    strategy.extended.update_non_slot(devices, lambda: step.assign_add(1))
    assert int(step.value) == 1


def test_what_does_not_fit_a_split_variable_is_broadcast_whole():
    """As `reduce_to` does: a step count, beside a moment that is split as its variable is."""
    strategy = make_strategy("parameters", 2)
    with strategy.scope():
        v = dj.Variable(jnp.zeros(4))
    tree = {"count": 3, "odd": np.arange(3.0), "moment": np.arange(4.0)}
    placed = strategy.extended.broadcast_to(tree, v)
    assert dj.locality(placed["moment"]) == dj.locality(v)
    for name in ("count", "odd"):
        assert dj.locality(placed[name]).kind == "mirrored"
        np.testing.assert_array_equal(placed[name], tree[name])
