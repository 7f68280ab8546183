"""Reductions travel packed, compressed and in two levels, with the same result."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distjax as dj
from distjax._src.collectives.reductions import packs

IMPLEMENTATION = dj.CommunicationImplementation


def gradients(strategy, shapes, dtype=np.float32):
    def of_replica(ctx):
        r = ctx.replica_id_in_sync_group
        return [np.arange(np.prod(s), dtype=dtype).reshape(s) * (r + 1) + 0.1 for s in shapes]

    return strategy.distribute_values_from_function(of_replica)


SHAPES = [(3,), (2, 2), (), (5,), (16, 4), (1,)]


def reduced(strategy, op, shapes=SHAPES):
    values = gradients(strategy, shapes)
    return strategy.extended.batch_reduce_to(op, [(v, v) for v in values])


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize(
    "options",
    [
        dj.CommunicationOptions(bytes_per_pack=64),
        dj.CommunicationOptions(bytes_per_pack=10**6),
        dj.CommunicationOptions(devices_per_host=2),
        dj.CommunicationOptions(devices_per_host=4, bytes_per_pack=40),
    ],
    ids=str,
)
def test_the_way_does_not_change_the_result(op, options):
    devices = jax.devices()
    expected = reduced(dj.MirroredStrategy(devices), op)
    for got, want in zip(
        reduced(dj.MirroredStrategy(devices, communication=options), op), expected, strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-6)
        assert got.sharding == want.sharding


@pytest.mark.parametrize(
    "options",
    [
        dj.CommunicationOptions(compress="bfloat16"),
        dj.CommunicationOptions(devices_per_host=2),
        dj.CommunicationOptions(devices_per_host=2, bytes_per_pack=8),
    ],
    ids=str,
)
def test_empty_gradients_among_others(options):
    strategy = dj.MirroredStrategy(jax.devices()[:4], communication=options)
    empty, one, also_empty = reduced(strategy, "sum", [(0,), (2,), (3, 0)])
    assert empty.shape == (0,) and also_empty.shape == (3, 0)
    np.testing.assert_allclose(one, [0.4, 10.4], rtol=1e-2)


@pytest.mark.parametrize("count", [3, 8])
def test_hosts_of_unequal_size(count):
    options = dj.CommunicationOptions(devices_per_host=count - 1)
    with pytest.raises(ValueError) as caught:
        dj.MirroredStrategy(jax.devices()[:count], communication=options)
    assert str(caught.value).splitlines() == [
        f"CommunicationOptions: devices_per_host needs to divide the {count} replicas.",
        f"  Got: {count - 1}, which leaves 1 over.",
        "  Why: a reduction in two levels needs the same number of replicas on every host.",
        "  Fix: dj.CommunicationOptions(devices_per_host=0), one level; or the number of "
        "devices of one host",
    ]


def count_in_program(strategy, what, shapes=SHAPES):
    values = gradients(strategy, shapes)
    step = dj.jit(lambda values: strategy.extended.batch_reduce_to("sum", [(v, v) for v in values]))
    return step.lower(values).as_text().count(f'"stablehlo.{what}"')


def test_one_collective_per_pack():
    def strategy(bytes_per_pack):
        options = dj.CommunicationOptions(bytes_per_pack=bytes_per_pack)
        return dj.MirroredStrategy(jax.devices()[:2], communication=options)

    sizes = [int(4 * np.prod(s)) for s in SHAPES]  # 12, 16, 4, 20, 256, 4 bytes
    assert sum(sizes) == 312
    assert count_in_program(strategy(0), "all_reduce") == len(SHAPES)
    assert count_in_program(strategy(312), "all_reduce") == 1
    assert count_in_program(strategy(52), "all_reduce") == 3  # 52 | 256 | 4


def test_packs_keep_dtypes_apart():
    arrays = [jnp.ones(2), jnp.ones(2, jnp.int32), jnp.ones(2), jnp.ones(2, jnp.int32)]
    assert packs(arrays, 100) == [[0, 2], [1, 3]]
    assert packs(arrays, 8) == [[0], [1], [2], [3]]


def test_two_levels_are_three_collectives():
    options = dj.CommunicationOptions(devices_per_host=4)
    strategy = dj.MirroredStrategy(communication=options)
    counts = [
        count_in_program(strategy, what, [(16,)])
        for what in ("reduce_scatter", "all_reduce", "all_gather")
    ]
    assert counts == [1, 1, 1]


def test_compressed_values_are_summed_in_float32():
    options = dj.CommunicationOptions(compress="bfloat16")
    strategy = dj.MirroredStrategy(communication=options)
    # In bfloat16, 256 + 1 = 256: a running sum would stay at 256.
    x = strategy.distribute_values_from_function(
        lambda ctx: np.full((3,), 256.0 if ctx.replica_id_in_sync_group == 0 else 1.0, np.float32)
    )
    total = strategy.extended.reduce_to("sum", x, x)
    assert total.dtype == jnp.float32
    np.testing.assert_array_equal(total, [264.0] * 3)  # 263 to the nearest bfloat16
    counts = np.ones(3, np.int32)
    whole = strategy.distribute_values_from_function(lambda ctx: counts)
    np.testing.assert_array_equal(strategy.extended.reduce_to("sum", whole, whole), [8] * 3)


def test_only_reductions_to_destinations_are_compressed():
    """What the options' docstring promises, and what it leaves exact, by dtype in the program."""
    options = dj.CommunicationOptions(compress="bfloat16", bytes_per_pack=64)
    strategy = dj.MirroredStrategy(jax.devices()[:2], communication=options)
    aggregations = (dj.VariableAggregation.SUM, dj.VariableAggregation.MEAN)
    with strategy.scope():
        w, metric = dj.Variable(jnp.ones(3)), dj.metrics.Mean()
        on_read, on_write = (
            [dj.Variable(jnp.ones(3), synchronization=s, aggregation=a) for a in aggregations]
            for s in (dj.VariableSynchronization.ON_READ, dj.VariableSynchronization.ON_WRITE)
        )
        optimizer = dj.optim.Optimizer(optax.sgd(0.1))
        optimizer.init([w])
    (x,) = gradients(strategy, [(3,)])
    extended = strategy.extended
    replicas = lambda fn: lambda x: strategy.run(fn, args=(x,))
    write = lambda v: replicas(lambda x: v.assign(x))
    compressed = {
        "reduce_to": lambda x: extended.reduce_to("mean", x, x),
        "batch_reduce_to": lambda x: extended.batch_reduce_to("sum", [(x, x)]),
        "reduce_to of components": lambda x: extended.reduce_to("mean", on_read[1], w),
        "optimizer": replicas(lambda x: optimizer.apply_gradients([(x, w)])),
    }
    exact = {
        "reduce": lambda x: strategy.reduce("mean", x),
        "gather": lambda x: strategy.gather(x, axis=0),
        "broadcast_to": lambda x: extended.broadcast_to(w.value),
        "all_reduce": replicas(lambda x: dj.get_replica_context().all_reduce("mean", x)),
        "a metric": lambda x: metric.result(),
        **{f"read {v.aggregation}": lambda x, v=v: v.value for v in on_read},
        **{f"read in a replica {v.aggregation}": replicas(lambda x, v=v: v.value) for v in on_read},
        **{f"write {v.aggregation}": write(v) for v in on_write},
    }
    for name, fn in (compressed | exact).items():
        has_bfloat16 = "bf16" in dj.jit(fn).lower(x).as_text()
        assert has_bfloat16 == (name in compressed), name


