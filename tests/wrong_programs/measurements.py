"""Losses and metrics over the wrong examples, and means of what does not average."""

import jax
import jax.numpy as jnp
import optax

import distjax as dj
from tests.wrong_programs.program import (
    ERROR,
    FIRST,
    ON_READ,
    RUN,
    SILENT,
    WARNING,
    Case,
    ctx,
    errors_of,
    first_argument,
    inputs,
    loss_of,
    masks,
    mean,
    program,
    total,
    weights,
)

COUNTS, CURVED = "averaged over local counts", "a function of local means averaged"
VARIANCE, ALONE = "local variances averaged", "one replica's part alone"
COUNTED, PADDED = "a total counted by every replica", "padded examples counted"
EQUAL_COUNTS = "where all counts are equal it is right"
MAY = "a mean of local values may be meant"


def _measure(s, measure, *more):
    return Case(measure, (weights(), inputs(s), *more))


@program(WARNING, COUNTS, EQUAL_COUNTS)
def loss_over_the_local_count(s, right):
    def loss(w, x, mask):
        if right:
            return dj.losses.average_loss(errors_of(w, x), mask, op="mean")
        return jnp.sum(errors_of(w, x) * mask) / jnp.sum(mask)

    step = lambda w, x, mask: w - 0.1 * mean(jax.grad(loss)(w, x, mask))
    return Case(step, (weights(), inputs(s), masks(s)), first_argument)


@program(WARNING, COUNTS, EQUAL_COUNTS)
def metric_over_the_local_count(s, right):
    def step(w, x, mask):
        hits, count = jnp.sum((x @ w > 0) & mask), jnp.sum(mask)
        return total(hits) / total(count) if right else mean(hits / count)

    return _measure(s, step, masks(s))


def _padded(s):
    return dj.Batch(inputs(s), masks(s))


@program(WARNING, PADDED, "a step may need the data alone")
def mask_never_read(s, right):
    def step(w, batch):
        mask = batch.mask if right else None
        loss = lambda w: dj.losses.average_loss(errors_of(w, batch.data), mask)
        return w - 0.1 * total(jax.grad(loss)(w))

    return Case(step, (weights(), _padded(s)), first_argument)


@program(WARNING, PADDED, "a step may need the data alone")
def metric_of_padded_examples(s, right):
    with s.scope():
        metric = dj.metrics.Mean("loss")

    def step(w, batch):
        metric.update(errors_of(w, batch.data), mask=batch.mask if right else None)

    return Case(step, (weights(), _padded(s)))


@program(WARNING, COUNTED, "a total of totals may be meant")
def metric_of_a_reduced_value(s, right):
    with s.scope():
        metric = dj.metrics.Sum("loss")

    def step(w, x):
        loss = jnp.sum(errors_of(w, x))
        metric.update(loss if right else total(loss))

    return _measure(s, step)


@program(SILENT, "", RUN)
def variances_averaged(s, right):
    def step(w, x):
        if not right:
            return mean(jnp.var(x, axis=0))
        first, second = mean((jnp.mean(x, axis=0), jnp.mean(x**2, axis=0)))
        return second - first**2

    return _measure(s, step)


@program(SILENT, "", RUN, unseen="it depends on the number of the replica, which the step asks for")
def evaluation_on_replica_0(s, right):
    def step(w, x):
        loss = loss_of(w, x)
        is_first = ctx().replica_id_in_sync_group == 0
        return mean(loss) if right else total(jnp.where(is_first, loss, 0.0))

    return _measure(s, step)


@program(SILENT, "", RUN)
def perplexities_averaged(s, right):
    return _measure(
        s, lambda w, x: jnp.exp(mean(loss_of(w, x))) if right else mean(jnp.exp(loss_of(w, x)))
    )


@program(WARNING, COUNTED, "a total of totals may be meant")
def gathered_loss_summed_in_a_metric(s, right):
    with s.scope():
        metric = dj.metrics.Sum("loss")

    def step(w, x):
        losses = errors_of(w, x)
        metric.update(losses if right else ctx().all_gather(losses, axis=0))

    return _measure(s, step)


def _reported(s, right, read):
    def feed(result, args):
        read(s.reduce("mean", result) if right else result)
        return args

    return Case(lambda w, x: loss_of(w, x), (weights(), inputs(s)), feed)


@program(ERROR, "needs one value, not one value per replica", outside=True)
def number_of_a_value_per_replica(s, right):
    return _reported(s, right, float)


@program(ERROR, "needs one value, not one value per replica", outside=True)
def truth_of_a_value_per_replica(s, right):
    return _reported(s, right, bool)


