"""Variables and optimizers whose reduction is not the one that the value needs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import distjax as dj
from tests.wrong_programs.program import (
    ERROR,
    FIRST,
    MEAN,
    ON_READ,
    ON_WRITE,
    RUN,
    SILENT,
    SUM,
    WARNING,
    Case,
    ctx,
    errors_of,
    gradient,
    inputs,
    loss_of,
    mean,
    program,
    total,
    weights,
)

MEANS, TWICE, SHARE = "a sum of local means", "summed twice", "a share averaged"
SUMMED_LOSS = "the gradient of a sum averaged"
APART = "each replica trains on its own"
LEGAL_SUM = "a larger rate may be meant"


def variable(s, aggregation, synchronization=ON_WRITE, value=None, **options):
    with s.scope():
        return dj.Variable(
            weights() if value is None else value,
            name="w",
            aggregation=aggregation,
            synchronization=synchronization,
            **options,
        )


def _written(s, w, amount):
    return Case(lambda x: w.assign_sub(0.1 * amount(w.value, x)), (inputs(s),))


@program(WARNING, TWICE, LEGAL_SUM)
def mean_into_a_variable_that_sums(s, right):
    w = variable(s, MEAN if right else SUM)
    return _written(s, w, lambda w, x: mean(gradient(w, x)))


def _optimized(s, op, grads):
    w = variable(s, dj.VariableAggregation.NONE)
    optimizer = dj.optim.Optimizer(optax.sgd(0.1), op)
    optimizer.init([w])
    return Case(lambda x: optimizer.apply_gradients([(grads(w.value, x), w)]), (inputs(s),))


@program(WARNING, TWICE, LEGAL_SUM)
def mean_into_an_optimizer_that_sums(s, right):
    share = lambda w, x: gradient(w, x) / s.num_replicas_in_sync
    return _optimized(s, "sum", share if right else lambda w, x: mean(gradient(w, x)))


@program(WARNING, MEANS, LEGAL_SUM)
def local_mean_and_the_optimizers_default(s, right):
    return _optimized(s, "mean" if right else "sum", gradient)


@program(
    WARNING,
    APART,
    "local training is legal",
)
def parameters_of_each_replica(s, right):
    w = variable(s, MEAN, ON_WRITE if right else ON_READ, trainable=True)
    return _written(s, w, gradient)


@program(SILENT, "", RUN)
def gradients_of_other_replicas_dropped(s, right):
    return _written(s, variable(s, MEAN if right else FIRST), gradient)


@program(
    SILENT,
    "",
    "an average of moving variances is what tf.distribute computes: batch norm without "
    "synchronization has it in every published network",
)
def moments_left_in_a_mean(s, right):
    variance = variable(s, MEAN)

    def step(x):
        first, second = jnp.mean(x, axis=0), jnp.mean(x**2, axis=0)
        if right:
            first, second = mean((first, second))
        variance.assign(0.9 * variance.value + 0.1 * (second - first**2))

    return Case(step, (inputs(s),))


@program(
    WARNING,
    "replica 0's initial value wins",
    "a value made of a batch may be meant",
    outside=True,
)
def initial_value_of_each_replica(s, right):
    made = []

    def step(key, x):
        key = key if right else ctx().fold_in(key)
        if not made:
            made.append(dj.Variable(jax.random.normal(key, (3,)), name="w", aggregation=MEAN))
        return mean(loss_of(made[0].value, x))

    return Case(step, (jax.random.key(0), inputs(s)))


@program(SILENT, "", RUN)
def equal_array_into_a_variable_that_sums(s, right):
    steps = variable(s, FIRST if right else SUM, value=0.0, trainable=False)
    return Case(lambda x: steps.assign_add(jnp.float32(1)), (inputs(s),))


# -- more ----------------------------------------------------------------------


@program(WARNING, MEANS, LEGAL_SUM, more=True)
def local_mean_into_a_variable_that_sums(s, right):
    return _written(s, variable(s, MEAN if right else SUM), gradient)


@program(WARNING, MEANS, LEGAL_SUM, more=True)
def sum_of_means_taken_from_a_variable_that_averages(s, right):
    reduce = mean if right else total
    return _written(s, variable(s, MEAN), lambda w, x: reduce(gradient(w, x)))


@program(WARNING, MEANS, LEGAL_SUM, more=True)
def sum_of_means_taken_from_a_variable_of_the_first_replica(s, right):
    reduce = mean if right else total
    return _written(s, variable(s, FIRST), lambda w, x: reduce(gradient(w, x)))


@program(WARNING, MEANS, LEGAL_SUM, more=True)
def sum_of_means_taken_from_a_variable_in_a_loop(s, right):
    w, reduce = variable(s, MEAN), mean if right else total

    def step(x):
        def descend(i, loss):
            w.assign_sub(0.1 * reduce(gradient(w.value, x)))
            return mean(loss_of(w.value, x))

        return dj.lax.fori_loop(0, 3, descend, 0.0)

    return Case(step, (inputs(s),))


@program(WARNING, TWICE, LEGAL_SUM, more=True)
def sum_of_a_mean_in_a_variable_that_averages(s, right):
    reduce = mean if right else lambda grads: total(mean(grads))
    return _written(s, variable(s, MEAN), lambda w, x: reduce(gradient(w, x)))


def _updated(s, w, amount):
    return Case(lambda x: w.assign(w.value - 0.1 * amount(w.value, x)), (inputs(s),))


@program(WARNING, MEANS, LEGAL_SUM, more=True)
def old_value_and_a_gradient_in_a_variable_that_sums(s, right):
    return _updated(s, variable(s, MEAN if right else SUM), gradient)


@program(SILENT, "", RUN, more=True)
def old_total_and_each_replicas_part_in_a_variable_that_sums(s, right):
    seen = variable(s, SUM, value=1.0, trainable=False)

    def step(x):
        found = jnp.sum(x[:, 0] > 0).astype(jnp.float32)
        seen.assign_add(found) if right else seen.assign(seen.value + found)

    return Case(step, (inputs(s),))


def _gradient_of_all(op):
    loss = lambda w, x: ctx().all_reduce(op, loss_of(w, x))
    return lambda w, x: jax.grad(loss)(w, x)


@program(WARNING, SUMMED_LOSS, LEGAL_SUM, more=True)
def summed_mean_and_an_optimizer(s, right):
    return _optimized(s, "mean", _gradient_of_all("mean" if right else "sum"))


@program(WARNING, SUMMED_LOSS, LEGAL_SUM, more=True)
def summed_mean_and_a_variable_that_averages(s, right):
    return _written(s, variable(s, MEAN), _gradient_of_all("mean" if right else "sum"))


@program(WARNING, SUMMED_LOSS, LEGAL_SUM, more=True)
def summed_mean_and_a_new_value_that_is_averaged(s, right):
    return _updated(s, variable(s, MEAN), _gradient_of_all("mean" if right else "sum"))


@program(WARNING, MEANS, LEGAL_SUM, more=True)
def averaged_loss_and_the_optimizers_default(s, right):
    return _optimized(s, "mean" if right else "sum", _gradient_of_all("mean"))


@program(WARNING, SHARE, "a small rate may be meant", more=True)
def share_into_an_optimizer_that_averages(s, right):
    share = lambda w, x: jax.grad(lambda w: dj.losses.average_loss(errors_of(w, x)))(w)
    return _optimized(s, "sum" if right else "mean", share)


@program(WARNING, MEANS, LEGAL_SUM, more=True)
def mean_loss_into_an_optimizer_that_sums(s, right):
    op = "mean" if right else "sum"
    grads = lambda w, x: jax.grad(lambda w: dj.losses.average_loss(errors_of(w, x), op="mean"))(w)
    return _optimized(s, op, grads)


@program(WARNING, "clipped before the reduction", "replicas may clip on purpose", more=True)
def clipped_into_an_optimizer(s, right):
    clip = lambda g: g if right else jnp.clip(g, -0.1, 0.1)
    return _optimized(s, "mean", lambda w, x: clip(gradient(w, x)))


@program(WARNING, TWICE, LEGAL_SUM, more=True)
def total_into_an_optimizer_that_sums(s, right):
    reduced = lambda w, x: jax.grad(lambda w: dj.losses.average_loss(errors_of(w, x)))(w)
    return _optimized(s, "sum", lambda w, x: reduced(w, x) if right else total(reduced(w, x)))


@program(ERROR, "needs an array", more=True)
def number_into_a_variable_that_sums(s, right):
    count = variable(s, SUM, value=0.0, trainable=False)
    return Case(lambda x: count.assign_add(jnp.float32(x.shape[0]) if right else 4.0), (inputs(s),))


@program(ERROR, "needs each variable once|needs 2 gradients|needs a gradient", more=True)
def gradient_of_one_variable_missing(s, right):
    w, b = variable(s, MEAN), variable(s, MEAN)
    optimizer = dj.optim.Optimizer(optax.sgd(0.1), "mean")
    optimizer.init([w, b])

    def step(x):
        grads = gradient(w.value, x)
        optimizer.apply_gradients([(grads, w), (grads, b)] if right else [(grads, w)])

    return Case(step, (inputs(s),))


@program(
    SILENT,
    "",
    "an integer counter that differs may be meant",
    more=True,
    unseen="each replica's own number of its rows may be meant",
)
def counter_of_each_replica(s, right):
    def step(count, x):
        found = jnp.sum(x > 0)
        return count + (total(found) if right else found)

    feed = lambda out, args: (out, args[1])
    return Case(step, (np.int32(0), inputs(s)), feed)