def test_two_levels_are_compressed_across_hosts_only():
    options = dj.CommunicationOptions(compress="bfloat16", devices_per_host=2)
    strategy = dj.MirroredStrategy(jax.devices()[:4], communication=options)
    # Within a host 256 + 1 = 257, which is 256 in bfloat16; across hosts, 256 + 4 = 260.
    x = strategy.distribute_values_from_function(
        lambda ctx: np.full((3,), [256.0, 1.0, 2.0, 2.0][ctx.replica_id_in_sync_group], np.float32)
    )
    np.testing.assert_array_equal(strategy.extended.reduce_to("sum", x, x), [260.0] * 3)
    kinds = ("reduce_scatter", "all_reduce", "all_to_all", "all_gather")
    assert [count_in_program(strategy, what, [(16,)]) for what in kinds] == [1, 0, 1, 2]


def test_options_on_one_device_do_not_matter():
    options = dj.CommunicationOptions(devices_per_host=2)
    one = dj.MirroredStrategy(jax.devices()[:1], communication=options)
    values = gradients(one, [(3,)])
    np.testing.assert_allclose(one.extended.reduce_to("sum", values[0], None), [0.1, 1.1, 2.1])


def test_r353_options():
    with pytest.raises(ValueError, match="bytes_per_pack needs an int of 0 or more"):
        dj.CommunicationOptions(bytes_per_pack=-1)
    with pytest.raises(ValueError, match="implementation needs one of AUTO, RING, NCCL"):
        dj.CommunicationOptions(implementation="foo")
    assert dj.CommunicationOptions(implementation="ring").implementation is IMPLEMENTATION.RING
    with pytest.raises(ValueError, match="compress needs None or 'bfloat16'"):
        dj.CommunicationOptions(compress="int8")


def test_merge_lets_the_others_non_default_fields_win():
    a = dj.CommunicationOptions(bytes_per_pack=1, timeout_seconds=2.0)
    b = dj.CommunicationOptions(bytes_per_pack=5, implementation="NCCL")
    assert a.merge(b) == dj.CommunicationOptions(
        bytes_per_pack=5, timeout_seconds=2.0, implementation="NCCL"
    )
    assert a.merge(None) is a