# -- more ----------------------------------------------------------------------


@program(SILENT, "", RUN, more=True)
def root_mean_squares_averaged(s, right):
    return _measure(
        s, lambda w, x: jnp.sqrt(mean(loss_of(w, x))) if right else mean(jnp.sqrt(loss_of(w, x)))
    )


@program(SILENT, "", RUN, more=True)
def signal_to_noise_ratios_averaged(s, right):
    def psnr(w, x):
        loss = loss_of(w, x)
        return -10 * jnp.log10(loss) if not right else loss

    step = lambda w, x: -10 * jnp.log10(mean(psnr(w, x))) if right else mean(psnr(w, x))
    return _measure(s, step)


@program(SILENT, "", RUN, more=True)
def standard_deviations_averaged(s, right):
    def step(w, x):
        if not right:
            return mean(jnp.std(x))
        first, second = mean((jnp.mean(x), jnp.mean(x**2)))
        return jnp.sqrt(second - first**2)

    return _measure(s, step)


@program(SILENT, "", RUN, more=True)
def variances_by_squares_averaged(s, right):
    def step(w, x):
        first, second = jnp.mean(x, axis=0), jnp.mean(x**2, axis=0)
        first, second = mean((first, second)) if right else (first, second)
        variance = second - first**2
        return variance if right else mean(variance)

    return _measure(s, step)


@program(WARNING, COUNTS, EQUAL_COUNTS, more=True)
def f_measures_averaged(s, right):
    def step(w, x, mask):
        guess = x @ w > 0
        hits, either = jnp.sum(guess & mask), jnp.sum(guess) + jnp.sum(mask)
        if right:
            return 2 * total(hits) / total(either)
        return mean(2 * hits / either)

    return _measure(s, step, masks(s))


@program(WARNING, COUNTS, EQUAL_COUNTS, more=True)
def weighted_average_over_local_weights(s, right):
    def step(w, x, mask):
        weight = jnp.abs(x[:, 0]) * mask
        sum_of = lambda v: jnp.sum(v * weight)
        loss = errors_of(w, x)
        if right:
            return total(sum_of(loss)) / total(jnp.sum(weight))
        return mean(sum_of(loss) / jnp.sum(weight))

    return _measure(s, step, masks(s))


@program(WARNING, COUNTS, EQUAL_COUNTS, more=True)
def tokens_over_the_local_count(s, right):
    def loss(w, x, mask):
        losses = optax.softmax_cross_entropy_with_integer_labels(x * w, jnp.zeros(x.shape[0], int))
        kept = jnp.sum(jnp.where(mask, losses, 0.0))
        if right:
            return kept / total(jnp.sum(mask))
        return kept / jnp.maximum(jnp.sum(mask), 1)

    def step(w, x, mask):
        grads = jax.grad(loss)(w, x, mask)
        return w - 0.1 * (total(grads) if right else mean(grads))

    return Case(step, (weights(), inputs(s), masks(s)), first_argument)


@program(SILENT, "", RUN, more=True)
def metric_of_the_first_replica(s, right):
    how = dj.VariableAggregation.SUM if right else FIRST
    with s.scope():
        losses = dj.Variable(0.0, name="losses", synchronization=ON_READ, aggregation=how)

    def step(w, x):
        losses.assign_add(jnp.sum(errors_of(w, x)))

    return _measure(s, step)


@program(WARNING, COUNTED, "a total of totals may be meant", more=True)
def total_added_to_a_component(s, right):
    with s.scope():
        hits = dj.Variable(
            0.0, name="hits", synchronization=ON_READ, aggregation=dj.VariableAggregation.SUM
        )

    def step(w, x):
        found = jnp.sum(x @ w > 0).astype(jnp.float32)
        hits.assign_add(found if right else total(found))

    return _measure(s, step)


@program(WARNING, "a share averaged", "a small loss may be meant", more=True)
def reported_share_averaged(s, right):
    def step(w, x):
        share = dj.losses.average_loss(errors_of(w, x))
        return total(share) if right else mean(share)

    return _measure(s, step)


@program(SILENT, "", "a sum of means may be divided by R outside of the step", more=True)
def reported_sum_of_means(s, right):
    return _measure(s, lambda w, x: (mean if right else total)(loss_of(w, x)))


@program(SILENT, "", "an order that all replicas share leaves nothing in the trace", more=True)
def best_loss_for_mean_loss(s, right):
    step = lambda w, x: mean(loss_of(w, x)) if right else jax.lax.pmin(loss_of(w, x), "replica")
    return _measure(s, step)
