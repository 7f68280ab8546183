"""Linen states and Equinox models as arguments, placed on the axes of the strategy's mesh."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import distjax as dj
from tests.drill_mark import all_drills_but

ROWS = np.random.default_rng(0).normal(size=(4, 3, 4)).astype(np.float32)
RULES = (("embed", None), ("mlp", "model"))


@pytest.fixture
def four_by_two():
    return dj.MirroredStrategy(model_axes={"model": 2})


class Layers(nn.Module):
    """Columns, then rows: by the mesh's own names, or by logical ones."""

    logical: bool = False

    @nn.compact
    def __call__(self, x):
        named = nn.with_logical_partitioning if self.logical else nn.with_partitioning
        names = ("embed", "mlp") if self.logical else (None, "model")
        init = nn.initializers.lecun_normal()
        x = jnp.tanh(nn.Dense(8, kernel_init=named(init, names))(x))
        return nn.Dense(4, kernel_init=named(init, names[::-1]))(x)


def make_state(model, key):
    params = model.init(key, jnp.ones((1, 4)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.1))


def loss_of(state, params, x):
    return jnp.mean(state.apply_fn({"params": params}, x) ** 2)


@pytest.mark.parametrize(
    "logical", all_drills_but([True], [False, True]), ids=["mesh names", "logical names"]
)
def test_a_linen_state_stays_split(four_by_two, logical):
    make = functools.partial(make_state, Layers(logical))
    shapes = jax.eval_shape(make, jax.random.key(0))
    specs = nn.get_partition_spec(shapes)
    shardings = (
        nn.logical_to_mesh_sharding(specs, four_by_two.mesh, RULES)
        if logical
        else nn.get_sharding(shapes, four_by_two.mesh)
    )
    state = jax.jit(make, out_shardings=shardings)(jax.random.key(0))

    def step(state, x):
        loss, grads = jax.value_and_grad(functools.partial(loss_of, state))(state.params, x)
        loss, grads = dj.get_replica_context().all_reduce("mean", (loss, grads))
        return state.apply_gradients(grads=grads), loss

    train = dj.jit(lambda state, x: four_by_two.run(step, args=(state, x)), donate_argnums=0)
    rows, alone = four_by_two.per_replica(ROWS), make(jax.random.key(0))
    for _ in range(3):
        state, loss = train(state, rows)
        expected, grads = jax.value_and_grad(functools.partial(loss_of, alone))(
            alone.params, ROWS.reshape(12, 4)
        )
        alone = alone.apply_gradients(grads=grads)
        np.testing.assert_allclose(loss, expected, atol=1e-6)
    for tree in (state.params, state.opt_state[0].mu):
        up, down = (nn.unbox(tree)[name]["kernel"] for name in ("Dense_0", "Dense_1"))
        assert up.sharding == NamedSharding(four_by_two.mesh, P(None, "model"))
        assert down.sharding == NamedSharding(four_by_two.mesh, P("model"))


def test_an_equinox_model_stays_split(four_by_two):
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    on_all = NamedSharding(four_by_two.mesh, P())
    whole = jax.tree.map(lambda _: on_all, eqx.filter(model, eqx.is_array))
    split = NamedSharding(four_by_two.mesh, P("model"))
    shardings = eqx.tree_at(lambda m: (m.layers[0].weight, m.layers[0].bias), whole, (split, split))
    model = eqx.filter_shard(model, shardings)
    tx = optax.adam(0.1)
    state = tx.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_value_and_grad
    def loss_of(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    def step(model, state, x):
        loss, grads = dj.get_replica_context().all_reduce("mean", loss_of(model, x))
        updates, state = tx.update(grads, state)
        return eqx.apply_updates(model, updates), state, loss

    train = four_by_two.jit(step, donate_argnums=(0, 1))
    alone = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    own = tx.init(eqx.filter(alone, eqx.is_array))
    for _ in range(3):
        model, state, loss = train(model, state, four_by_two.per_replica(ROWS))
        expected, grads = loss_of(alone, ROWS.reshape(12, 4))
        updates, own = tx.update(grads, own)
        alone = eqx.apply_updates(alone, updates)
        np.testing.assert_allclose(loss, expected, atol=1e-6)
    assert model.layers[0].weight.sharding.spec == P("model")
    assert state[0].mu.layers[0].weight.sharding.spec == P("model")
