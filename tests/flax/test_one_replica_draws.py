"""Random streams of NNX on one replica: the numbers of plain NNX, and no false alarm."""

import jax
import numpy as np
import pytest
from flax import nnx

import distjax as dj

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
STRATEGIES = {
    "one_device": dj.OneDeviceStrategy,
    "virtual1": lambda: dj.VirtualStrategy(1),
    "mirrored1": lambda: dj.MirroredStrategy(jax.devices()[:1]),
}


class Net(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x, rngs):
        return self.dropout(self.linear(x), rngs=rngs)


def loss_of(model, rngs, x):
    return (model(x, rngs) ** 2).mean()


def step(model, rngs, x):
    return dj.get_replica_context().all_reduce("mean", loss_of(model, rngs, x))


@pytest.mark.parametrize("name", sorted(STRATEGIES))
@pytest.mark.filterwarnings("error")
def test_dropout(name):
    strategy = STRATEGIES[name]()
    model, rngs = Net(), nnx.Rngs(1)
    (x,) = strategy.distribute_dataset([X])
    losses = [strategy.run(step, args=(model, rngs, x)) for _ in range(2)]
    plain, plain_rngs = Net(), nnx.Rngs(1)
    expected = [nnx.jit(loss_of)(plain, plain_rngs, X) for _ in range(2)]
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert dj.check(step, model, rngs, x, strategy=strategy) is None
