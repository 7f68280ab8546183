"""Modules under ZeRO where R divides no axis: arrays keep their shape, in as many parts as fit."""

import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distjax as dj

X = np.random.default_rng(0).normal(size=(24, 12)).astype(np.float32)
CLIPPED_ADAM = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.01))


class Model(nnx.Module):
    """12 and 20 have 4 in common with 8 replicas, 7 and 5 nothing."""

    def __init__(self, rngs):
        self.layers = nnx.vmap(lambda rngs: nnx.Linear(12, 12, rngs=rngs))(rngs.split(6))
        self.wide, self.odd = nnx.Linear(12, 20, rngs=rngs), nnx.Linear(20, 7, rngs=rngs)
        self.last = nnx.Linear(7, 5, rngs=rngs)

    def __call__(self, x):
        x = dj.flax.scan_layers(lambda layer, x: jnp.tanh(layer(x)), self.layers, x)
        return self.last(jnp.tanh(self.odd(jnp.tanh(self.wide(x)))))


def sharded(count=8, partition="parameters", **options):
    return dj.ShardedStrategy(
        jax.devices()[:count], partition=partition, min_split_bytes=0, **options
    )


def build(strategy):
    with strategy.scope():
        model = dj.flax.create(lambda: Model(nnx.Rngs(0)))
        return model, dj.flax.place(nnx.Optimizer(model, CLIPPED_ADAM, wrt=nnx.Param))


def step(model, optimizer, x):
    loss, grads = dj.flax.value_and_grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
    dj.flax.apply_gradients(optimizer, model, grads)
    return dj.get_replica_context().all_reduce("mean", loss)


def train(strategy, state, num_steps=3):
    (x,) = strategy.distribute_dataset([X])
    return [float(strategy.run(step, (*state, x))) for _ in range(num_steps)]


@pytest.fixture(scope="module")
def losses():
    """Those of one device."""
    one = dj.VirtualStrategy(1)
    return train(one, build(one), 4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"partition": "gradients", "count": 3}, marks=pytest.mark.drill),
        pytest.param({"partition": "optimizer"}, marks=pytest.mark.drill),
        {"model_axes": {"model": 2}},
    ],
    ids=["zero3", "zero2 of 3", "zero1", "zero3, 4 x 2"],
)
def test_training_equals_one_device(options, losses):
    strategy = sharded(**options)
    np.testing.assert_allclose(train(strategy, build(strategy)), losses[:3], rtol=1e-5)


def test_where_arrays_live():
    strategy = sharded()
    model, optimizer = build(strategy)
    kernel = model.wide.kernel[...]
    assert kernel.shape == (12, 20)
    assert {s.data.shape for s in kernel.addressable_shards} == {(3, 20)}
    np.testing.assert_array_equal(kernel, Model(nnx.Rngs(0)).wide.kernel[...])
    placements = {v.name: v.placement for v in strategy.describe().variables}
    assert placements["Model.wide.kernel"] == "partitioned on axis 0 in 4 parts"
    assert placements["Model.layers.kernel"] == "partitioned on axis 1 in 4 parts"
    whole = "mirrored (no axis has a divisor in common with 8 replicas)"
    assert placements["Model.last.kernel"] == whole
    before = dj.locality(kernel)
    train(strategy, (model, optimizer), 1)
    assert dj.locality(model.wide.kernel[...]) == before, "it stays where it is"


@pytest.mark.parametrize("before", [{}, {"model": 2}], ids=["8", "4 x 2"])
@pytest.mark.parametrize("after", [sharded, dj.MirroredStrategy], ids=["zero3", "mirrored"])
def test_what_the_replicas_split_is_not_warned_of(before, after):
    """6 numbers are in 2 parts, on 8 replicas and on 4; a strategy moves what another has split."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", dj.errors.LocalityWarning)
        with sharded(model_axes=before).scope():
            model = dj.flax.create(lambda: nnx.Linear(16, 6, rngs=nnx.Rngs(0)))
        assert {s.data.shape for s in model.bias[...].addressable_shards} == {(3,)}
        with after(model_axes={"model": 4}).scope():
            dj.flax.place(model)
    parts = {s.data.shape for s in model.bias[...].addressable_shards}
    assert parts == ({(3,)} if after is sharded else {(6,)})


@pytest.mark.parametrize("sizes", [(6, 12, 16), (16, 12, 6), (12, 6, 3), (9, 6, 4)])
@pytest.mark.parametrize("count", [8, 6])
def test_numbers_of_parts_that_differ_in_a_program(sizes, count):
    """Of 8 replicas 2 and 4 parts, of 6 also 3: each array stays in its own."""

    class Several(nnx.Module):
        def __init__(self):
            self.parts = nnx.List([nnx.Param(jnp.ones((n, 5))) for n in sizes])

    strategy = sharded(count)
    with strategy.scope():
        model = dj.flax.create(Several)

    def double(model):
        for part in model.parts:
            part[...] *= 2

    rows = lambda: [p[...].addressable_shards[0].data.shape[0] for p in model.parts]
    assert rows() == [n // math.gcd(n, count) for n in sizes]
    strategy.run(double, args=(model,))
    strategy.run(double, args=(model,))
    assert rows() == [n // math.gcd(n, count) for n in sizes]
    for part, n in zip(model.parts, sizes, strict=True):
        np.testing.assert_array_equal(part[...], 4 * np.ones((n, 5)))


def test_checkpoints_go_from_any_r_to_any_other(tmp_path, losses):
    eight, three, whole = sharded(), sharded(3), dj.MirroredStrategy(jax.devices()[:2])
    state = build(eight)
    train(eight, state, 2)
    with dj.checkpoint.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        for strategy in (three, whole):
            again = build(strategy)
            checkpointer.restore(again)
            np.testing.assert_allclose(train(strategy, again, 2), losses[2:], rtol=1e-5)
