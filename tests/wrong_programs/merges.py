"""Reductions of cross-replica code: in merge functions."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import distjax as dj
from tests.wrong_programs.program import (
    MEAN,
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
    masks,
    mean,
    program,
    weights,
)
from tests.wrong_programs.variables import variable

MEANS, TWICE, SHARE = "a sum of local means", "summed twice", "a share averaged"
CLIPPED, COUNTS = "clipped before the reduction", "averaged over local counts"
CURVED = "a function of local means averaged"
LEGAL_SUM, MAY = "a larger rate may be meant", "a mean of local values may be meant"


def merged(function, *args):
    return ctx().merge_call(function, args=args)


def _update(s, reduced):
    """One step of gradient descent, by what `reduced` makes of the batch."""
    return Case(lambda w, x: w - 0.1 * reduced(w, x), (weights(), inputs(s)), first_argument)


@program(WARNING, MEANS, LEGAL_SUM, more=True)
def merge_that_sums_means(s, right):
    op = "mean" if right else "sum"
    return _update(s, lambda w, x: merged(lambda s, g: s.reduce(op, g), gradient(w, x)))


@program(WARNING, TWICE, LEGAL_SUM, more=True)
def merge_that_sums_a_mean_into_a_variable(s, right):
    w = variable(s, MEAN)

    def merge(s, grads):
        w.assign_sub(0.1 * (grads if right else s.reduce("sum", grads)))

    return Case(lambda x: merged(merge, mean(gradient(w.value, x))), (inputs(s),))


@program(WARNING, MEANS, LEGAL_SUM, more=True)
def merge_that_updates_by_a_sum_of_means(s, right):
    w = variable(s, MEAN)

    def merge(s, grads):
        grads = s.extended.reduce_to("mean" if right else "sum", grads, w)
        s.extended.update(w, lambda w, g: w.assign_sub(0.1 * g), args=(grads,))

    return Case(lambda x: merged(merge, gradient(w.value, x)), (inputs(s),))


@program(WARNING, SHARE, "a small rate may be meant", more=True)
def merge_that_averages_shares(s, right):
    op = "sum" if right else "mean"
    share = lambda w, x: dj.losses.average_loss(errors_of(w, x))
    merge = lambda s, grads: s.reduce(op, grads)
    return _update(s, lambda w, x: merged(merge, jax.grad(share)(w, x)))


@program(WARNING, CLIPPED, "replicas may clip on purpose", more=True)
def merge_that_clips_too_early(s, right):
    clip = lambda grads: jnp.clip(grads, -0.1, 0.1)

    def merge(s, grads):
        return clip(s.reduce("mean", grads)) if right else s.reduce("mean", grads)

    early = (lambda g: g) if right else clip
    return _update(s, lambda w, x: merged(merge, early(gradient(w, x))))


@program(WARNING, COUNTS, "where all counts are equal it is right", more=True)
def merge_of_local_averages(s, right):
    def merge(s, hits, count):
        if right:
            return s.reduce("sum", hits) / s.reduce("sum", count)
        return s.reduce("mean", hits)

    def step(w, x, mask):
        hits, count = jnp.sum((x @ w > 0) & mask), jnp.sum(mask)
        return merged(merge, hits if right else hits / count, count)

    return Case(step, (weights(), inputs(s), masks(s)))


@program(SILENT, "", RUN, more=True)
def merge_of_perplexities(s, right):
    def step(w, x):
        loss = loss_of(w, x)
        if right:
            return merged(lambda s, loss: jnp.exp(s.reduce("mean", loss)), loss)
        return merged(lambda s, loss: s.reduce("mean", loss), jnp.exp(loss))

    return Case(step, (weights(), inputs(s)))


@program(WARNING, MEANS, LEGAL_SUM, more=True)
def merge_in_a_loop_that_sums_means(s, right):
    op, tx = "mean" if right else "sum", optax.sgd(0.1)

    def step(w, x):
        def once(w, _):
            grads = merged(lambda s, g: s.reduce(op, g), gradient(w, x))
            return optax.apply_updates(w, tx.update(grads, tx.init(w))[0]), None

        return jax.lax.scan(once, w, np.arange(2))[0]

    return Case(step, (weights(), inputs(s)), first_argument)
