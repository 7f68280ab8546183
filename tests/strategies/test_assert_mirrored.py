"""assert_mirrored finds copies that drifted apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from tests.replicas import ids

SUM = dj.VariableAggregation.SUM
ON_READ = dj.VariableSynchronization.ON_READ


def with_copies(strategy, copies):
    """Returns a replicated array of `strategy` whose copies are what is given."""
    devices = strategy.extended.topology.devices
    arrays = [jax.device_put(c, d) for c, d in zip(copies, devices, strict=True)]
    sharding = strategy.extended.topology.mirrored
    return jax.make_array_from_single_device_arrays(copies[0].shape, sharding, arrays)


def copies_of(strategy, value):
    return [np.array(value) for _ in strategy.extended.topology.devices]


def first_line(error):
    return str(error.value).splitlines()[0]


@pytest.fixture
def eight():
    return dj.MirroredStrategy(jax.devices())


def test_what_is_mirrored_passes(strategy):
    with strategy.scope():
        v = dj.Variable(jnp.arange(3.0), name="v")
        k = dj.Variable(jax.random.key(3), name="k")
    total = strategy.run(lambda: jnp.arange(4.0))
    strategy.assert_mirrored(v)
    strategy.assert_mirrored({"v": v, "k": k, "total": total, "python": [1, "a", None]})
    with strategy.scope():
        strategy.assert_mirrored(v)


def test_split_and_host_variables_pass():
    for strategy in (
        dj.ShardedStrategy(partition="parameters", min_split_bytes=0),
        dj.CentralStorageStrategy(),
    ):
        with strategy.scope():
            strategy.assert_mirrored(dj.Variable(jnp.ones((16, 2))))


def test_which_leaf_which_replica_which_element(eight):
    copies = copies_of(eight, np.zeros((2, 3), np.float32))
    copies[3][1, 0], copies[3][1, 2], copies[6][0, 0] = 7, 8, 9
    tree = {"ok": with_copies(eight, copies_of(eight, 1.0)), "w": [with_copies(eight, copies)]}
    with pytest.raises(dj.errors.LocalityError) as error:
        eight.assert_mirrored(tree)
    d = jax.devices()
    assert first_line(error) == (
        "the value['w'][0] needs to be equal on every replica, and "
        f"replica 3 ({d[3]}), replica 6 ({d[6]}) drifted."
    )
    assert f"at index (1, 0) 7.0 on replica 3 ({d[3]}) and 0.0 on replica 0 ({d[0]}); " in str(
        error.value
    )
    assert "2 of 6 elements differ" in str(error.value)


def test_a_variable_is_named_and_can_be_cured(eight):
    with eight.scope():
        w = dj.Variable(0.0, name="w")
    copies = copies_of(eight, np.float32(0))
    copies[1] = np.float32(5)
    w.stored.swap(with_copies(eight, copies))
    with pytest.raises(dj.errors.LocalityError) as error:
        eight.assert_mirrored({"layer": w})
    assert first_line(error).startswith("the value['layer'] (variable 'w') needs to be equal")
    w.assign(np.asarray(w.value))  # the fix of the message
    eight.assert_mirrored(w)


def test_drift_from_a_program_that_was_not_checked(eight):
    """JAX believes out_specs when its own check is off."""
    spec = jax.sharding.PartitionSpec
    drifted = jax.shard_map(
        lambda: jax.lax.axis_index("replica"),
        mesh=eight.mesh,
        in_specs=(),
        out_specs=spec(),
        check_vma=False,
    )()
    assert drifted.is_fully_replicated
    with pytest.raises(dj.errors.LocalityError, match="replica 1 .* drifted"):
        eight.assert_mirrored(drifted)
    eight.assert_mirrored(eight.extended.broadcast_to(np.asarray(drifted)))


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int8", "uint32", "bool", "complex64", "int4"]
)
def test_bits_count_in_every_dtype(dtype):
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    copies = [np.asarray(jnp.array([0, 1, 0], dtype)), np.asarray(jnp.array([0, 1, 1], dtype))]
    strategy.assert_mirrored(with_copies(strategy, [copies[0], copies[0]]))
    with pytest.raises(dj.errors.LocalityError, match=r"at index \(2,\)"):
        strategy.assert_mirrored(with_copies(strategy, copies))


def test_nan_equals_nan_and_zeros_have_signs():
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    quiet = np.array([np.nan, 1], np.float32)
    other = quiet.copy()
    other.view(np.uint32)[0] += 1  # another NaN
    strategy.assert_mirrored(with_copies(strategy, [quiet, other]))
    with pytest.raises(dj.errors.LocalityError, match="-0.0 on replica 1"):
        strategy.assert_mirrored(with_copies(strategy, [np.float32(0), np.float32(-0.0)]))


def test_copies_of_parts_are_compared():
    """Split over the model axis: a copy of each part on every replica."""
    strategy = dj.MirroredStrategy(jax.devices()[:4], model_axes={"model": 2})
    sharding = jax.sharding.NamedSharding(strategy.mesh, jax.sharding.PartitionSpec("model"))
    parts = [np.float32([0, 1]), np.float32([2, 3]), np.float32([0, 1]), np.float32([2, 4])]
    arrays = [jax.device_put(p, d) for p, d in zip(parts, jax.devices()[:4], strict=True)]
    drifted = jax.make_array_from_single_device_arrays((4,), sharding, arrays)
    with pytest.raises(dj.errors.LocalityError) as error:
        strategy.assert_mirrored(drifted)
    assert "at index (3,) 4.0 on replica 1" in str(error.value)


def test_values_of_one_replica_are_refused(pair):
    with pair.scope():
        c = dj.Variable(0.0, name="c", synchronization=ON_READ, aggregation=SUM)
    for value, what in (({"x": ids(pair)}, "a PerReplica"), ({"x": c}, "a sync-on-read variable")):
        with pytest.raises(dj.errors.LocalityError) as error:
            pair.assert_mirrored(value)
        assert first_line(error).startswith(
            "assert_mirrored needs one value that every replica holds, in the value['x']"
        )
        assert what in str(error.value)


def test_traced_values_are_refused(pair):
    with pair.scope():
        w = dj.Variable(0.0, name="w")
    for step in (lambda x: pair.assert_mirrored([x]), lambda x: pair.assert_mirrored([w])):
        with pytest.raises(dj.errors.ContextError) as error:
            dj.jit(step)(1.0)
        assert first_line(error).startswith("assert_mirrored needs values, not a trace of them, in")
    with pytest.raises(
        dj.errors.ContextError, match="^assert_mirrored needs cross-replica context"
    ):
        pair.run(lambda x: pair.assert_mirrored(x), args=(1.0,))
