"""`dj.flax.apply_gradients` with an `update` of the user's own class, and with a deprecated one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distjax as dj
from distjax.errors import UnsupportedError

STRATEGIES = {
    "one_device": dj.OneDeviceStrategy,
    "virtual1": lambda: dj.VirtualStrategy(1),
    "virtual4": lambda: dj.VirtualStrategy(4),
    "mirrored4": lambda: dj.MirroredStrategy(jax.devices()[:4]),
}


class Counting(nnx.Optimizer):
    """Counts its updates, and keeps the mean of the gradients it has seen."""

    def __init__(self, model, tx, **options):
        super().__init__(model, tx, **options)
        self.count = nnx.Variable(jnp.int32(0))
        self.seen = nnx.Variable(jnp.float32(0))

    def update(self, model, grads):
        super().update(model, grads)
        self.count[...] += 1
        self.seen[...] = grads["kernel"][...].sum()


def make_model():
    return nnx.Linear(3, 1, rngs=nnx.Rngs(0))


def loss_of(model, x):
    return jnp.mean(model(x) ** 2)


@pytest.fixture(params=sorted(STRATEGIES))
def made(request):
    return STRATEGIES[request.param]()


X = np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)


def run_step(strategy, step, *args):
    (x,) = strategy.distribute_dataset([X])
    strategy.run(step, args=(*args, x))


def expected_kernel():
    model = make_model()
    grads = nnx.grad(loss_of)(model, X)
    nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param).update(model, grads)
    return model.kernel[...], grads["kernel"][...].sum()


def test_an_update_of_the_users_own_is_called(made):
    model = make_model()
    optimizer = Counting(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(model, optimizer, x):
        dj.flax.apply_gradients(optimizer, model, nnx.grad(loss_of)(model, x))

    run_step(made, step, model, optimizer)
    kernel, seen = expected_kernel()
    assert int(optimizer.count[...]) == 1 and int(optimizer.step[...]) == 1
    np.testing.assert_allclose(model.kernel[...], kernel, rtol=1e-5)
    np.testing.assert_allclose(optimizer.seen[...], seen, rtol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_optimizer_that_holds_its_model(made):
    optimizer = nnx.ModelAndOptimizer(make_model(), optax.sgd(0.1))

    def step(optimizer, x):
        model = optimizer.model
        dj.flax.apply_gradients(optimizer, model, nnx.grad(loss_of)(model, x))

    run_step(made, step, optimizer)
    np.testing.assert_allclose(optimizer.model.kernel[...], expected_kernel()[0], rtol=1e-5)


@pytest.mark.parametrize("partition", ["optimizer", "parameters"])
def test_an_update_of_the_users_own_is_refused_where_something_is_split(partition):
    strategy = dj.ShardedStrategy(jax.devices()[:3], partition=partition, min_split_bytes=0)
    with strategy.scope():
        model = dj.flax.create(make_model)
    optimizer = Counting(model, optax.adam(0.1), wrt=nnx.Param)
    before = np.asarray(model.kernel[...])

    def step(model, optimizer):
        _, grads = dj.flax.value_and_grad(loss_of)(model, X)
        dj.flax.apply_gradients(optimizer, model, grads)

    with pytest.raises(
        UnsupportedError, match="^apply_gradients needs the update of nnx.Optimizer"
    ):
        strategy.run(step, args=(model, optimizer))
    np.testing.assert_array_equal(model.kernel[...], before)
    assert int(optimizer.count[...]) == int(optimizer.step[...]) == 0
