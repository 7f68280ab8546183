"""Reductions of cross-replica code: of what one run returned, for the user or for another run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import distjax as dj
from tests.wrong_programs.program import (
    RUN,
    SILENT,
    Case,
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


def _reported(s, compute, reduce, *more):
    """A measurement that the user reduces."""
    return Case(
        lambda *args: reduce(s.run(compute, args=args)), (weights(), inputs(s), *more), runs=True
    )


@program(SILENT, "", RUN, more=True)
def perplexities_reduced_outside(s, right):
    local = loss_of if right else lambda w, x: jnp.exp(loss_of(w, x))
    last = jnp.exp if right else lambda x: x
    return _reported(s, local, lambda found: last(s.reduce("mean", found)))


@program(SILENT, "", RUN, more=True)
def share_averaged_outside(s, right):
    local = lambda w, x: dj.losses.average_loss(errors_of(w, x))
    return _reported(s, local, lambda found: s.reduce("sum" if right else "mean", found))


@program(SILENT, "", RUN, more=True)
def accuracies_averaged_outside(s, right):
    def local(w, x, mask):
        hits, count = jnp.sum((x @ w > 0) & mask), jnp.sum(mask)
        return (hits, count) if right else hits / count

    def reduce(found):
        if not right:
            return s.reduce("mean", found)
        hits, count = s.reduce("sum", found)
        return hits / count

    return _reported(s, local, reduce, masks(s))


def _two_runs(s, local, reduce):
    """Gradients of one run, which another one applies."""

    def step(w, x):
        grads = reduce(s.run(local, args=(w, x)))
        return s.run(lambda w, grads: w - 0.1 * grads, args=(w, grads))

    return Case(step, (weights(), inputs(s)), first_argument, runs=True)


@program(SILENT, "", RUN, more=True)
def sum_of_means_for_the_next_run(s, right):
    return _two_runs(s, gradient, lambda grads: s.reduce("mean" if right else "sum", grads))


@program(SILENT, "", RUN, more=True)
def sum_of_a_tree_of_means_for_the_next_run(s, right):
    local = lambda params, x: jax.grad(lambda p: loss_of(p["w"], x))(params)

    def step(params, x):
        grads = s.reduce("mean" if right else "sum", s.run(local, args=(params, x)))
        update = lambda params, grads: jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return s.run(update, args=(params, grads))

    return Case(step, ({"w": weights()}, inputs(s)), first_argument, runs=True)


@program(SILENT, "", RUN, more=True)
def sum_of_what_run_returned_averaged(s, right):
    local = lambda w, x: mean(gradient(w, x))
    return _two_runs(s, local, lambda grads: grads if right else s.reduce("sum", grads))


@program(SILENT, "", RUN, more=True)
def clipped_in_one_run_and_reduced_after_it(s, right):
    clip = lambda grads: jnp.clip(grads, -0.1, 0.1)
    local = gradient if right else lambda w, x: clip(gradient(w, x))
    last = clip if right else lambda grads: grads
    return _two_runs(s, local, lambda grads: last(s.reduce("mean", grads)))


@program(SILENT, "", RUN, more=True)
def sum_of_means_in_a_compiled_step(s, right):
    case = _two_runs(s, gradient, lambda grads: s.reduce("mean" if right else "sum", grads))
    return Case(dj.jit(case.step), case.args, case.feed, runs=True)


@program(SILENT, "", RUN, more=True)
def averaged_gradients_for_an_optimizer_that_sums(s, right):
    with s.scope():
        w = dj.Variable(weights(), name="w")
    optimizer = dj.optim.Optimizer(optax.sgd(0.1), "mean" if right else "sum")
    optimizer.init([w])

    def step(x):
        grads = s.run(lambda x: mean(gradient(w.value, x)), args=(x,))
        with s.scope():
            optimizer.apply_gradients([(grads, w)])

    return Case(step, (inputs(s),), runs=True)


@program(SILENT, "", RUN, more=True)
def means_of_one_run_summed_in_the_next(s, right):
    """The sum of the second run is of what the first one averaged over its own examples."""

    def step(w, x):
        grads = s.run(lambda w, x: jax.grad(loss_of)(w, x), args=(w, x))
        op = "mean" if right else "sum"
        reduce = lambda w, g: w - 0.1 * dj.get_replica_context().all_reduce(op, g)
        return s.run(reduce, args=(w, grads))

    return Case(step, (np.asarray(weights()), inputs(s)), first_argument, runs=True)
