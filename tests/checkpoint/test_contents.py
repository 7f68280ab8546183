"""What a tree may hold besides variables, and what comes back."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import distjax as dj


def round_trip(checkpointer, saved, like):
    checkpointer.save(1, saved)
    return checkpointer.restore(like)


def test_arrays_numbers_and_text(checkpointer):
    State = collections.namedtuple("State", ["step", "w", "notes"])
    tree = State(3, {"f": np.arange(3, dtype=np.int8), "z": 1 + 2j}, ["first", True, 0.1, None])
    like = State(0, {"f": np.zeros(3, np.int8), "z": 0j}, ["", False, 0.0, None])
    restored = round_trip(checkpointer, tree, like)
    assert isinstance(restored, State)
    assert (restored.step, restored.w["z"]) == (3, 1 + 2j)
    assert restored.notes == ["first", True, 0.1, None]
    assert restored.w["f"].dtype == np.int8
    np.testing.assert_array_equal(restored.w["f"], [0, 1, 2])


def test_a_bare_array_and_a_bare_variable(checkpointer):
    assert float(round_trip(checkpointer, jnp.float32(2.0), jnp.float32(0.0))) == 2.0
    v = dj.Variable(0.0)
    assert checkpointer.restore(v) is v
    assert float(v.value) == 2.0


def test_a_step_counter_that_began_as_a_number(checkpointer):
    """linen's TrainState.step is 0 at first and an array after a step."""
    restored = round_trip(checkpointer, {"step": jnp.int32(9)}, {"step": 0})
    assert type(restored["step"]) is int and restored["step"] == 9
    checkpointer.save(2, {"step": 10})
    array = checkpointer.restore({"step": jnp.int32(0)})["step"]
    assert isinstance(array, jax.Array) and int(array) == 10


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int4", "uint8", "bool", "complex64"])
def test_dtypes(dtype, checkpointer):
    x = jnp.array([0, 1, 1, 0], dtype)
    restored = round_trip(checkpointer, {"x": x}, {"x": jnp.zeros(4, dtype)})["x"]
    assert restored.dtype == x.dtype
    assert restored.tolist() == x.tolist()


def test_empty_arrays_and_an_empty_tree(checkpointer):
    restored = round_trip(checkpointer, {"x": jnp.zeros((0, 3))}, {"x": jnp.ones((0, 3))})
    assert restored["x"].shape == (0, 3)
    checkpointer.save(2, {})
    assert checkpointer.restore({}) == {}


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_prng_keys_draw_the_same_numbers(impl, checkpointer):
    keys = jax.random.split(jax.random.key(7, impl=impl), 2)
    like = jax.random.split(jax.random.key(0, impl=impl), 2)
    restored = round_trip(checkpointer, {"k": keys}, {"k": like})["k"]
    assert restored.dtype == keys.dtype
    np.testing.assert_array_equal(
        jax.random.uniform(restored[1], (3,)), jax.random.uniform(keys[1], (3,))
    )


def test_a_variable_that_is_a_prng_key(checkpointer, pair):
    with pair.scope():
        v = dj.Variable(jax.random.key(7))
    checkpointer.save(1, {"k": v})
    v.assign(jax.random.key(0))
    checkpointer.restore({"k": v})
    assert jax.random.key_data(v.value).tolist() == jax.random.key_data(jax.random.key(7)).tolist()


def test_per_replica_values(checkpointer, pair):
    x = pair.distribute_values_from_function(lambda ctx: np.float32(ctx.replica_id_in_sync_group))
    restored = round_trip(checkpointer, {"x": x}, {"x": x.map(jnp.zeros_like)})["x"]
    assert isinstance(restored, dj.PerReplica)
    assert [float(v) for v in pair.local_results(restored)] == [0.0, 1.0]
    assert restored.stacked.sharding == x.stacked.sharding


