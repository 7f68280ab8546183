"""A variable that an earlier trace of a function only read is written by a later one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import distjax as dj

MEAN = dj.VariableAggregation.MEAN


def make_strategies():
    yield "default", dj.get_strategy()
    yield "one_device", dj.OneDeviceStrategy()
    yield "mirrored", dj.MirroredStrategy(jax.devices()[:2])
    yield "virtual", dj.VirtualStrategy(2)
    yield (
        "sharded",
        dj.ShardedStrategy(jax.devices()[:2], partition="parameters", min_split_bytes=0),
    )
    yield "central", dj.CentralStorageStrategy(jax.devices()[:2])


STRATEGIES = dict(make_strategies())


@pytest.fixture(params=STRATEGIES, ids=str)
def owner(request):
    return STRATEGIES[request.param]


def make_variable(owner, value=0.0):
    with owner.scope():
        return dj.Variable(jnp.full(2, value), name="w", aggregation=MEAN)


def test_evaluate_then_train(owner):
    w = make_variable(owner)

    def step(x, mode):
        y = w.value * x
        if mode == "train":
            w.assign_add(jnp.full(2, 1.0))
        return y

    owner.run(step, args=(2.0, "evaluate"))
    owner.run(step, args=(2.0, "train"))
    owner.run(step, args=(2.0, "evaluate"))
    owner.run(step, args=(2.0, "train"))
    assert w.value.tolist() == [2.0, 2.0]


def test_in_dj_jit(owner):
    w = make_variable(owner)

    @dj.jit
    def step(x, mode):
        y = w.value * x
        if mode == "train":
            owner.run(lambda: w.assign_add(jnp.full(2, 1.0)))
        return y

    step(2.0, "evaluate")
    step(2.0, "train")
    assert w.value.tolist() == [1.0, 1.0]


def test_a_static_flag_that_resets(owner):
    w = make_variable(owner, 3.0)

    def step(reset):
        if reset:
            w.assign(jnp.zeros(2))
        return w.value

    compiled = dj.jit(step, static_argnames="reset")
    compiled(reset=False)
    assert compiled(reset=True).tolist() == [0.0, 0.0]
    assert w.value.tolist() == [0.0, 0.0]


def test_a_write_that_depends_on_the_shape(owner):
    w = make_variable(owner)

    def step(x):
        if x.shape[0] == 2:
            w.assign_add(x)
        return w.value * 1

    for size in (1, 2, 1, 2):
        owner.run(step, args=(jnp.ones(size),))
    assert w.value.tolist() == [2.0, 2.0]


def test_a_merge_that_writes_later(owner):
    w = make_variable(owner)

    def step(mode):
        def add(_):
            w.assign_add(jnp.full(2, 1.0))

        if mode == "train":
            dj.get_replica_context().merge_call(add)
        return w.value * 1

    owner.run(step, args=("evaluate",))
    owner.run(step, args=("train",))
    assert w.value.tolist() == [1.0, 1.0]


def test_batch_statistics_after_an_evaluation(owner):
    with owner.scope():
        layer = dj.layers.BatchNormalization(3)
    x = jnp.arange(12.0).reshape(4, 3)

    def step(x, mode):
        return layer(x, training=mode == "train")

    owner.run(step, args=(x, "evaluate"))
    owner.run(step, args=(x, "train"))
    assert float(jnp.abs(layer.moving_mean.value).sum()) > 0
