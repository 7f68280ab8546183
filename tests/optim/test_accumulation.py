"""Gradients of k steps: one update, one communication."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distjax as dj
from distjax.testing.hlo import count_collectives
from tests.checkpoint.storages import STORAGES
from tests.optim.regression import assert_close, make_data, plain, train
from tests.replicas import ids, local


def test_equals_optax_multi_steps(strategy, how):
    inner = optax.adam(0.05)
    multi = optax.MultiSteps(inner, 3).gradient_transformation()
    variables, _ = train(strategy, inner, 7, how, accumulate_steps=3)
    assert_close(variables, plain(multi, 7))


def test_variables_change_every_third_call_only(pair, how):
    seen = []
    with pair.scope():
        w = dj.Variable(10.0, name="w")
    optimizer = dj.optim.Optimizer(optax.sgd(1.0), accumulate_steps=3)
    optimizer.init([w])
    assert [v.name for v in optimizer.accumulators] == ["w/accumulator", "accumulated_steps"]
    accumulator, counter = optimizer.accumulators

    def replica_step(i):
        optimizer.apply_gradients([(i + 1, w)])

    step = how(lambda i: pair.run(replica_step, args=(i,)))
    for _ in range(4):
        step(ids(pair))
        seen.append((float(w.value), int(counter.value), local(pair, accumulator)))
    assert seen == [
        (10.0, 1, [1.0, 2.0]),
        (10.0, 2, [2.0, 4.0]),
        (7.0, 0, [0.0, 0.0]),  # the sum over replicas of each one's mean: 1 + 2
        (7.0, 1, [1.0, 2.0]),
    ]


def test_in_cross_replica_context(strategy, how):
    with strategy.scope():
        w = dj.Variable(0.0, name="w")
    optimizer = dj.optim.Optimizer(optax.sgd(1.0), accumulate_steps=2)
    optimizer.init([w])
    step = how(lambda g: optimizer.apply_gradients([(g, w)]))
    count = strategy.num_replicas_in_sync
    for _ in range(2):
        step(strategy.run(lambda i: i + 1, args=(ids(strategy),)))
    assert float(w.value) == -count * (count + 1) / 2


def test_a_mirrored_gradient_counts_as_equal_ones(pair, how):
    """Proving more changes no value: M is R equal gradients, accumulated too."""
    with pair.scope():
        w = dj.Variable(0.0, name="w")
    optimizer = dj.optim.Optimizer(optax.sgd(1.0), accumulate_steps=2)
    optimizer.init([w])
    step = how(lambda: pair.run(lambda: optimizer.apply_gradients([(jnp.float32(3), w)])))
    step()
    step()
    assert float(w.value) == -6.0


def entry_computation(hlo):
    return hlo[hlo.index("\nENTRY") :]


def test_no_collective_outside_of_the_branch(mirrored):
    with mirrored.scope():
        w = dj.Variable(np.zeros(5, np.float32), name="w")
        b = dj.Variable(0.0, name="b")
    optimizer = dj.optim.Optimizer(optax.adam(0.1), accumulate_steps=4)
    optimizer.init([w, b])

    def replica_step(i):
        optimizer.apply_gradients([(i * jnp.ones(5), w), (i, b)])

    lowered = dj.jit(lambda i: mirrored.run(replica_step, args=(i,))).lower(ids(mirrored))
    assert lowered.as_text().count('"stablehlo.all_reduce"') == 2
    hlo = lowered.compile().as_text()
    assert "conditional(" in entry_computation(hlo)
    assert count_collectives(hlo)["all-reduce"].num_ops >= 1
    assert count_collectives(entry_computation(hlo)) == {}


def test_data_of_each_step_counts(strategy):
    """Three batches of different data, one update: the gradient of all of them."""
    variables, _ = train(strategy, optax.sgd(0.1), 3, dj.jit, accumulate_steps=3)
    whole = [np.concatenate(parts) for parts in zip(*(make_data(i) for i in range(3)), strict=True)]
    assert_close(variables, plain(optax.sgd(0.1), 1, data=lambda i: whole))


@pytest.mark.parametrize("name", ["mirrored2", "virtual4", "zero1", "zero3", "central"])
@pytest.mark.parametrize(
    ("dtype", "gradients", "mean"),
    [
        (jnp.float16, [4e4, 4e4], 4e4),  # their sum is beyond float16
        (jnp.bfloat16, [256, 1, 1, 2], 65),  # 256 + 1 is 256 in bfloat16
        (jnp.complex64, [1 + 2j, 3], 2 + 1j),
    ],
    ids=["float16", "bfloat16", "complex64"],
)
def test_narrow_floats_are_summed_in_float32(name, dtype, gradients, mean):
    strategy = STORAGES[name]()
    with strategy.scope():
        w = dj.Variable(jnp.zeros(8, dtype), name="w")
    optimizer = dj.optim.Optimizer(optax.sgd(1.0), "mean", accumulate_steps=len(gradients))
    optimizer.init([w])
    assert optimizer.accumulators[0].dtype == jnp.promote_types(dtype, jnp.float32)
    step = dj.jit(lambda g: strategy.run(lambda g: optimizer.apply_gradients([(g, w)]), args=(g,)))
    for gradient in gradients:
        step(jnp.full(8, gradient, dtype))
    np.testing.assert_array_equal(w.value, jnp.full(8, -mean, dtype))


@pytest.mark.parametrize("gradient", [jnp.float16(2), jnp.bfloat16(2), jnp.float32(2), 2])
def test_the_transformation_sees_the_dtype_of_the_gradient(pair, gradient):
    """As without accumulation; the mean of integers is a float."""
    seen = []

    def update(updates, state, params=None):
        seen.append(updates[0].dtype)
        return updates, state

    with pair.scope():
        w = dj.Variable(jnp.zeros((), jnp.bfloat16), name="w")
    tx = optax.GradientTransformation(optax.init_empty_state, update)
    optimizer = dj.optim.Optimizer(tx, accumulate_steps=2)
    optimizer.init([w])
    pair.run(lambda: optimizer.apply_gradients([(gradient, w)]))
    assert set(seen) == {jnp.dtype("float32") if isinstance(gradient, int) else gradient.dtype}


@pytest.mark.parametrize("count", [0, -1, 1.5, True, None])
def test_a_count_that_is_no_positive_int(count):
    with pytest.raises(ValueError, match="^Optimizer: accumulate_steps needs an int of 1 or more"):
        dj.optim.Optimizer(optax.sgd(1.0), accumulate_steps=count)
