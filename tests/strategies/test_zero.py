"""ZeRO-3 on eight replicas: what each device holds between steps, and what a step sends."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import distjax as dj
from tests.drill_mark import all_drills_but

R = 8
RNG = np.random.default_rng(0)
SPLIT = {"w1": (16, 32), "b1": (32,), "w2": (32, 8)}  # an axis of each is a multiple of 8
SMALL = {"b2": (3,), "scale": ()}
START = {k: RNG.normal(size=s).astype(np.float32) * 0.3 for k, s in {**SPLIT, **SMALL}.items()}
X = RNG.normal(size=(R, 4, 16)).astype(np.float32)


def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    out = hidden @ params["w2"]
    return jnp.mean(out**2) * jnp.exp(params["scale"]) + jnp.sum((params["b2"] - 1) ** 2)


class Training:
    """A strategy's parameters, optimizer and compiled step."""

    def __init__(self, strategy, tx, **options):
        with strategy.scope():
            self.params = {k: dj.Variable(v, name=k) for k, v in START.items()}
        self.optimizer = dj.optim.Optimizer(tx, "mean", **options)
        self.optimizer.init(self.params)
        self.batch = strategy.distribute_values_from_function(
            lambda ctx: X[ctx.replica_id_in_sync_group]
        )

        def replica_step(x):
            params = {k: v.value for k, v in self.params.items()}
            value, grads = jax.value_and_grad(loss_fn)(params, x)
            self.optimizer.apply_gradients([(grads, self.params)])
            return dj.get_replica_context().all_reduce("mean", value)

        self.step = dj.jit(lambda x: strategy.run(replica_step, args=(x,)))

    def lowered(self):
        return self.step.lower(self.batch)


def sharded(partition="parameters"):
    return dj.ShardedStrategy(jax.devices()[:R], partition=partition, min_split_bytes=0)


OPTIMIZERS = {
    "clipped adam": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.05)),
    "clipped momentum": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9)),
}


@pytest.mark.parametrize("accumulate", [1, 2], ids=["each_step", "accumulated"])
@pytest.mark.parametrize("name", all_drills_but(["clipped momentum"], OPTIMIZERS))
def test_training_equals_mirrored(name, accumulate):
    def trained(strategy):
        training = Training(strategy, OPTIMIZERS[name], accumulate_steps=accumulate)
        losses = [float(training.step(training.batch)) for _ in range(4)]
        return losses, {k: v.value for k, v in training.params.items()}

    losses, params = trained(dj.MirroredStrategy(jax.devices()[:R]))
    assert losses[-1] < losses[0]
    for partition in (
        ("parameters",) if accumulate == 2 else ("optimizer", "gradients", "parameters")
    ):
        got_losses, got = trained(sharded(partition))
        np.testing.assert_allclose(got_losses, losses, rtol=1e-5)
        for key, value in params.items():
            np.testing.assert_allclose(got[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


def bytes_per_device(avals, shardings):
    """Returns the bytes of the arrays on one device."""
    return sum(
        4 * int(np.prod(sharding.shard_shape(aval.shape), dtype=int))
        for aval, sharding in zip(avals, jax.tree.leaves(shardings), strict=True)
    )


@pytest.mark.parametrize("accumulate", [1, 2], ids=["each_step", "accumulated"])
def test_each_device_holds_an_eighth_between_steps(accumulate):
    """Parameters, Adam's two moments and kept gradients: what the compiled step takes and gives.

    The small ones are counted as if they were whole on each device.
    """
    training = Training(sharded(), optax.adam(0.05), accumulate_steps=accumulate)
    lowered = training.lowered()
    compiled = lowered.compile()
    copies = 3 if accumulate == 1 else 4
    split = copies * sum(START[k].nbytes for k in SPLIT) // R
    small = copies * sum(START[k].nbytes for k in SMALL) + 8  # and two counters
    scalars = 8  # the loss, and what awaits the program

    taken = jax.tree.leaves(lowered.in_avals)
    held = bytes_per_device(taken, compiled.input_shardings)
    assert held <= split + small + X[0].nbytes
    given = bytes_per_device(jax.tree.leaves(lowered.out_info), compiled.output_shardings)
    assert split <= given <= split + small + scalars
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes <= split + small + X[0].nbytes + 64
    assert memory.alias_size_in_bytes >= split  # donated: a step adds no second copy
    for v in jax.tree.leaves((training.params, training.optimizer.state)):
        if isinstance(v, dj.Variable) and v.size in {START[k].size for k in SPLIT}:
            assert v.storage.addressable_shards[0].data.nbytes == 4 * v.size // R


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_gather_per_parameter_and_one_scatter_per_gradient(name):
    """In the lowered text, before XLA combines or adds collectives."""
    text = Training(sharded(), OPTIMIZERS[name]).lowered().as_text()
    assert text.count('"stablehlo.all_gather"') == len(SPLIT) + 1  # b2, padded from 3 to 8
    assert text.count('"stablehlo.reduce_scatter"') == len(SPLIT)  # b2's gradient is equal on all
    assert text.count('"stablehlo.all_reduce"') <= 2  # the gradient of the scale, and the loss


def test_a_checkpoint_gathers_again():
    """Once where the forward pass reads it, once where `jax.checkpoint` does so again."""
    strategy = sharded()
    with strategy.scope():
        w = dj.Variable(START["w1"])

    def step(x):
        layer = jax.checkpoint(lambda x: jnp.tanh(x @ w.value).sum())
        return lax.pmean(jax.value_and_grad(layer)(x), "replica")

    batch = strategy.distribute_values_from_function(lambda ctx: X[ctx.replica_id_in_sync_group])
    text = dj.jit(lambda x: strategy.run(step, args=(x,))).lower(batch).as_text()
    assert text.count('"stablehlo.all_gather"') == 2


def test_zero_2_gradients_arrive_split():
    strategy = sharded("gradients")
    with strategy.scope():
        w = dj.Variable(START["w1"])
    g = strategy.distribute_values_from_function(lambda ctx: START["w1"])
    reduced = strategy.extended.reduce_to("sum", g, w)
    assert reduced.addressable_shards[0].data.shape == (2, 32)
    np.testing.assert_allclose(reduced, R * START["w1"], rtol=1e-6)
    step = dj.jit(lambda g: strategy.extended.reduce_to("sum", g, w))
    text = step.lower(g).as_text()
    assert text.count('"stablehlo.reduce_scatter"') == 1
    assert text.count('"stablehlo.all_reduce"') == 0


@pytest.mark.parametrize("partition", ["optimizer", "gradients"])
def test_updates_are_added_to_shards(partition):
    """Each replica adds its shard of the update, and gathers the new parameter."""
    training = Training(sharded(partition), optax.adam(0.05))
    text = training.lowered().compile().as_text()
    assert "f32[16,32]" in text
    assert re.search(r"f32\[2,32\]\S* (add|subtract)\(", text)
    assert not re.search(r"f32\[16,32\]\S* (add|subtract)\(", text)
