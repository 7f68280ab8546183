"""`dj.flax.apply_gradients(..., value=loss)`: what an optimizer takes besides the gradients."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import distjax as dj
from distjax.errors import LocalityError

X = np.arange(8, dtype=np.float32).reshape(4, 2)


def plateau():
    """Halves the rate as soon as a loss is no better than the best."""
    scale = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=0)
    return optax.chain(optax.adam(0.1), scale)


def polyak():
    return optax.polyak_sgd(max_learning_rate=0.1)


def scaled():
    """A transformation of the user's own with an argument that is a tree, and one that is none."""

    def update(updates, state, params=None, *, scales, sign):
        return jax.tree.map(lambda u: sign * u * scales["all"], updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def build(tx):
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def loss_of(model, x):
    return ((model(x) - 1) ** 2).mean()


def arguments_of(tx, loss):
    if tx is scaled:
        return {"scales": {"all": loss * 0 + 0.5}, "sign": -1}
    return {"value": loss}


def reduced_step(tx, model, optimizer, x):
    loss, grads = nnx.value_and_grad(loss_of)(model, x)
    loss = dj.get_replica_context().all_reduce("mean", loss)
    dj.flax.apply_gradients(optimizer, model, grads, **arguments_of(tx, loss))


def states(model, optimizer):
    return [np.asarray(x) for x in jax.tree.leaves((nnx.state(model), nnx.state(optimizer)))]


@pytest.mark.parametrize("tx", [plateau, polyak, scaled])
@pytest.mark.parametrize(
    "make",
    [
        lambda: dj.MirroredStrategy(jax.devices()[:2]),
        lambda: dj.ShardedStrategy(jax.devices()[:2], partition="parameters", min_split_bytes=0),
        lambda: dj.VirtualStrategy(1),
    ],
    ids=["mirrored", "sharded", "one"],
)
def test_the_optimizer_gets_what_it_takes(tx, make):
    strategy, (model, optimizer), (own, theirs) = make(), build(tx()), build(tx())
    (batch,) = strategy.distribute_dataset([X])
    for _ in range(4):
        strategy.run(reduced_step, args=(dj.static(tx), model, optimizer, batch))
        loss, grads = nnx.value_and_grad(loss_of)(own, X)
        theirs.update(own, grads, **arguments_of(tx, loss))
    for ours, expected in zip(states(model, optimizer), states(own, theirs), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_a_class_with_an_update_of_its_own_gets_it():
    class Own(nnx.Optimizer):
        def update(self, model, grads, *, value, **kwargs):
            super().update(model, grads, value=value, **kwargs)

    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer, strategy = Own(model, polyak(), wrt=nnx.Param), dj.VirtualStrategy(2)
    (batch,) = strategy.distribute_dataset([X])
    strategy.run(reduced_step, args=(dj.static(polyak), model, optimizer, batch))
    assert int(optimizer.step[...]) == 1


def test_an_argument_that_differs_is_refused_and_the_fix_works():
    strategy, (model, optimizer) = dj.VirtualStrategy(2), build(plateau())
    (batch,) = strategy.distribute_dataset([X])

    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(loss_of)(model, x)
        dj.flax.apply_gradients(optimizer, model, grads, value=loss)

    before = states(model, optimizer)
    with pytest.raises(LocalityError) as info:
        strategy.run(step, args=(model, optimizer, batch))
    text = str(info.value)
    assert text.startswith("apply_gradients needs value to be equal on every replica")
    assert "value=dj.get_replica_context().all_reduce('mean', value)" in text
    assert all(map(np.array_equal, states(model, optimizer), before))


def test_in_cross_replica_context():
    strategy, (model, optimizer) = dj.VirtualStrategy(2), build(polyak())
    (batch,) = strategy.distribute_dataset([X])
    fn = lambda model, x: nnx.value_and_grad(loss_of)(model, x)

    @dj.jit
    def step(model, optimizer, x, is_reduced):
        loss, grads = strategy.run(fn, args=(model, x))
        with strategy.scope():
            value = strategy.reduce("mean", loss) if is_reduced else loss
            dj.flax.apply_gradients(optimizer, model, grads, value=value)

    with pytest.raises(LocalityError, match=r"value=strategy.reduce\('mean', value\) outside"):
        step(model, optimizer, batch, dj.static(False))
    step(model, optimizer, batch, dj.static(True))
    assert int(optimizer.step[...]) == 1
