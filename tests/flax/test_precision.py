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
    "sharded": lambda: dj.ShardedStrategy(
        jax.devices()[:2], partition="parameters", min_split_bytes=0
    ),
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


X_ONES = jnp.ones(2)


class Weight(nnx.Module):
    def __init__(self, dtype):
        self.w = nnx.Param(jnp.ones(4, dtype))


@pytest.mark.pairwise
@pytest.mark.parametrize("tx", [optax.sgd(1.0), optax.adam(0.1)], ids=["sgd", "adam"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", list(STRATEGIES))
def test_law_a_finite_scaled_step_is_the_step_in_float32(name, dtype, tx):
    """Also where the scale, or the gradient without it, is out of the range of the dtype."""
    small = 2.0**-22  # below float16 with the scale taken off in float16
    strategy, factors = STRATEGIES[name](), jnp.array([small, 2 * small, 1.0, 0.5]) * 2.0**-4

    def step(model, optimizer, loss_scale):
        loss = lambda m: loss_scale.scaled(jnp.sum(m.w[...].astype(jnp.float32) * factors))
        return loss_scale.apply_gradients(optimizer, model, nnx.grad(loss)(model))

    for scale in (2.0**10, 2.0**16, 2.0**18):  # state: one program for all
        with strategy.scope():
            model = dj.flax.create(lambda: Weight(dtype))
        optimizer, loss_scale = nnx.Optimizer(model, tx, wrt=nnx.Param), dj.flax.LossScale(scale)
        reference = jnp.ones(4, dtype)
        slots = tx.init(reference)
        for _ in range(3):
            assert bool(strategy.run(step, args=(model, optimizer, loss_scale)))
            updates, slots = tx.update(factors, slots, reference)
            reference = optax.apply_updates(reference, updates)
        assert model.w[...].dtype == dtype
        found, expected = (np.asarray(x, np.float32) for x in (model.w[...], reference))
        np.testing.assert_allclose(found, expected, rtol=1e-3, err_msg=f"scale {scale}")


@pytest.mark.parametrize(("start", "end"), [(2.0**125, 2.0**127), (2.0**-124, 2.0**-126)])
def test_the_scale_stays_finite_and_comes_back(start, end):
    model = Weight(jnp.bfloat16)
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    strategy, grows = dj.VirtualStrategy(2), end > start
    scale = dj.flax.LossScale(start, interval=1)

    def step(model, optimizer, scale, is_finite):
        grads = jax.tree.map(lambda w: jnp.where(is_finite, 0 * w, jnp.inf), nnx.state(model))
        return scale.apply_gradients(optimizer, model, grads)

    run = lambda is_finite: bool(strategy.run(step, args=(model, optimizer, scale, is_finite)))
    assert [run(grows) for _ in range(5)] == [grows] * 5
    assert float(scale.scale[...]) == end
    assert run(not grows) is not grows
    assert float(scale.scale[...]) == (end / 2 if grows else end * 2)


def test_a_cast_of_variables_is_that_of_their_values(pair, how):
    with pair.scope():
        tree = {"w": dj.Variable(jnp.full(2, 1.5)), "n": dj.Variable(jnp.arange(2)), "x": X_ONES}

    def compute():
        short = dj.flax.cast(tree, jnp.bfloat16)
        assert short["w"].dtype == short["x"].dtype == jnp.bfloat16
        assert short["n"].dtype == jnp.int32
        return short["w"] + short["x"]

    np.testing.assert_array_equal(how(lambda: pair.run(compute))(), [2.5, 2.5])
    assert tree["w"].dtype == jnp.float32


@pytest.mark.parametrize(
    "options", [(0.0,), (-1.0,), (np.inf,), (np.nan,), (1e-45,), (2.0**15, 0)], ids=str
)
def test_a_scale_that_cannot_scale_is_refused(options):
    with pytest.raises(ValueError, match="LossScale needs a positive, finite scale") as error:
        dj.flax.LossScale(*options)
    assert f"scale={options[0]}" in str(error.value)
