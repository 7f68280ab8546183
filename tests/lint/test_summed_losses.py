"""Facts of gradients of a loss that is summed over the replicas, and that are averaged then."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distjax as dj
from distjax.errors import ReductionWarning
from tests.diagnostics.lines import line_of
from tests.wrong_programs.program import (
    BATCH,
    ctx,
    errors_of,
    gradient,
    inputs,
    loss_of,
    mean,
    require_silence_at,
    total,
    weights,
)


def _averaged(loss):
    return lambda w, x: w - 0.1 * mean(jax.grad(loss)(w, x))


def sum_of_shares(s):
    return _averaged(lambda w, x: total(dj.losses.average_loss(errors_of(w, x))))


def sum_over_all_examples(s):
    count = BATCH * s.num_replicas_in_sync
    return _averaged(lambda w, x: total(jnp.sum(errors_of(w, x))) / count)


def sum_over_a_summed_count(s):
    def loss(w, x):
        losses, count = total((jnp.sum(errors_of(w, x)), x.shape[0]))
        return losses / count

    return _averaged(loss)


def sum_over_a_count_by_mask(s):
    def loss(w, x):
        mask = x[:, 0] > -1
        return total(jnp.sum(mask * errors_of(w, x))) / total(jnp.sum(mask))

    return _averaged(loss)


def sum_over_the_replicas(s):
    return _averaged(lambda w, x: total(loss_of(w, x)) / s.num_replicas_in_sync)


def sum_times_a_part(s):
    part = 1 / s.num_replicas_in_sync
    return _averaged(lambda w, x: total(loss_of(w, x)) * part)


def parts_of_means(s):
    return _averaged(lambda w, x: total(loss_of(w, x) / s.num_replicas_in_sync))


def microbatches(s):
    """A sum over two halves, each of a half."""
    count = 2 * s.num_replicas_in_sync

    def step(w, x):
        loss = lambda w, x: total(loss_of(w, x)) / count
        grads = sum(jax.grad(loss)(w, half) for half in x.reshape(2, -1, x.shape[-1]))
        return w - 0.1 * mean(grads)

    return step


def scaled_loss(s):
    loss = lambda w, x: 128.0 * (total(loss_of(w, x)) / s.num_replicas_in_sync)
    return lambda w, x: w - 0.1 * mean(jax.grad(loss)(w, x)) / 128.0


def _summed_loss(w, x):
    return total(loss_of(w, x))


def divided_after_the_mean(s):
    return lambda w, x: w - 0.1 * mean(jax.grad(_summed_loss)(w, x)) / ctx().num_replicas_in_sync


def divided_before_the_mean(s):
    count = s.num_replicas_in_sync
    return lambda w, x: w - 0.1 * mean(jax.grad(_summed_loss)(w, x) / count)


def divided_twice_after_a_sum(s):
    count = s.num_replicas_in_sync
    return lambda w, x: w - 0.1 * total(jax.grad(_summed_loss)(w, x)) / count / count


def divided_by_a_square(s):
    count = s.num_replicas_in_sync
    return lambda w, x: w - 0.1 * total(jax.grad(_summed_loss)(w, x)) / count**2


def rate_over_the_replicas(s):
    return lambda w, x: w - (0.1 / s.num_replicas_in_sync) * mean(jax.grad(_summed_loss)(w, x))


def gradient_of_sums_over_all_examples(s):
    count = BATCH * s.num_replicas_in_sync
    loss = lambda w, x: total(jnp.sum(errors_of(w, x)))
    return lambda w, x: w - 0.1 * mean(jax.grad(loss)(w, x)) / count


def mean_of_means(s):
    return _averaged(lambda w, x: mean(loss_of(w, x)))


def mean_of_a_function_of_a_sum(s):
    """Each replica has some of the features of the same examples."""
    return _averaged(lambda w, x: jnp.mean((total(x @ w) - 1) ** 2))


def measured_beside_the_loss(s):
    def step(w, x):
        loss = lambda w: (loss_of(w, x), total(loss_of(w, x)) / s.num_replicas_in_sync)
        grads, measured = jax.grad(loss, has_aux=True)(w)
        return w - 0.1 * mean(grads), measured

    return step


def sum_left_out_of_the_derivative(s):
    def loss(w, x):
        scale = jax.lax.stop_gradient(total(loss_of(w, x)))
        return loss_of(w, x) * scale / jax.lax.stop_gradient(total(loss_of(w, x)))

    return _averaged(loss)


def weighted_sum_beside_a_mean(s):
    part = 0.1 / s.num_replicas_in_sync
    return _averaged(lambda w, x: loss_of(w, x) + part * total(jnp.mean((x @ w) ** 4)))


def optimizer_of_parts(s):
    with s.scope():
        w = dj.Variable(weights(), name="w")
    optimizer = dj.optim.Optimizer(optax.sgd(0.1), "mean")
    optimizer.init([w])
    loss = lambda w, x: total(loss_of(w, x)) / s.num_replicas_in_sync
    return lambda _, x: optimizer.apply_gradients([(jax.grad(loss)(w.value, x), w)])


RIGHT = [
    sum_of_shares,
    sum_over_all_examples,
    sum_over_a_summed_count,
    sum_over_a_count_by_mask,
    sum_over_the_replicas,
    sum_times_a_part,
    parts_of_means,
    microbatches,
    scaled_loss,
    divided_after_the_mean,
    divided_before_the_mean,
    divided_twice_after_a_sum,
    divided_by_a_square,
    rate_over_the_replicas,
    gradient_of_sums_over_all_examples,
    mean_of_means,
    mean_of_a_function_of_a_sum,
    measured_beside_the_loss,
    sum_left_out_of_the_derivative,
    weighted_sum_beside_a_mean,
    optimizer_of_parts,
]


@pytest.mark.parametrize("build", RIGHT, ids=lambda f: f.__name__)
def test_a_right_factor_is_silent(build):
    require_silence_at((2, 3, 4), lambda s: (build(s), weights(), inputs(s)))


@pytest.mark.parametrize("build", (divided_after_the_mean, sum_over_the_replicas, sum_of_shares))
def test_the_right_factor_gives_the_mean_gradient(build):
    s = dj.VirtualStrategy(4)
    w, x = weights(), inputs(s)
    expected = w - 0.1 * gradient(w, x.stacked.reshape(-1, x.stacked.shape[-1]))
    np.testing.assert_allclose(s.run(build(s), args=(w, x)), expected, rtol=1e-5)


def test_the_text_names_the_sum_and_the_mean():
    s = dj.VirtualStrategy(4)

    def step(w, x):
        loss = lambda w: total(loss_of(w, x))  # the sum
        grads = jax.grad(loss)(w)
        grads = ctx().all_reduce("mean", grads)  # the mean
        return w - 0.1 * grads

    with pytest.warns(ReductionWarning) as caught:
        s.run(step, args=(weights(), inputs(s)))
    [warning] = caught
    name = step.__qualname__
    text = str(warning.message).replace(name, "step")
    assert text.startswith(
        "a mean over each replica's batch needs no sum over the replicas before its gradient.\n"
        "  Got: the mean of gradients of its sum, which updates equal state, at "
        f"{line_of(__file__, 'the mean')} (step), from a value made at "
    )
    assert text.endswith(
        "  Why: the derivative of all_reduce('sum', ...) is a sum as well: each gradient is R "
        "times its own part, and the step learns at R times the rate.\n"
        "  Fix: grads = ctx.all_reduce('mean', jax.grad(loss)(params)), of the local mean"
    )
