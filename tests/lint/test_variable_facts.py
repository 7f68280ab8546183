"""Facts of what variables take: right programs that look like wrong ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import ReductionWarning
from tests.diagnostics.lines import line_of
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


@pytest.mark.parametrize("num_replicas", (2, 3, 4))
@pytest.mark.parametrize("rule", (MEAN, FIRST), ids=("mean", "first"))
@pytest.mark.parametrize("build", OF_EQUAL_VALUES, ids=lambda f: f.__name__)
def test_what_a_variable_takes_of_equal_values(build, rule, num_replicas):
    s = dj.VirtualStrategy(num_replicas)
    require_silence(s, build(s, rule), inputs(s))


def test_a_mean_of_a_sum_on_one_replica_and_zeros():
    s = dj.VirtualStrategy(4)

    def reduced(w, x):
        grads = total(gradient(w, x))
        return jnp.where(ctx().replica_id_in_sync_group == 0, grads, jnp.zeros_like(grads))

    require_silence(s, _descent(s, MEAN, reduced), inputs(s))


# -- sums ----------------------------------------------------------------------


def _written(s, value, old=None):
    """A variable that sums, and takes `value` of its own value and of the batch."""
    v = variable(s, SUM, old)
    return lambda x: v.assign(value(v.value, x))


def share_of_the_old_value(s):
    return _written(s, lambda v, x: v / s.num_replicas_in_sync - 0.1 * gradient_of_the_share(v, x))


def share_of_the_new_value(s):
    return _written(s, lambda v, x: (v - 0.1 * gradient(v, x)) / s.num_replicas_in_sync)


def share_by_a_factor(s):
    part = 1 / s.num_replicas_in_sync
    return _written(s, lambda v, x: part * (v - 0.1 * gradient(v, x)))


def share_by_a_computed_factor(s):
    def value(v, x):
        return v * (1 / total(jnp.ones_like(v))) + gradient_of_the_share(v, x)

    return _written(s, value)


def old_value_of_one_replica(s):
    def value(v, x):
        old = jnp.where(ctx().replica_id_in_sync_group == 0, v, 0.0)
        return old - 0.1 * gradient_of_the_share(v, x)

    return _written(s, value)


def old_value_times_an_indicator(s):
    def value(v, x):
        is_first = (ctx().replica_id_in_sync_group == 0).astype(v.dtype)
        return v * is_first - 0.1 * gradient_of_the_share(v, x)

    return _written(s, value)


def new_value_of_one_replica(s):
    def value(v, x):
        new = v - 0.1 * mean(gradient(v, x))
        return jnp.where(ctx().replica_id_in_sync_group == 0, new, jnp.zeros_like(new))

    return _written(s, value)


def old_value_subtracted(s):
    """What is left of a budget, which each replica writes anew."""
    return _written(s, lambda v, x: jnp.sum(x, axis=0) - v / s.num_replicas_in_sync)


def difference_from_the_old_value(s):
    def value(v, x):
        new = jnp.sum(x, axis=0)
        return v + (new - v)

    return _written(s, value)


def decay_until_a_share_is_left(s):
    count = s.num_replicas_in_sync
    return _written(s, lambda v, x: v - (1 - 1 / count) * v + jnp.sum(x, axis=0))


def fresh_value(s):
    return _written(s, lambda v, x: jnp.sum(x, axis=0))


def value_of_another_variable(s):
    v, w = variable(s, SUM, np.zeros(3, np.float32)), variable(s, MEAN)

    def step(x):
        v.assign((w.value - 0.1 * gradient(w.value, x)) / ctx().num_replicas_in_sync)
        w.assign(v.value)

    return step


def part_added(s):
    v = variable(s, SUM)
    return lambda x: v.assign_add(jnp.sum(x, axis=0))


def decay_added(s):
    v = variable(s, SUM)
    count = s.num_replicas_in_sync
    return lambda x: v.assign_sub(0.1 * v.value / count + gradient_of_the_share(v.value, x))


def component_of_each_replica(s):
    v = variable(s, SUM, synchronization=ON_READ)
    return lambda x: v.assign(v.value + jnp.sum(x, axis=0))


def written_in_a_branch(s):
    v = variable(s, SUM)

    def step(x):
        old, count = v.value, ctx().num_replicas_in_sync
        part = lambda: old / count - 0.1 * gradient_of_the_share(old, x)
        v.assign(dj.lax.cond(jnp.all(old > -1e6), part, lambda: old / count))

    return step


IN_SUMS = [
    share_of_the_old_value,
    share_of_the_new_value,
    share_by_a_factor,
    share_by_a_computed_factor,
    old_value_of_one_replica,
    old_value_times_an_indicator,
    new_value_of_one_replica,
    old_value_subtracted,
    difference_from_the_old_value,
    decay_until_a_share_is_left,
    fresh_value,
    value_of_another_variable,
    part_added,
    decay_added,
    component_of_each_replica,
    written_in_a_branch,
]


@pytest.mark.parametrize("num_replicas", (2, 3, 4))
@pytest.mark.parametrize("build", IN_SUMS, ids=lambda f: f.__name__)
def test_what_a_variable_that_sums_takes(build, num_replicas):
    s = dj.VirtualStrategy(num_replicas)
    require_silence(s, build(s), inputs(s))


def test_one_replica_is_looked_at_as_one_of_several():
    s = dj.VirtualStrategy(1)
    with pytest.warns(dj.errors.ReductionWarning, match="needs each replica's own part"):
        s.run(_written(s, lambda v, x: v + jnp.sum(x, axis=0)), args=(inputs(s),))


def test_the_text_of_an_old_value_that_is_summed():
    s = dj.VirtualStrategy(4)
    seen = variable(s, SUM, 0.0)

    def step(x):
        seen.assign(seen.value + jnp.sum(x > 0))  # the old value

    with pytest.warns(ReductionWarning) as caught:
        s.run(step, args=(inputs(s),))
    [warning] = caught
    line = line_of(__file__, "the old value")
    assert str(warning.message).replace(step.__qualname__, "step") == (
        "variable 'v', which sums over the replicas, needs each replica's own part.\n"
        f"  Got: its old value, in what every replica writes, at {line} (step).\n"
        "  Why: the sum over the replicas holds the old value R times.\n"
        "  Fix: v.assign_add(part), where parts are added up; or "
        "aggregation=dj.VariableAggregation.MEAN, where a new value is computed"
    )
