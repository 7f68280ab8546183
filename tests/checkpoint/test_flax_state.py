"""Flax: NNX objects are restored in place, linen train states come back new."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import distjax as dj


class Model(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.tied = self.linear

    def __call__(self, x):
        return self.dropout(self.norm(self.tied(x)))


def training(seed):
    model = Model(nnx.Rngs(seed))
    return {
        "model": model,
        "optimizer": nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param),
        "metrics": nnx.MultiMetric(loss=nnx.metrics.Average(), accuracy=nnx.metrics.Accuracy()),
        "rngs": nnx.Rngs(seed),
    }


@nnx.jit
def step(state, x):
    def loss_fn(model):
        return jnp.mean(model(x) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(state["model"])
    state["optimizer"].update(state["model"], grads)
    state["metrics"].loss.update(values=loss)
    return loss + jax.random.uniform(state["rngs"]())


def test_nnx_training_goes_on_as_if_it_had_not_stopped(checkpointer):
    x = jax.random.normal(jax.random.key(0), (4, 2))
    state, resumed = training(0), training(1)
    step(state, x)
    checkpointer.save(1, state)
    expected = [step(state, x) for _ in range(2)]
    restored = checkpointer.restore(resumed)
    assert restored["model"] is resumed["model"]
    assert resumed["model"].tied is resumed["model"].linear
    np.testing.assert_array_equal([step(resumed, x) for _ in range(2)], expected)
    assert resumed["metrics"].loss.compute() == state["metrics"].loss.compute()


def test_keys_of_nnx_are_paths_of_attributes(checkpointer):
    checkpointer.save(1, {"model": Model(nnx.Rngs(0))})
    keys = sorted(checkpointer.description()["keys"])
    dropout = ["model/dropout/rngs/count", "model/dropout/rngs/key"]
    linear = ["model/linear/bias", "model/linear/kernel"]
    norm = [f"model/norm/{name}" for name in ("bias", "mean", "scale", "var")]
    assert keys == [*dropout, *linear, *norm]


def test_a_state_of_nnx_is_interchangeable_with_its_module(checkpointer):
    model = Model(nnx.Rngs(0))
    checkpointer.save(1, nnx.state(model))
    other = Model(nnx.Rngs(1))
    checkpointer.restore(other)
    np.testing.assert_array_equal(other.linear.kernel[...], model.linear.kernel[...])


def test_created_state_goes_round_the_strategies(tmp_path):
    """Values are those that were saved, each where its own strategy keeps it."""
    strategies = [
        dj.VirtualStrategy(3),
        dj.ShardedStrategy(jax.devices()[:2], partition="parameters", min_split_bytes=0),
        dj.CentralStorageStrategy(jax.devices()[:2]),
        dj.MirroredStrategy(jax.devices()[:2]),
    ]
    saved = None
    for seed, strategy in enumerate(strategies):
        with strategy.scope():
            state = dj.flax.create(lambda seed=seed: training(seed))
        places = [x.sharding for x in jax.tree.leaves(nnx.state(state))]
        with dj.checkpoint.Checkpointer(tmp_path / "checkpoints") as checkpointer:
            if saved is not None:
                checkpointer.restore(state)
                assert same_values(state, saved)
            assert [x.sharding for x in jax.tree.leaves(nnx.state(state))] == places
            count = lambda state: state["metrics"].loss.update(values=jnp.float32(1))
            strategy.run(count, args=(state,))
            checkpointer.save(seed, state)
        saved = state
    assert float(saved["metrics"].loss.compute()) == 1


def same_values(state, other):
    ours, theirs = (jax.tree.leaves(nnx.state(tree)) for tree in (state, other))
    data = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return all(np.array_equal(data(a), data(b)) for a, b in zip(ours, theirs, strict=True))


def test_what_is_saved_is_what_a_variable_holds(checkpointer):
    """A hook of the user's on reads is not run: what it returns would be read by it again."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    model.kernel.set_metadata(on_get_value=lambda variable, value: 2 * value)
    held = model.kernel.get_raw_value()
    checkpointer.save(1, model)
    checkpointer.restore(model)
    np.testing.assert_array_equal(model.kernel.get_raw_value(), held)


def test_a_per_replica_value_in_an_nnx_variable(checkpointer, pair):
    """Statistics that nobody synchronized stay one per replica."""
    values = pair.distribute_values_from_function(
        lambda ctx: np.float32([ctx.replica_id_in_sync_group])
    )

    class Holder(nnx.Module):
        def __init__(self, value):
            self.mean = nnx.BatchStat(value)

    checkpointer.save(1, Holder(values))
    holder = Holder(values.map(jnp.zeros_like))
    checkpointer.restore(holder)
    restored = holder.mean.get_raw_value()
    assert isinstance(restored, dj.PerReplica)
    assert restored.stacked.tolist() == [[0.0], [1.0]]


@pytest.fixture
def train_state():
    model = nn.Dense(3)

    def make(seed):
        params = model.init(jax.random.key(seed), jnp.ones((1, 2)))
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.1))

    return make


def test_a_linen_train_state_on_a_strategy(checkpointer, train_state, pair):
    """Saved after a step of a strategy, restored into one that has not made a step."""
    state = pair.run(
        lambda s: s.apply_gradients(grads=jax.tree.map(jnp.ones_like, s.params)),
        args=(train_state(0),),
    )
    checkpointer.save(1, state)
    restored = checkpointer.restore(train_state(1))
    assert isinstance(restored, TrainState) and restored.step == 1
    jax.tree.map(np.testing.assert_array_equal, restored.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, restored.opt_state, state.opt_state)
    again = pair.run(
        lambda s: s.apply_gradients(grads=jax.tree.map(jnp.ones_like, s.params)), args=(restored,)
    )
    assert int(again.step) == 2
