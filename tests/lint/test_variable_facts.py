"""Facts of what variables take: right programs that look like wrong ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from tests.wrong_programs.program import (
    BATCH,
    FIRST,
    MEAN,
    ON_READ,
    SUM,
    ctx,
    errors_of,
    gradient,
    inputs,
    loss_of,
    mean,
    require_silence,
    require_silence_at,
    total,
    weights,
)


def variable(s, aggregation, value=None, **options):
    value = weights() if value is None else value
    with s.scope():
        return dj.Variable(value, name="v", aggregation=aggregation, **options)


def _descent(s, aggregation, gradient):
    w = variable(s, aggregation)
    return lambda x: w.assign_sub(0.1 * gradient(w.value, x))


def gradient_of_the_sum(w, x):
    return jax.grad(lambda w: jnp.sum(errors_of(w, x)))(w)


def gradient_of_the_share(w, x):
    return jax.grad(lambda w: dj.losses.average_loss(errors_of(w, x)))(w)


# -- one value of R equal ones -------------------------------------------------


def mean_of_gradients(s, rule):
    return _descent(s, rule, lambda w, x: mean(gradient(w, x)))


def sum_over_the_global_batch(s, rule):
    count = BATCH * s.num_replicas_in_sync
    return _descent(s, rule, lambda w, x: total(gradient_of_the_sum(w, x)) / count)


def sum_over_a_summed_count(s, rule):
    def reduced(w, x):
        grads, count = total((gradient_of_the_sum(w, x), x.shape[0]))
        return grads / count

    return _descent(s, rule, reduced)


def sum_of_shares(s, rule):
    return _descent(s, rule, lambda w, x: total(gradient_of_the_share(w, x)))


def sum_over_the_replicas(s, rule):
    return _descent(s, rule, lambda w, x: total(gradient(w, x)) / ctx().num_replicas_in_sync)


def rate_over_the_replicas(s, rule):
    w = variable(s, rule)
    return lambda x: w.assign_sub((0.1 / s.num_replicas_in_sync) * total(gradient(w.value, x)))


def rate_in_a_variable(s, rule):
    """A rate that is divided by R where it is set."""
    w, rate = variable(s, rule), variable(s, rule, np.float32(0.1), trainable=False)

    def step(x):
        rate.assign(jnp.float32(0.1) / ctx().num_replicas_in_sync)
        w.assign_sub(rate.value * mean(gradient(w.value, x)))
        rate.assign(rate.value * 0.99)

    return step


def loss_scaled_by_the_replicas(s, rule):
    count = float(s.num_replicas_in_sync)
    loss = lambda w, x: count * loss_of(w, x)
    return _descent(s, rule, lambda w, x: mean(jax.grad(loss)(w, x)) / count)


def momentum_of_shares(s, rule):
    w, moment = variable(s, rule), variable(s, rule, np.zeros(3, np.float32), trainable=False)

    def step(x):
        moment.assign(0.9 * moment.value + total(gradient_of_the_share(w.value, x)))
        w.assign_sub(0.1 * moment.value)

    return step


def descent_in_a_loop(s, rule):
    w = variable(s, rule)

    def step(x):
        def descend(i, last):
            w.assign_sub(0.1 * mean(gradient(w.value, x)))
            return mean(loss_of(w.value, x))

        return dj.lax.fori_loop(0, 3, descend, 0.0)

    return step


def counters(s, rule):
    steps, rows = variable(s, rule, 0.0, trainable=False), variable(s, rule, 0.0, trainable=False)

    def step(x):
        steps.assign_add(1.0)
        steps.assign_add(jnp.float32(1))
        rows.assign_add(total(x.shape[0]))
        return mean(loss_of(weights(), x))

    return step


def sums_over_examples_and_their_count(s, rule):
    losses, rows = variable(s, rule, 0.0), variable(s, rule, 0.0)

    def step(x):
        losses.assign_add(total(jnp.sum(errors_of(weights(), x))))
        rows.assign_add(total(jnp.float32(BATCH)))
        return losses.value / rows.value

    return step


def _sums_of_means(s, rule, count):
    """Running sums of local means, of numbers and of arrays."""
    losses, features = variable(s, rule, 0.0), variable(s, rule)

    def step(x):
        losses.assign_add(total(loss_of(weights(), x)))
        features.assign_add(total(jnp.mean(x, axis=0)))
        count(x)

    return step


def sums_of_means_and_how_many(s, rule):
    batches = variable(s, rule, 0.0)
    return _sums_of_means(s, rule, lambda x: batches.assign_add(total(1.0)))


def sums_of_means_and_the_number_of_replicas(s, rule):
    batches = variable(s, rule, 0.0)
    number = s.num_replicas_in_sync
    return _sums_of_means(s, rule, lambda x: batches.assign(batches.value + number))


def sums_of_means_and_a_count_that_sums(s, rule):
    batches = variable(s, SUM, 0.0)
    return _sums_of_means(s, rule, lambda x: batches.assign_add(jnp.float32(1)))


def sums_of_means_and_a_count_of_each_replica(s, rule):
    batches = variable(s, SUM, 0.0, synchronization=ON_READ)
    return _sums_of_means(s, rule, lambda x: batches.assign_add(1.0))


def sum_kept_until_it_is_divided(s, rule):
    loss = variable(s, rule, 0.0)

    def step(x):
        loss.assign(total(loss_of(weights(), x)))
        return loss.value / ctx().num_replicas_in_sync

    return step


def moments_of_all_examples(s, rule):
    moving = variable(s, rule, trainable=False)
    count = BATCH * s.num_replicas_in_sync

    def step(x):
        moving.assign(0.9 * moving.value + 0.1 * total(jnp.sum(x, axis=0)) / count)
        moving.assign_sub(0.1 * (moving.value - mean(jnp.mean(x, axis=0))))

    return step


def skipped_where_not_finite(s, rule):
    w = variable(s, rule)

    def step(x):
        grads = mean(gradient(w.value, x))
        w.assign(jnp.where(jnp.all(jnp.isfinite(grads)), w.value - 0.1 * grads, w.value))

    return step


OF_EQUAL_VALUES = [
    mean_of_gradients,
    sum_over_the_global_batch,
    sum_over_a_summed_count,
    sum_of_shares,
    sum_over_the_replicas,
    rate_over_the_replicas,
    rate_in_a_variable,
    loss_scaled_by_the_replicas,
    momentum_of_shares,
    descent_in_a_loop,
    counters,
    sums_over_examples_and_their_count,
    sums_of_means_and_how_many,
    sums_of_means_and_the_number_of_replicas,
    sums_of_means_and_a_count_that_sums,
    sums_of_means_and_a_count_of_each_replica,
    sum_kept_until_it_is_divided,
    moments_of_all_examples,
    skipped_where_not_finite,
]


@pytest.mark.parametrize("rule", (MEAN, FIRST), ids=("mean", "first"))
@pytest.mark.parametrize("build", OF_EQUAL_VALUES, ids=lambda f: f.__name__)
def test_what_a_variable_takes_of_equal_values(build, rule):
    require_silence_at((2, 3, 4), lambda s: (build(s, rule), inputs(s)))


def test_a_mean_of_a_sum_on_one_replica_and_zeros():
    s = dj.VirtualStrategy(4)

    def reduced(w, x):
        grads = total(gradient(w, x))
        return jnp.where(ctx().replica_id_in_sync_group == 0, grads, jnp.zeros_like(grads))

    require_silence(s, _descent(s, MEAN, reduced), inputs(s))
