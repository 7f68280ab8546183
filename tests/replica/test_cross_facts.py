"""Facts in cross-replica code: right programs that look like wrong ones, and the cures."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distjax as dj
from distjax.errors import CheckError, LocalityWarning, ReductionWarning
from tests.diagnostics.lines import line_of
from tests.wrong_programs.program import (
    MEAN,
    ctx,
    errors_of,
    gradient,
    inputs,
    loss_of,
    mean,
    weights,
)

R = 2


@pytest.fixture(scope="module", params=["virtual", "mirrored"])
def two(request):
    return (
        dj.VirtualStrategy(R)
        if request.param == "virtual"
        else dj.MirroredStrategy(jax.devices()[:R])
    )


def merged(function, *args):
    return ctx().merge_call(function, args=args)


def divided_after_the_sum(s):
    merge = lambda s, grads: s.reduce("sum", grads) / s.num_replicas_in_sync
    return lambda w, x: w - 0.1 * merged(merge, gradient(w, x))


def divided_before_the_sum(s):
    merge = lambda s, grads: s.reduce("sum", grads)
    return lambda w, x: w - 0.1 * merged(merge, gradient(w, x) / ctx().num_replicas_in_sync)


def mean_of_what_is_averaged(s):
    merge = lambda s, grads: s.reduce("mean", grads)
    return lambda w, x: w - 0.1 * merged(merge, mean(gradient(w, x)))


def sum_of_shares(s):
    share = lambda w, x: dj.losses.average_loss(errors_of(w, x))
    merge = lambda s, grads: s.reduce("sum", grads)
    return lambda w, x: w - 0.1 * merged(merge, jax.grad(share)(w, x))


def momentum_in_a_variable(s):
    with s.scope():
        w = dj.Variable(weights(), name="w", aggregation=MEAN)
        velocity = dj.Variable(np.zeros(3, np.float32), name="velocity")

    def merge(s, grads):
        grads = s.extended.reduce_to("mean", grads, w)
        clipped = optax.clip_by_global_norm(0.5).update(grads, optax.EmptyState())[0]
        s.extended.update(velocity, lambda v, g: v.assign(0.9 * v.value + g), args=(clipped,))
        s.extended.update(w, lambda w, v: w.assign_sub(0.1 * v), args=(velocity.value,))

    return lambda _, x: merged(merge, gradient(w.value, x))


def own_values_handed_back(s):
    def step(w, x):
        grads = merged(lambda s, g: g, gradient(w, x))
        return w - 0.1 * mean(grads)

    return step


def reduced_over_elements_too(s):
    def step(w, x):
        loss = merged(lambda s, losses: s.reduce("mean", losses, axis=0), errors_of(w, x))
        return jnp.exp(loss)

    return step


def per_replica_code(s):
    """A merge function that only takes values per replica is not followed."""
    merge = lambda s, grads: s.local_results(grads)[0] * 0.5
    return lambda w, x: w - 0.1 * merged(merge, mean(gradient(w, x)))


TRAPS = [
    divided_after_the_sum,
    divided_before_the_sum,
    mean_of_what_is_averaged,
    sum_of_shares,
    momentum_in_a_variable,
    own_values_handed_back,
    reduced_over_elements_too,
    per_replica_code,
]


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.__name__)
def test_what_only_looks_wrong_is_silent(two, trap):
    step, args = trap(two), (weights(), inputs(two))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReductionWarning)
        warnings.simplefilter("error", LocalityWarning)
        two.run(step, args=args)
    assert dj.check(step, *args, strategy=two) is None


def findings(step, *args, **options):
    with pytest.raises(CheckError) as info:
        dj.check(step, *args, **options)
    return info.value.findings


def test_the_lines_and_the_cure_are_those_of_the_merge(two):
    def merge(strategy, loss):
        return strategy.reduce("mean", loss)  # the mean

    step = lambda w, x: merged(merge, jnp.exp(loss_of(w, x)))  # the exp
    [finding] = findings(step, weights(), inputs(two), strategy=two)
    assert finding.source.split(" ")[0] == line_of(__file__, "the mean")
    assert line_of(__file__, "the exp") in finding.text
    assert "Fix: loss = strategy.reduce('mean', loss); perplexity = jnp.exp(loss)" in finding.text


def test_a_block_in_the_merge_is_meant(two):
    def merge(strategy, grads):
        with dj.expect("the rate is for one replica"):
            return strategy.reduce("sum", grads)

    step = lambda w, x: w - 0.1 * merged(merge, gradient(w, x))
    dj.check(step, weights(), inputs(two), strategy=two)
