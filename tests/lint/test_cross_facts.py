"""Facts in cross-replica code: right programs that look like wrong ones, and the fixes."""

import gc
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distjax as dj
from distjax._src.lint import between_runs
from distjax.errors import CheckError, LocalityWarning, ReductionWarning
from tests.diagnostics.lines import line_of
from tests.wrong_programs.program import (
    BATCH,
    MEAN,
    ctx,
    errors_of,
    gradient,
    inputs,
    loss_of,
    mean,
    require_silence,
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
    require_silence(two, trap(two), weights(), inputs(two))


def findings(step, *args, **options):
    with pytest.raises(CheckError) as info:
        dj.check(step, *args, **options)
    return info.value.findings


def test_the_lines_and_the_cure_are_those_of_the_merge(two):
    def merge(strategy, grads):
        return strategy.reduce("mean", grads)  # the mean

    step = lambda w, x: merged(merge, jnp.clip(gradient(w, x), -1, 1))  # the clip in the step
    [finding] = findings(step, weights(), inputs(two), strategy=two, rules_only=True)
    assert finding.source.split(" ")[0] == line_of(__file__, "the mean")
    assert line_of(__file__, "the clip in the step") in finding.text
    assert "Fix: grads = strategy.reduce('mean', grads), then clip or update" in finding.text


def test_a_block_in_the_merge_is_meant(two):
    def merge(strategy, grads):
        with dj.expect("the rate is for one replica"):
            return strategy.reduce("sum", grads)

    step = lambda w, x: w - 0.1 * merged(merge, gradient(w, x))
    dj.check(step, weights(), inputs(two), strategy=two, rules_only=True)


# -- between two runs ----------------------------------------------------------


def local_loss(w, x):
    return loss_of(w, x)


def sum_of_an_average_divided(s, w, x):
    loss = s.run(lambda w, x: mean(loss_of(w, x)), args=(w, x))
    return s.reduce("sum", loss) / s.num_replicas_in_sync


def average_reduced_again(s, w, x):
    return s.reduce("mean", s.run(lambda w, x: mean(loss_of(w, x)), args=(w, x)))


def total_of_totals(s, w, x):
    hits, count = s.run(lambda w, x: (jnp.sum(x @ w > 0), jnp.float32(BATCH)), args=(w, x))
    return s.reduce("sum", hits) / s.reduce("sum", count)


def exponential_of_what_is_not_reduced(s, w, x):
    loss = s.run(local_loss, args=(w, x))
    return s.run(lambda loss: jnp.exp(loss), args=(loss,))


def two_steps_and_an_evaluation(s, w, x):
    step = lambda w, x: w - 0.1 * mean(gradient(w, x))
    w = s.run(step, args=(w, x))
    w = s.run(step, args=(w, x))
    return s.run(lambda w, x: mean(loss_of(w, x)), args=(w, x))


def gradients_averaged_outside(s, w, x):
    grads = s.run(gradient, args=(w, x))
    return s.run(lambda w, g: w - 0.1 * g, args=(w, s.reduce("mean", grads)))


def shares_summed_outside(s, w, x):
    grads = s.run(lambda w, x: gradient(w, x) / R, args=(w, x))
    return s.run(lambda w, g: w - 0.1 * g, args=(w, s.reduce("sum", grads)))


def sums_divided_in_the_next_run(s, w, x):
    grads = s.reduce("sum", s.run(gradient, args=(w, x)))
    return s.run(lambda w, g: w - 0.1 * (g / R), args=(w, grads))


def gathered_and_used(s, w, x):
    rows = s.gather(s.run(lambda w, x: x @ w, args=(w, x)), axis=0)
    return s.run(lambda w, rows: w + jnp.mean(rows), args=(w, rows))


BETWEEN = [
    sum_of_an_average_divided,
    average_reduced_again,
    total_of_totals,
    exponential_of_what_is_not_reduced,
    two_steps_and_an_evaluation,
    gradients_averaged_outside,
    shares_summed_outside,
    sums_divided_in_the_next_run,
    gathered_and_used,
]


@pytest.mark.parametrize("trap", BETWEEN, ids=lambda trap: trap.__name__)
def test_what_only_looks_wrong_between_runs_is_silent(two, trap):
    step = lambda w, x: trap(two, w, x)
    args = (two.extended.broadcast_to(weights()), inputs(two))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReductionWarning)
        warnings.simplefilter("error", LocalityWarning)
        step(*args)
        dj.jit(step)(*args)
    assert dj.check(step, *args, rules_only=True) is None


def test_a_mistake_between_two_runs_is_for_check(two):
    """What one run returned is not followed into the next."""

    def step(w, x):
        grads = two.run(gradient, args=(w, x))
        return two.run(lambda w, g: w - 0.1 * g, args=(w, two.reduce("sum", grads)))

    with warnings.catch_warnings():
        warnings.simplefilter("error", ReductionWarning)
        step(weights(), inputs(two))
    [finding] = findings(step, weights(), inputs(two))
    assert finding.rule == "numbers that depend on the number of replicas"


@pytest.mark.usefixtures("collect_garbage")
def test_nothing_is_kept_of_arrays_that_are_gone():
    one, before = dj.OneDeviceStrategy(), len(between_runs._known)
    (x,) = one.distribute_dataset([np.ones((BATCH, 3), np.float32)])
    # A small result is held a while, to be asked for the end of its program.
    own = one.run(lambda w, x: loss_of(w, x) + jnp.zeros(300), args=(weights(), x))
    assert between_runs.is_own(own)
    del own, x
    gc.collect()
    assert len(between_runs._known) <= before
