"""One replica's examples taken for all: per example, gathered, divided by the local batch size."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.wrong_programs.program import (
    RUN,
    SILENT,
    WARNING,
    Case,
    ctx,
    first_argument,
    inputs,
    mean,
    program,
    total,
    weights,
)

MEANS, CURVED = "a sum of local means", "a function of local means averaged"
LEGAL_SUM = "a larger rate may be meant"


def update(s, reduced):
    """One step of gradient descent, by what `reduced` makes of the batch."""
    return Case(lambda w, x: w - 0.1 * reduced(w, x), (weights(), inputs(s)), first_argument)


def gradients_by_example(w, x):
    """The gradients of the examples' losses, [n, features]."""
    return jax.vmap(jax.grad(lambda w, x: (x @ w - 1) ** 2), (None, 0))(w, x)


def clipped_by_example(w, x):
    grads = gradients_by_example(w, x)
    norms = jnp.linalg.norm(grads, axis=1, keepdims=True)
    return grads * jnp.minimum(1.0, 0.5 / norms)


def summed_gradient(w, x):
    """The gradient of a sum over the replica's examples."""
    return jax.grad(lambda w: jnp.sum((x @ w - 1) ** 2))(w)


def embedded(w, x):
    """Two features of each example, [n, 2]."""
    return jnp.tanh(jnp.stack([x @ w, x @ w**2], axis=1))


def contrast(own, others):
    """A loss of each row of `own` beside all rows of `others`, [n]."""
    return jax.nn.logsumexp(own @ others.T, axis=1)


@program(WARNING, MEANS, LEGAL_SUM, more=True)
def sum_of_means_by_example(s, right):
    reduce = mean if right else total
    return update(s, lambda w, x: reduce(gradients_by_example(w, x).mean(0)))


@program(WARNING, MEANS, LEGAL_SUM, more=True)
def sum_of_means_clipped_by_example(s, right):
    reduce = mean if right else total
    return update(s, lambda w, x: reduce(clipped_by_example(w, x).mean(0)))


def _noisy(s, right, noise_of):
    def reduced(w, x):
        noisy = clipped_by_example(w, x).sum(0) + noise_of(w)
        return (mean if right else total)(noisy / x.shape[0])

    return update(s, reduced)


@program(
    WARNING,
    MEANS,
    LEGAL_SUM,
    more=True,
    unequal="each replica adds the noise once: less of it for more replicas",
)
def sum_of_means_with_equal_noise(s, right):
    return _noisy(s, right, lambda w: jax.random.normal(jax.random.key(0), w.shape))


@program(WARNING, MEANS, LEGAL_SUM, more=True)
def sum_of_means_with_noise_of_each_replica(s, right):
    draw = lambda w: jax.random.normal(ctx().fold_in(jax.random.key(0)), w.shape)
    return _noisy(s, right, draw)


@program(WARNING, MEANS, LEGAL_SUM, more=True)
def sum_over_the_local_batch_size(s, right):
    def reduced(w, x):
        count = x.shape[0] * (s.num_replicas_in_sync if right else 1)
        return total(summed_gradient(w, x)) / count

    return update(s, reduced)


@program(WARNING, MEANS, LEGAL_SUM, more=True)
def sum_by_example_over_the_local_batch_size(s, right):
    def reduced(w, x):
        count = x.shape[0] * (s.num_replicas_in_sync if right else 1)
        return total(clipped_by_example(w, x).sum(0)) / count

    return update(s, reduced)


@program(WARNING, MEANS, LEGAL_SUM, more=True)
def sum_of_what_was_divided_by_the_local_batch_size(s, right):
    reduce = mean if right else total
    return update(s, lambda w, x: reduce(summed_gradient(w, x) / x.shape[0]))


@program(WARNING, MEANS, LEGAL_SUM, more=True)
def sum_through_the_derivative_of_a_gather(s, right):
    """Each replica contrasts its own rows with all; the derivative of the gather is a sum."""

    def loss(w, x):
        own = embedded(w, x)
        return jnp.mean(contrast(own, lax.all_gather(own, s.axis_name, tiled=True)))

    return update(s, lambda w, x: (mean if right else total)(jax.grad(loss)(w, x)))


@program(SILENT, "", RUN, more=True)
def sum_of_one_loss_of_a_gathered_batch(s, right):
    """Each replica computes the same loss of all rows, R times in all."""

    def loss(w, x):
        everyone = lax.all_gather(embedded(w, x), s.axis_name, tiled=True)
        return jnp.mean(contrast(everyone, everyone))

    return update(s, lambda w, x: (mean if right else total)(jax.grad(loss)(w, x)))


@program(WARNING, MEANS, LEGAL_SUM, more=True)
def sum_over_own_rows_beside_a_completed_batch(s, right):
    def loss(w, x):
        own = embedded(w, x)
        gathered = lax.stop_gradient(lax.all_gather(own, s.axis_name))
        everyone = gathered.at[lax.axis_index(s.axis_name)].set(own).reshape(-1, 2)
        return jnp.mean(contrast(own, everyone))

    return update(s, lambda w, x: (mean if right else total)(jax.grad(loss)(w, x)))


@program(SILENT, "", RUN, more=True)
def perplexity_of_local_frequencies(s, right):
    """How many codes are used, by the entropy of how often each is."""

    def step(w, x):
        used = jax.nn.one_hot(jnp.argmax(x * w, axis=1), 3).mean(0)
        used = mean(used) if right else used
        perplexity = jnp.exp(-jnp.sum(used * jnp.log(used + 1e-10)))
        return perplexity if right else mean(perplexity)

    return Case(step, (weights(), inputs(s)))
