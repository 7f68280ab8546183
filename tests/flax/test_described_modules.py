"""`strategy.describe()` counts what Flax NNX objects hold, where it was placed."""

import jax
import optax
from flax import nnx

import distjax as dj


def make_model_and_optimizer():
    rngs = nnx.Rngs(params=0, dropout=1)
    layers = nnx.Linear(8, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
    model = nnx.Sequential(*layers)
    return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def described(strategy):
    return {v.name: v for v in strategy.describe().variables}


def test_split_parameters_and_moments_have_an_eighth_on_each_device():
    strategy = dj.ShardedStrategy(partition="parameters", min_split_bytes=0)
    with strategy.scope():
        objects = dj.flax.create(make_model_and_optimizer)
    found = described(strategy)
    kernel = found["Sequential.layers.0.kernel"]
    assert (kernel.placement, kernel.bytes_per_device) == ("partitioned on axis 0", 8 * 16 * 4 // 8)
    assert kernel.trainable and kernel.shape == (8, 16)
    moment = next(v for name, v in found.items() if name.endswith("trace.layers.0.kernel"))
    assert moment.bytes_per_device == kernel.bytes_per_device and not moment.trainable
    mean = found["Sequential.layers.1.mean"]
    assert (mean.placement, mean.aggregation, mean.bytes_per_device) == ("mirrored", "MEAN", 16 * 4)
    assert any("dropout" in name.lower() or "layers.2" in name for name in found), "PRNG state"
    assert "Sequential.layers.0.kernel" in str(strategy.describe())
    del objects


def test_each_variable_is_counted_once_and_only_while_it_lives():
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        model = dj.flax.place(nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0)))
        whole = nnx.Sequential(model, nnx.relu)
        dj.flax.place(whole)
    assert strategy.describe().bytes_per_device == 2 * 2 * 4
    assert list(described(strategy)) == ["Sequential.layers.0.kernel"]
    del model, whole
    assert not described(strategy)


def test_a_value_for_each_replica_is_stacked():
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    dj.flax.set_rule(norm, "per_replica", nnx.BatchStat)
    replica = lambda x: norm(x + dj.get_replica_context().replica_id_in_sync_group)
    strategy.run(replica, args=(jax.numpy.ones((2, 3)),))
    mean = described(strategy)["BatchNorm.mean"]
    assert (mean.placement, mean.synchronization, mean.shape) == ("per replica", "ON_READ", (3,))
    assert mean.bytes_per_device == 3 * 4