def test_arrays_are_restored_where_those_of_the_tree_live(checkpointer):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("x"))
    checkpointer.save(1, {"x": jnp.arange(8.0)})
    restored = checkpointer.restore({"x": jax.device_put(jnp.zeros(8), split)})["x"]
    assert restored.sharding == split
    np.testing.assert_array_equal(restored, np.arange(8.0))
    shape = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=split)
    assert checkpointer.restore({"x": shape})["x"].sharding == split
    free = checkpointer.restore({"x": jnp.zeros(8)})["x"]
    assert not free.committed, "or it could not be combined with arrays of a strategy"


def test_metrics(checkpointer, pair):
    with pair.scope():
        mean = dj.metrics.Mean("loss")
    mean.update(np.array([1.0, 2.0, 6.0]))
    checkpointer.save(1, {"loss": mean})
    mean.reset()
    mean.update(np.array([100.0]))
    assert checkpointer.restore({"loss": mean})["loss"] is mean
    assert float(mean.result()) == 3.0
    mean.update(np.array([7.0]))
    assert float(mean.result()) == 4.0


def test_an_optimizer_that_accumulates(checkpointer, pair):
    with pair.scope():
        w = dj.Variable(10.0)
    optimizer = dj.optim.Optimizer(optax.sgd(1.0), accumulate_steps=2)
    optimizer.init([w])
    step = lambda: pair.run(lambda: optimizer.apply_gradients([(jnp.float32(1.0), w)]))
    step()
    checkpointer.save(1, {"w": w, "optimizer": optimizer})
    step()
    assert float(w.value) == 8.0  # two replicas, the mean of two gradients
    checkpointer.restore({"w": w, "optimizer": optimizer})
    assert float(w.value) == 10.0
    step()
    assert float(w.value) == 8.0, "the first of the two gradients was kept"


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_accumulated_gradients_mean_the_same_on_other_strategies(tmp_path, op):
    """Saved between two steps of one update, by replicas or where each step reduces."""

    def make(strategy):
        with strategy.scope():
            w = dj.Variable(jnp.zeros(4))
        optimizer = dj.optim.Optimizer(optax.sgd(1.0), op, accumulate_steps=2)
        optimizer.init([w])
        return strategy, w, optimizer

    def step(made, gradient):
        strategy, w, optimizer = made
        share = gradient / (strategy.num_replicas_in_sync if op == "sum" else 1)
        strategy.run(lambda g: optimizer.apply_gradients([(g * jnp.ones(4), w)]), args=(share,))

    def strategies():
        devices = jax.devices()
        yield dj.MirroredStrategy(devices[:2])
        yield dj.VirtualStrategy(4)
        yield dj.ShardedStrategy(devices[:4], partition="gradients", min_split_bytes=0)
        yield dj.OneDeviceStrategy()
        yield dj.ParameterServerStrategy(1)

    made = list(map(make, strategies()))
    for number, (strategy, w, optimizer) in enumerate(made):
        step(made[number], jnp.float32(1))
        with dj.checkpoint.Checkpointer(tmp_path / str(number)) as checkpointer:
            checkpointer.save(1, {"w": w, "optimizer": optimizer})
        others = list(map(make, strategies()))
        for other in (others[number - 1], others[number - 2]):  # those before it, in a ring
            with dj.checkpoint.Checkpointer(tmp_path / str(number)) as checkpointer:
                checkpointer.restore({"w": other[1], "optimizer": other[2]})
            step(other, jnp.float32(3))
            found = np.asarray(other[1].value)
            np.testing.assert_allclose(found, -2.0, err_msg=f"{strategy} to {other[0]}")


def test_the_position_in_the_data(checkpointer, pair):
    dataset = pair.distribute_dataset([np.full(2, i) for i in range(6)])
    iterator = iter(dataset)
    next(iterator), next(iterator)
    checkpointer.save(1, {"data": iterator})
    next(iterator)
    resumed = iter(dataset)
    checkpointer.restore({"data": resumed})
    assert next(resumed).stacked.ravel().tolist() == [2, 2]


