"""Variables between every two kinds of storage; where they live afterwards."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distjax as dj
from tests.checkpoint.storages import STORAGES

W = np.arange(16.0, dtype=np.float32).reshape(8, 2)
ON_READ_SUM = {
    "synchronization": dj.VariableSynchronization.ON_READ,
    "aggregation": dj.VariableAggregation.SUM,
}


@pytest.fixture(params=list(STORAGES))
def storage(request):
    """Each kind of storage."""
    return STORAGES[request.param]()


def training_state(strategy, scale):
    """Variables of every kind, and an optimizer whose slots are split by ZeRO 1 and 2."""
    with strategy.scope():
        w = dj.Variable(W * scale, name="w")
        count = dj.Variable(jnp.int32(0), **ON_READ_SUM)
        count.assign(jnp.int32(scale))
        odd = dj.Variable(np.full(3, scale, np.float32), name="odd")  # nothing divides it
    optimizer = dj.optim.Optimizer(optax.adam(0.1))
    optimizer.init({"w": w, "odd": odd})
    return {"w": w, "odd": odd, "count": count, "optimizer": optimizer}


def moments(state):
    return state["optimizer"].state[0].mu["w"]


def save(strategy, directory):
    state = training_state(strategy, 5)
    moments(state).assign(W + 1)
    with dj.checkpoint.Checkpointer(directory) as checkpointer:
        checkpointer.save(1, state)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory that a mirrored strategy of two replicas wrote."""
    directory = tmp_path_factory.mktemp("saved")
    save(STORAGES["mirrored2"](), directory)
    return directory


def test_every_storage_saves_the_same_values(storage, tmp_path):
    save(storage, tmp_path)
    like = {"w": W, "odd": np.zeros(3, np.float32), "count": np.int32(0)}
    like["optimizer"] = {"state": {"0": {"mu": {"w": W}}}}
    with dj.checkpoint.Checkpointer(tmp_path) as checkpointer:
        values = checkpointer.restore(like, partial=True)
    np.testing.assert_array_equal(values["w"], W * 5)
    np.testing.assert_array_equal(values["odd"], np.full(3, 5.0))
    np.testing.assert_array_equal(values["optimizer"]["state"]["0"]["mu"]["w"], W + 1)
    assert values["count"] == 5


def test_every_storage_takes_what_another_saved(storage, saved):
    state = training_state(storage, 0)
    before = [dj.locality(v) for v in (state["w"], state["odd"], moments(state))]
    with dj.checkpoint.Checkpointer(saved) as checkpointer:
        restored = checkpointer.restore(state)
    assert restored["w"] is state["w"], "variables are restored in place"
    np.testing.assert_array_equal(state["w"].value, W * 5)
    np.testing.assert_array_equal(state["odd"].value, np.full(3, 5.0))
    np.testing.assert_array_equal(moments(state).value, W + 1)
    assert int(state["count"].value) == 5
    assert [dj.locality(v) for v in (state["w"], state["odd"], moments(state))] == before


def test_split_variables_are_read_to_their_shards(saved):
    strategy = STORAGES["zero3"]()
    state = training_state(strategy, 0)
    with dj.checkpoint.Checkpointer(saved) as checkpointer:
        checkpointer.restore(state)
    for variable in (state["w"], moments(state)):
        assert dj.locality(variable).kind == "partitioned"
        shards = variable.value.addressable_shards
        assert [shard.data.shape for shard in shards] == [(1, 2)] * 8


@pytest.mark.parametrize("name", ["mirrored2", "zero1", "zero3", "central"])
def test_a_step_goes_on_after_a_restore(name, saved):
    """The programs of the strategy take what was restored, in its layout."""
    storage = STORAGES[name]()
    state = training_state(storage, 0)
    with dj.checkpoint.Checkpointer(saved) as checkpointer:
        checkpointer.restore(state)
    zeros = {"w": jnp.zeros((8, 2)), "odd": jnp.zeros(3)}
    variables = {"w": state["w"], "odd": state["odd"]}
    storage.run(lambda: state["optimizer"].apply_gradients([(zeros, variables)]))
    # Adam's mean decays by 0.9 when the gradient is 0, corrected for the first step.
    np.testing.assert_allclose(moments(state).value, 0.9 * (W + 1), rtol=1e-6)


def test_variables_of_two_strategies_in_one_tree(checkpointer):
    """As with a generator and a discriminator that live apart."""
    with dj.VirtualStrategy(2).scope():
        a = dj.Variable(1.0)
    with dj.MirroredStrategy(jax.devices()[:2]).scope():
        b = dj.Variable(2.0)
    checkpointer.save(1, [a, b])
    a.assign(0.0), b.assign(0.0)
    with b.strategy.scope():
        checkpointer.restore([a, b])
    assert (float(a.value), float(b.value)) == (1.0, 2.0)


def test_a_variable_and_an_array_have_the_same_key(checkpointer, pair):
    with pair.scope():
        v = dj.Variable(jnp.arange(3.0))
    checkpointer.save(1, {"model": {"v": v}})
    restored = checkpointer.restore({"model": {"v": np.zeros(3, np.float32)}})
    np.testing.assert_array_equal(restored["model"]["v"], [0.0, 1.0, 2.0])
    checkpointer.save(2, {"model": {"v": np.float32([7, 8, 9])}})
    checkpointer.restore({"model": {"v": v}})
    np.testing.assert_array_equal(v.value, [7.0, 8.0, 9.0])


def test_a_variable_at_two_keys_takes_the_last_value(checkpointer, pair):
    with pair.scope():
        v = dj.Variable(jnp.zeros(2))
    checkpointer.save(1, {"emb": np.float32([1, 1]), "head": np.float32([1, 2])})
    checkpointer.restore({"emb": v, "head": v})
    assert v.value.tolist() == [1, 2]


def test_lower_precision_is_converted_as_assign_does(checkpointer, pair):
    checkpointer.save(1, {"v": jnp.array([1.0, 2.5])})
    with pair.scope():
        v = dj.Variable(jnp.zeros(2, jnp.bfloat16))
    checkpointer.restore({"v": v})
    assert (v.dtype, v.value.tolist()) == (jnp.bfloat16, [1.0, 2.5])


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_components_come_back_equal_unless_they_are_saved_too(tmp_path, aggregation):
    strategy = dj.VirtualStrategy(2)
    with strategy.scope():
        v = dj.Variable(
            0.0,
            synchronization=dj.VariableSynchronization.ON_READ,
            aggregation=dj.VariableAggregation[aggregation],
        )

    def take(x):
        v.assign(x)

    strategy.run(take, args=(strategy.per_replica(np.array([1.0, 3.0], np.float32)),))
    with dj.checkpoint.Checkpointer(tmp_path) as checkpointer:
        tree = {"v": v, "components": strategy.run(lambda: v.value)}
        checkpointer.save(1, tree)
        before = float(v.value)
        v.assign(0.0)
        tree = checkpointer.restore(tree)
    assert float(v.value) == before
    first, second = map(float, strategy.local_results(v))
    assert first == second
    strategy.run(take, args=(tree["components"],))
    assert [float(x) for x in strategy.local_results(v)] == [1.0, 3.0]
