"""A batch that was not distributed is told in a plain run; steps without one are silent."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import ReductionWarning

PAIR = dj.MirroredStrategy(jax.devices()[:2])
ONE = dj.OneDeviceStrategy()
RULE = "a reduction of gradients needs data that differ"
ctx = dj.get_replica_context


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


def sgd(w, x):
    return w - 0.1 * ctx().all_reduce("mean", jax.grad(loss)(w, x))


def batch():
    return np.arange(12.0, dtype=np.float32).reshape(4, 3)


def of_arguments(s, x):
    s.run(sgd, args=(jnp.ones(3), x))


def of_a_variable(s, x):
    with s.scope():
        v = dj.Variable(jnp.ones(3), aggregation=dj.VariableAggregation.MEAN)
    s.run(lambda x: v.assign_sub(jax.grad(loss)(v.value, x)), args=(x,))


def of_an_optimizer(s, x):
    optax = pytest.importorskip("optax")
    with s.scope():
        v = dj.Variable(jnp.ones(3))
    optimizer = dj.optim.Optimizer(optax.adam(0.1), reduce_op="mean")
    optimizer.init([v])

    def step(x):
        optimizer.apply_gradients([(jax.grad(loss)(v.value, x), v)])

    s.run(step, args=(x,))


def of_optax(s, x):
    optax = pytest.importorskip("optax")
    tx = optax.chain(dj.optim.reduce_gradients("mean"), optax.adam(0.1))

    def step(w, state, x):
        updates, state = tx.update(jax.grad(loss)(w, x), state, w)
        return optax.apply_updates(w, updates), state

    w = jnp.ones(3)
    s.run(step, args=(w, tx.init(w), x))


def of_modules(s, x):
    nnx, optax = pytest.importorskip("flax.nnx"), pytest.importorskip("optax")
    model = nnx.Sequential(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    metric = nnx.metrics.Average("loss")  # only the first replica has what it counted before

    def step(model, optimizer, metric, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        metric.update(loss=loss)
        optimizer.update(model, ctx().all_reduce("mean", grads))

    s.run(step, args=(model, optimizer, metric, x))


def in_a_loop(s, x):
    def step(w, x):
        return jax.lax.fori_loop(0, 2, lambda i, w: sgd(w, x), w)

    s.run(step, args=(jnp.ones(3), x))


STEPS = [of_arguments, of_a_variable, of_an_optimizer, of_optax, of_modules, in_a_loop]


@pytest.mark.parametrize("step", STEPS)
def test_a_whole_batch_warns_once(step):
    with pytest.warns(ReductionWarning, match=RULE) as caught:
        step(PAIR, batch())
    (warning,) = caught
    assert "every replica computes the same: R devices do the work of one" in str(warning.message)
    assert "strategy.distribute_dataset(batches)" in str(warning.message)


def silently(step, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(*args)


@pytest.mark.parametrize("step", STEPS)
def test_its_part_is_silent(step):
    (x,) = PAIR.distribute_dataset([batch()])
    silently(step, PAIR, x)


def test_one_replica_is_silent():
    silently(of_arguments, ONE, batch())


def test_it_can_be_meant():
    with dj.expect("a test on one batch"):
        silently(of_arguments, PAIR, batch())


def own_data(s):
    def step(w, key, table):
        rows = jax.random.randint(ctx().fold_in(key), (2,), 0, 4)
        return w - 0.1 * ctx().all_reduce("mean", jax.grad(loss)(w, table[rows]))

    s.run(step, args=(jnp.ones(3), jax.random.key(0), batch()))


def own_rows(s):
    def step(w, table):
        x = jax.lax.dynamic_slice_in_dim(table, 2 * ctx().replica_id_in_sync_group, 2)
        return w - 0.1 * ctx().all_reduce("mean", jax.grad(loss)(w, x))

    s.run(step, args=(jnp.ones(3), batch()))


def own_dropout(s):
    nnx, optax = pytest.importorskip("flax.nnx"), pytest.importorskip("optax")
    model = nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(model, optimizer, x):
        grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, ctx().all_reduce("mean", grads))

    s.run(step, args=(model, optimizer, batch()))


def own_rows_under_jit(s):
    (x,) = s.distribute_dataset([batch()])
    s.jit(lambda x, w: sgd(w, x))(x, jnp.ones(3))


def without_a_batch(s):
    s.run(lambda w: w - ctx().all_reduce("mean", jax.grad(jnp.sum)(w**2)), args=(jnp.ones(3),))


def a_rate(s):
    def step(w, rate):
        return w - rate * ctx().all_reduce("mean", jax.grad(lambda w: jnp.sum(w**2))(w))

    s.run(step, args=(jnp.ones(3), np.float32(0.1)))


def a_penalty(s):
    (x,) = s.distribute_dataset([batch()])

    def step(w, b, prior, x):
        grads = jax.grad(lambda p: loss(p[0], x) + jnp.sum((p[1] - prior.sum()) ** 2))((w, b))
        return jax.tree.map(lambda p, g: p - ctx().all_reduce("mean", g), (w, b), grads)

    s.run(step, args=(jnp.ones(3), jnp.ones(2), np.ones(5, np.float32), x))


def evaluation(s):
    s.run(lambda w, x: ctx().all_reduce("mean", loss(w, x)), args=(jnp.ones(3), batch()))


def a_counter(s):
    with s.scope():
        n = dj.Variable(0, aggregation=dj.VariableAggregation.ONLY_FIRST_REPLICA)
    s.run(lambda x: n.assign_add(1), args=(batch(),))


@pytest.mark.parametrize(
    "step",
    [
        own_data,
        own_rows,
        own_dropout,
        own_rows_under_jit,
        without_a_batch,
        a_rate,
        a_penalty,
        evaluation,
        a_counter,
    ],
)
def test_right_steps_are_silent(step):
    silently(step, PAIR)


def test_a_part_that_is_captured_is_refused():
    (x,) = PAIR.distribute_dataset([batch()])
    with pytest.raises(TypeError, match="The PerReplica is not an argument of .*lambda"):
        silently(lambda: PAIR.run(lambda w: sgd(w, x), args=(jnp.ones(3),)))