def test_a_state_of_ones_own_comes_back_exactly(checkpointer):
    class Source:
        state = {"at": (1, 2), 3: b"\x00\xff", "x": np.float32([0.5]), "n": None, "z": 1j}

        def get_state(self):
            return self.state

        def set_state(self, state):
            self.state = state

    restored = Source()
    checkpointer.save(1, {"data": Source()})
    restored.state = None
    checkpointer.restore({"data": restored})
    expected = dict(Source.state)
    np.testing.assert_array_equal(restored.state.pop("x"), expected.pop("x"))
    assert restored.state == expected


def test_objects_with_variables_in_their_attributes(checkpointer, pair):
    class Model:
        def __init__(self):
            self.layers = [dj.Variable(1.0), {"b": dj.Variable(2.0)}]
            self.tied = self.layers[0]
            self.strategy = pair
            self.norm = dj.layers.BatchNormalization(2)

    with pair.scope():
        model = Model()
    checkpointer.save(1, {"model": model})
    keys = checkpointer.description()["keys"]
    norm = [f"model/norm/{name}" for name in ("beta", "gamma", "moving_mean", "moving_variance")]
    assert sorted(keys) == ["model/layers/0", "model/layers/1/b", *norm]
    model.tied.assign(0.0)
    checkpointer.restore({"model": model})
    assert float(model.layers[0].value) == 1.0


@dataclasses.dataclass(slots=True)
class Slotted:
    kept: dj.Variable
    never: dj.Variable = dataclasses.field(init=False)


class MoreSlots(Slotted):
    __slots__ = ("__hidden", "__weakref__")

    def hide(self, value):
        self.__hidden = value


class Asking:
    def __getattr__(self, name):
        raise ZeroDivisionError(f"the attribute {name} was asked for")


def test_variables_in_slots_and_deques(checkpointer):
    class Model:
        def __init__(self):
            self.inner = MoreSlots(dj.Variable(1.0))
            self.inner.hide([dj.Variable(2.0)])
            self.recent = collections.deque([dj.Variable(3.0)])
            self.own = Asking()  # of an arbitrary object only the class is looked at

    model = Model()
    checkpointer.save(1, {"model": model, "root": Slotted(dj.Variable(4.0))})
    keys = sorted(checkpointer.description()["keys"])
    names = ["inner/_MoreSlots__hidden/0", "inner/kept", "recent/0"]
    assert keys == [*(f"model/{name}" for name in names), "root/kept"]
    model.inner.kept.assign(0.0)
    checkpointer.restore({"model": model, "root": Slotted(dj.Variable(0.0))})
    assert float(model.inner.kept.value) == 1.0


def test_the_description_of_a_run(checkpointer, mirrored):
    with mirrored.scope():
        v = dj.Variable(
            jnp.zeros((2, 3)),
            synchronization=dj.VariableSynchronization.ON_READ,
            aggregation=dj.VariableAggregation.MEAN,
        )
    checkpointer.save(4, {"v": v, "epoch": 2}, metrics={"loss": jnp.float32(0.5)})
    said = checkpointer.description()
    assert said["step"] == 4
    assert (said["distjax"], said["jax"]) == (dj.__version__, jax.__version__)
    assert said["strategies"] == [{"strategy": repr(mirrored), "num_replicas": 2}]
    assert said["metrics"] == {"loss": 0.5}
    assert said["keys"]["v"]["lives"] == "per_replica variable, ON_READ MEAN"
    assert (said["keys"]["v"]["shape"], said["keys"]["v"]["dtype"]) == ([2, 3], "float32")
    assert said["values"] == {"epoch": 2}


@pytest.mark.parametrize("dtype", ["uint2", "uint4", "int4", "float8_e4m3fn"])
def test_narrow_dtypes(pair, checkpointer, dtype):
    values = np.arange(2).astype(jnp.dtype(dtype))
    with pair.scope():
        v = dj.Variable(values)
    like = {"numpy": np.zeros_like(values), "jax": jnp.zeros(2, dtype), "variable": v}
    checkpointer.save(1, {"numpy": values, "jax": jnp.asarray(values), "variable": v})
    v.assign(like["numpy"])
    restored = checkpointer.restore(like)
    for found in (restored["numpy"], restored["jax"], v.value):
        assert found.dtype == dtype
        assert np.asarray(found).astype(int).tolist() == [0, 1]
