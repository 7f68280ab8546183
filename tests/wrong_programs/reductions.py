"""Sums for means, reductions on top of reductions, clips and norms at the wrong place."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import distjax as dj
from tests.wrong_programs.program import (
    RUN,
    SILENT,
    WARNING,
    Case,
    ctx,
    errors_of,
    first_argument,
    gradient,
    inputs,
    loss_of,
    mean,
    program,
    total,
    weights,
)

MEANS, TWICE = "a sum of local means", "summed twice"
SHARE, CLIPPED, NORM = (
    "a share averaged",
    "clipped before the reduction",
    "the norm of local gradients",
)
SHARED_KEY = "the same random numbers on every replica"
SUMMED_LOSS = "the gradient of a sum averaged"
LEGAL_SUM = "a larger rate may be meant"


def _update(s, reduced):
    """One step of gradient descent, by what `reduced` makes of the batch."""
    return Case(lambda w, x: w - 0.1 * reduced(w, x), (weights(), inputs(s)), first_argument)


def _share(w, x, **options):
    return jax.grad(lambda w: dj.losses.average_loss(errors_of(w, x), **options))(w)


@program(WARNING, MEANS, LEGAL_SUM)
def sum_for_mean(s, right):
    return _update(s, lambda w, x: ctx().all_reduce("mean" if right else "sum", gradient(w, x)))


@program(WARNING, TWICE, LEGAL_SUM)
def sum_after_mean(s, right):
    return _update(s, lambda w, x: mean(gradient(w, x)) if right else total(mean(gradient(w, x))))


@program(SILENT, "", RUN, unseen="it changes no number")
def mean_after_mean(s, right):
    return _update(s, lambda w, x: mean(gradient(w, x)) if right else mean(mean(gradient(w, x))))


@program(WARNING, "the same batch on every replica", "training on one batch is a common test")
def one_batch_for_all(s, right):
    x = inputs(s)
    batch = x if right else np.asarray(s.local_results(x)[0])
    return Case(lambda w, x: w - 0.1 * mean(gradient(w, x)), (weights(), batch), first_argument)


@program(SILENT, "", RUN)
def rate_over_the_replicas_twice(s, right):
    def reduced(w, x):
        grads = mean(gradient(w, x))
        return grads if right else grads / ctx().num_replicas_in_sync

    return _update(s, reduced)


@program(WARNING, SHARED_KEY, "equal numbers may be meant")
def one_key_for_dropout(s, right):
    def step(w, key, x):
        key = ctx().fold_in(key) if right else key
        kept = jax.random.bernoulli(key, 0.9, x.shape)
        return w - 0.1 * mean(gradient(w, jnp.where(kept, x / 0.9, 0)))

    return Case(step, (weights(), jax.random.key(0), inputs(s)), first_argument)


@program(WARNING, CLIPPED, "replicas may clip on purpose")
def clip_before_the_mean(s, right):
    def clip(grads):
        return grads * jnp.minimum(1.0, 0.5 / jnp.sqrt(jnp.sum(grads**2)))

    return _update(
        s, lambda w, x: clip(mean(gradient(w, x))) if right else mean(clip(gradient(w, x)))
    )


@program(WARNING, CLIPPED, "replicas may clip on purpose")
def clip_before_the_reduction_in_a_chain(s, right):
    links = [dj.optim.reduce_gradients("mean"), optax.clip_by_global_norm(0.5)]
    tx = optax.chain(*(links if right else links[::-1]), optax.sgd(0.1))
    reduced = lambda w, x: -10 * tx.update(gradient(w, x), tx.init(w), w)[0]
    return _update(s, reduced)


@program(SILENT, "", RUN)
def norm_of_local_gradients(s, right):
    def step(w, x):
        grads = gradient(w, x)
        norm = optax.global_norm(mean(grads)) if right else mean(optax.global_norm(grads))
        return w - 0.1 * mean(grads), norm

    return Case(step, (weights(), inputs(s)), lambda out, args: (out[0], args[1]))


@program(
    SILENT,
    "",
    "it trains as one device would, and a reduction may be meant to overlap with what is next; "
    "dj.explain lists the reduction in the loop",
    unseen="it changes no number",
)
def accumulator_reduced_at_every_microbatch(s, right):
    def step(w, x):
        halves = x.reshape(2, -1, x.shape[-1])
        once = lambda grads: grads if right else mean(grads)
        add = lambda a, x: (a + once(gradient(w, x)), None)
        grads, _ = jax.lax.scan(add, jnp.zeros_like(w), halves)
        return w - 0.05 * (mean(grads) if right else grads)

    return Case(step, (weights(), inputs(s)), first_argument)


# -- more ----------------------------------------------------------------------


@program(
    WARNING,
    MEANS,
    LEGAL_SUM,
    more=True,
    unseen="Adam's first step is the same for any multiple of the gradient",
)
def sum_for_mean_in_adam(s, right):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))

    def step(w, x):
        grads = ctx().all_reduce("mean" if right else "sum", gradient(w, x))
        return optax.apply_updates(w, tx.update(grads, tx.init(w), w)[0])

    return Case(step, (weights(), inputs(s)), first_argument)


@program(WARNING, MEANS, LEGAL_SUM, more=True)
def sum_for_mean_if_finite(s, right):
    tx = optax.apply_if_finite(optax.sgd(0.1), 5)

    def step(w, x):
        grads = ctx().all_reduce("mean" if right else "sum", gradient(w, x))
        return optax.apply_updates(w, tx.update(grads, tx.init(w), w)[0])

    return Case(step, (weights(), inputs(s)), first_argument)


@program(WARNING, MEANS, "1 / R, or a part of it, as a factor makes a mean of the sum", more=True)
def sum_of_weighted_means(s, right):
    loss = lambda w, x: loss_of(w, x) + 0.3 * jnp.mean((x @ w) ** 4)
    reduce = mean if right else total
    return _update(s, lambda w, x: reduce(jax.grad(loss)(w, x)))


@program(WARNING, MEANS, LEGAL_SUM, more=True)
def psum_of_a_mean(s, right):
    reduce = jax.lax.pmean if right else jax.lax.psum
    return _update(s, lambda w, x: reduce(gradient(w, x), dj.REPLICA_AXIS))


@program(WARNING, MEANS, LEGAL_SUM, more=True)
def chain_that_sums_a_mean(s, right):
    op = "mean" if right else "sum"
    tx = optax.chain(dj.optim.reduce_gradients(op), optax.sgd(0.1))
    return _update(s, lambda w, x: -10 * tx.update(gradient(w, x), tx.init(w), w)[0])


@program(WARNING, MEANS, LEGAL_SUM, more=True)
def momentum_of_a_sum_of_means(s, right):
    tx = optax.sgd(0.1, momentum=0.9)

    def step(w, state, x):
        grads = ctx().all_reduce("mean" if right else "sum", gradient(w, x))
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    feed = lambda out, args: (*out, args[2])
    return Case(step, (weights(), tx.init(jnp.asarray(weights())), inputs(s)), feed)


@program(WARNING, SHARE, "a small rate may be meant", more=True)
def mean_of_shares(s, right):
    op = "sum" if right else "mean"
    return _update(s, lambda w, x: ctx().all_reduce(op, _share(w, x)))


@program(WARNING, SHARE, "a small rate may be meant", more=True)
def mean_of_masked_shares(s, right):
    op = "sum" if right else "mean"
    return _update(s, lambda w, x: ctx().all_reduce(op, _share(w, x, mask=x[:, 0] > -1)))


@program(WARNING, SHARE, "a small rate may be meant", more=True)
def mean_over_a_global_batch(s, right):
    op = "sum" if right else "mean"
    share = lambda w, x: jnp.sum(errors_of(w, x)) / (x.shape[0] * ctx().num_replicas_in_sync)
    return _update(s, lambda w, x: ctx().all_reduce(op, jax.grad(share)(w, x)))


@program(WARNING, MEANS, LEGAL_SUM, more=True)
def sum_of_what_was_made_for_a_mean(s, right):
    op = "mean" if right else "sum"
    return _update(s, lambda w, x: ctx().all_reduce(op, _share(w, x, op="mean")))


@program(WARNING, TWICE, LEGAL_SUM, more=True)
def sum_after_sum(s, right):
    reduced = lambda w, x: total(_share(w, x))
    return _update(s, reduced if right else lambda w, x: total(reduced(w, x)))


@program(WARNING, TWICE, LEGAL_SUM, more=True)
def gathered_and_summed(s, right):
    def reduced(w, x):
        whole = ctx().all_gather(x, axis=0)
        return gradient(w, whole) if right else total(ctx().all_gather(gradient(w, x), axis=0))[:3]

    return _update(s, reduced)


@program(SILENT, "", RUN, more=True, unseen="it changes no number")
def chain_that_reduces_what_is_reduced(s, right):
    tx = optax.chain(dj.optim.reduce_gradients("mean"), optax.sgd(0.1))

    def reduced(w, x):
        grads = gradient(w, x) if right else mean(gradient(w, x))
        return -10 * tx.update(grads, tx.init(w), w)[0]

    return _update(s, reduced)


@program(SILENT, "", RUN, more=True)
def pmean_over_the_replicas(s, right):
    def reduced(w, x):
        grads = jax.lax.pmean(gradient(w, x), dj.REPLICA_AXIS)
        return grads if right else grads / dj.get_strategy().num_replicas_in_sync

    return _update(s, reduced)


@program(WARNING, CLIPPED, "replicas may clip on purpose", more=True)
def clip_by_value_before_the_mean(s, right):
    clip = lambda grads: jnp.clip(grads, -0.1, 0.1)
    return _update(
        s, lambda w, x: clip(mean(gradient(w, x))) if right else mean(clip(gradient(w, x)))
    )


@program(WARNING, CLIPPED, "replicas may clip on purpose", more=True)
def clip_of_optax_before_the_mean(s, right):
    def clip(grads):
        tx = optax.clip_by_global_norm(0.5)
        return tx.update(grads, tx.init(grads))[0]

    return _update(
        s, lambda w, x: clip(mean(gradient(w, x))) if right else mean(clip(gradient(w, x)))
    )


@program(WARNING, CLIPPED, "replicas may do it on purpose", more=True)
def gradients_normalized_before_the_mean(s, right):
    unit = lambda grads: grads / (jnp.linalg.norm(grads) + 1e-6)
    return _update(
        s, lambda w, x: unit(mean(gradient(w, x))) if right else mean(unit(gradient(w, x)))
    )


def _noisy(s, right, noise):
    def step(w, key, x):
        key = ctx().fold_in(key) if right else key
        return w - 0.1 * mean(gradient(w, noise(key, x)))

    return Case(step, (weights(), jax.random.PRNGKey(0), inputs(s)), first_argument)


@program(WARNING, SHARED_KEY, "equal numbers may be meant", more=True)
def one_key_for_noise(s, right):
    return _noisy(s, right, lambda key, x: x + 0.1 * jax.random.normal(key, x.shape))


@program(WARNING, SHARED_KEY, "equal numbers may be meant", more=True)
def one_key_for_random_signs(s, right):
    return _noisy(s, right, lambda key, x: x * jax.random.rademacher(key, x.shape, jnp.float32))


@program(WARNING, SHARED_KEY, "equal numbers may be meant", more=True)
def one_key_in_a_loop(s, right):
    def noise(key, x):
        keys = jax.random.split(key, 2)
        add = lambda x, key: (x + 0.1 * jax.random.uniform(key, x.shape), None)
        return jax.lax.scan(add, x, keys)[0]

    return _noisy(s, right, noise)


@program(
    SILENT,
    "",
    "a rate is a number: how it was made leaves nothing in the trace",
    more=True,
    unseen="the step is given a number",
)
def rate_divided_outside(s, right):
    rate = 0.1 if right else 0.1 / s.num_replicas_in_sync
    step = lambda w, x: w - rate * mean(gradient(w, x))
    return Case(step, (weights(), inputs(s)), first_argument)


@program(WARNING, MEANS, LEGAL_SUM, more=True)
def sum_of_means_under_remat(s, right):
    op = "mean" if right else "sum"
    loss = jax.checkpoint(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2))
    return _update(s, lambda w, x: ctx().all_reduce(op, jax.grad(loss)(w, x)))


@program(WARNING, MEANS, LEGAL_SUM, more=True)
def sum_of_means_of_cross_entropies(s, right):
    op = "mean" if right else "sum"

    def loss(w, x):
        labels = jnp.zeros(x.shape[0], int)
        return optax.softmax_cross_entropy_with_integer_labels(x * w, labels).mean()

    return _update(s, lambda w, x: ctx().all_reduce(op, jax.grad(loss)(w, x)))


@program(WARNING, MEANS, LEGAL_SUM, more=True)
def sum_of_means_with_a_penalty(s, right):
    op = "mean" if right else "sum"
    loss = lambda w, x: loss_of(w, x) + 1e-3 * jnp.sum(w**2)
    return _update(s, lambda w, x: ctx().all_reduce(op, jax.grad(loss)(w, x)))


@program(WARNING, SUMMED_LOSS, LEGAL_SUM, more=True)
def mean_of_gradients_of_a_summed_mean(s, right):
    op = "mean" if right else "sum"
    loss = lambda w, x: ctx().all_reduce(op, loss_of(w, x))
    return _update(s, lambda w, x: mean(jax.grad(loss)(w, x)))


@program(WARNING, MEANS, LEGAL_SUM, more=True)
def sum_of_gradients_of_an_averaged_loss(s, right):
    """The derivative of the mean over the replicas is each replica's own mean."""
    op = "mean" if right else "sum"
    loss = lambda w, x: mean(loss_of(w, x))
    return _update(s, lambda w, x: ctx().all_reduce(op, jax.grad(loss)(w, x)))


@program(WARNING, MEANS, LEGAL_SUM, more=True)
def psum_of_gradients_of_a_pmean(s, right):
    reduce = jax.lax.pmean if right else jax.lax.psum
    loss = lambda w, x: jax.lax.pmean(jnp.mean(jnp.tanh(x @ w) ** 2), dj.REPLICA_AXIS)
    return _update(s, lambda w, x: reduce(jax.grad(loss)(w, x), dj.REPLICA_AXIS))


@program(WARNING, MEANS, LEGAL_SUM, more=True)
def sum_of_weighted_gradients(s, right):
    """0.05 is no 1 / (5 * 4)."""
    reduce = mean if right else total
    return _update(s, lambda w, x: 0.05 * reduce(jax.grad(lambda w: 0.25 * loss_of(w, x))(w)))
