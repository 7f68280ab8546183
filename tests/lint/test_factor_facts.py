"""Facts of factors: right programs in which a number is R by chance, or is a part of the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, nn

import distjax as dj
from distjax.errors import ReductionWarning
from tests.wrong_programs.batches import summed_gradient
from tests.wrong_programs.program import (
    BATCH,
    ctx,
    errors_of,
    gradient,
    inputs,
    mean,
    require_silence_at,
    total,
    weights,
)


def _step(reduced):
    return lambda w, x: w - 0.1 * reduced(w, x)


def rate_of_one_over_the_replicas(s):
    """0.5 on two replicas, 0.25 on four."""
    rate = 1 / s.num_replicas_in_sync
    return lambda w, x: (
        w - rate * total(jax.grad(lambda w: dj.losses.average_loss(errors_of(w, x)))(w))
    )


def half_of_squares(s):
    """The half of a mean of squares, which on two replicas is a share as well."""
    return _step(lambda w, x: mean(jax.grad(lambda w: jnp.sum(errors_of(w, x)) / (2 * BATCH))(w)))


def weight_of_as_many_as_replicas(s):
    weight = float(s.num_replicas_in_sync)
    loss = lambda w, x: weight * dj.losses.average_loss(errors_of(w, x), x[:, 0] > 0)
    return _step(lambda w, x: total(jax.grad(loss)(w, x)))


def mean_over_tasks(s):
    """Of each task the sum over the examples that have it, by their count."""

    def loss(w, x, count):
        return jnp.mean(jnp.sum((x > 0) * (x * w - 1) ** 2, axis=0) / jnp.maximum(count, 1))

    return _step(lambda w, x: total(jax.grad(loss)(w, x, total(jnp.sum(x > 0, axis=0)))))


def mean_of_stacked_shares(s):
    def loss(w, x):
        errors = (x * w - 1) ** 2
        return jnp.mean(
            jnp.stack([dj.losses.average_loss(errors[:, task], x[:, 0] > 0) for task in range(3)])
        )

    return _step(lambda w, x: total(jax.grad(loss)(w, x)))


def mean_over_time_of_shares(s):
    def loss(w, x):
        def cell(state, now):
            state = jnp.tanh(state + now * w[0])
            return state, jnp.sum((now > 0) * (state - 1) ** 2) / total(jnp.sum(now > 0))

        return jnp.mean(lax.scan(cell, jnp.zeros(BATCH), x.T)[1])

    return _step(lambda w, x: total(jax.grad(loss)(w, x)))


def mean_over_draws_of_sums(s):
    draws = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    loss = lambda w, x: jnp.mean(jax.vmap(lambda e: jnp.sum(errors_of(w + e, x)))(draws))
    return _step(lambda w, x: total(jax.grad(loss)(w, x)))


def mean_over_the_variance_of_all(s):
    def loss(w, x):
        count = BATCH * s.num_replicas_in_sync
        center = total(jnp.sum(x[:, 0])) / count
        variance = total(jnp.sum((x[:, 0] - center) ** 2)) / count
        return jnp.mean(errors_of(w, x)) / variance

    return _step(lambda w, x: mean(jax.grad(loss)(w, x)))


def _loss_of_all(w, x):
    sum_, count = total((jnp.sum((x[:, 0] > 0) * errors_of(w, x)), jnp.sum(x[:, 0] > 0)))
    return sum_ / jnp.maximum(count, 1)


def mean_of_gradients_of_one_loss(s):
    """The derivative of a sum over the replicas is one: R times each replica's share."""
    return _step(lambda w, x: mean(jax.grad(_loss_of_all)(w, x)))


def sum_of_gradients_of_one_loss_over_the_replicas(s):
    return _step(lambda w, x: total(jax.grad(_loss_of_all)(w, x)) / s.num_replicas_in_sync)


def temperature_of_as_many_as_examples(s):
    loss = lambda w, x: jnp.sum((x[:, 0] > 0) * nn.softplus(-(x @ w) / 4.0))
    return _step(lambda w, x: total(jax.grad(loss)(w, x)) / total(jnp.sum(x[:, 0] > 0)))


def entropy_of_a_mean_over_members(s):
    def measure(w, x):
        members = jnp.stack([w * scale for scale in (0.5, 1.0, 2.0)])
        p = jnp.mean(jax.vmap(lambda w: nn.softmax(x * w))(members), axis=0)
        return mean(jnp.mean(-jnp.sum(p * jnp.log(p), axis=1)))

    return measure


def running_sums_of_means_and_their_count(s):
    def step(w, x):
        sums = {"loss": w[0], "batches": w[1]}
        return sums["loss"] + total(jnp.mean(errors_of(w, x))), sums["batches"] + total(1)

    return step


def running_sums_of_rows_and_their_count(s):
    """Of arrays; beside them the number of examples, or of batches."""

    def step(w, x):
        sums = {"features": w, "examples": w[0], "batches": w[1]}
        features = sums["features"] + total(jnp.mean(x, axis=0))
        examples = sums["examples"] + BATCH * ctx().num_replicas_in_sync
        return features, examples, sums["batches"] + total(1)

    return step


def sum_divided_by_rows_and_replicas(s):
    return _step(lambda w, x: total(summed_gradient(w, x) / ctx().num_replicas_in_sync) / len(x))


RIGHT = [
    rate_of_one_over_the_replicas,
    half_of_squares,
    weight_of_as_many_as_replicas,
    mean_over_tasks,
    mean_of_stacked_shares,
    mean_over_time_of_shares,
    mean_over_draws_of_sums,
    mean_over_the_variance_of_all,
    mean_of_gradients_of_one_loss,
    sum_of_gradients_of_one_loss_over_the_replicas,
    temperature_of_as_many_as_examples,
    entropy_of_a_mean_over_members,
    running_sums_of_means_and_their_count,
    running_sums_of_rows_and_their_count,
    sum_divided_by_rows_and_replicas,
]


@pytest.mark.parametrize("build", RIGHT, ids=lambda f: f.__name__)
def test_a_right_factor_is_silent(build):
    require_silence_at((2, 3, 4), lambda s: (build(s), weights(), inputs(s)))


def test_a_count_does_not_excuse_a_sum_of_gradients():
    s = dj.VirtualStrategy(4)

    def step(w, seen, x):
        return w - 0.1 * total(gradient(w, x)), seen + BATCH * 4

    with pytest.warns(ReductionWarning, match="its sum, which updates equal state"):
        s.run(step, args=(weights(), np.int32(0), inputs(s)))
