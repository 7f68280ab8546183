"""Short floats to compute with, float32 to keep, and a scale on which replicas agree."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distjax as dj
from tests.flax.image_loop import Classifier, values

STRATEGIES = {
    "one_device": lambda: dj.OneDeviceStrategy(),
    "mirrored2": lambda: dj.MirroredStrategy(jax.devices()[:2]),
    "virtual2": lambda: dj.VirtualStrategy(2),
    "sharded": lambda: dj.ShardedStrategy(jax.devices()[:2], partition="parameters"),
}


def test_computing_in_bfloat16_keeps_float32_variables(pair):
    model = Classifier(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    (x,) = pair.distribute_dataset([np.ones((4, 6, 6, 1), np.float32)])
    mean = np.asarray(model.norm.mean[...])

    def step(model, optimizer, x):
        def loss_fn(model):
            short, y = dj.flax.cast((model, x), jnp.bfloat16)
            hidden = short.hidden(y.reshape(y.shape[0], -1))
            assert hidden.dtype == short.out(hidden).dtype == jnp.bfloat16
            return short.norm(hidden.astype(jnp.float32)).mean()

        grads = nnx.grad(loss_fn)(model)
        assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
        optimizer.update(model, dj.get_replica_context().all_reduce("mean", grads))

    pair.run(step, args=(model, optimizer, x))
    assert {v.dtype for v in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype("float32")}
    assert not np.array_equal(mean, model.norm.mean[...])  # the model's own statistics moved


def scaled_step(model, optimizer, scale, x):
    loss_fn = lambda model: scale.scaled(model(x).mean())
    _, grads = dj.flax.value_and_grad(loss_fn)(model)
    return scale.apply_gradients(optimizer, model, grads)


def build():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    return model, optimizer, dj.flax.LossScale(1024.0, interval=2)


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_all_replicas_skip_when_one_overflows(name):
    strategy = STRATEGIES[name]()
    state = model, optimizer, scale = build()
    good, bad = np.ones((2, 2), np.float32), np.array([[1, 1], [np.inf, 1]], np.float32)
    outcomes = []
    for batch in strategy.distribute_dataset([good, bad, good, good]):
        before = values((model, optimizer))
        outcomes.append(bool(strategy.run(scaled_step, args=(*state, batch))))
        same = [
            np.array_equal(a, b) for a, b in zip(before, values((model, optimizer)), strict=True)
        ]
        assert all(same) is not outcomes[-1]
    assert outcomes == [True, False, True, True]
    assert float(scale.scale[...]) == 1024  # halved once, doubled after two good steps
    assert int(optimizer.step[...]) == 3


def test_a_scaled_step_is_the_unscaled_one():
    strategy = STRATEGIES["mirrored2"]()
    scaled, plain = build(), build()
    x = np.ones((4, 2), np.float32)
    (batch,) = strategy.distribute_dataset([x])
    strategy.run(scaled_step, args=(*scaled, batch))
    grads = nnx.grad(lambda model: model(x).mean())(plain[0])
    plain[1].update(plain[0], grads)
    np.testing.assert_allclose(scaled[0].kernel[...], plain[0].kernel[...], rtol=1e-6)
