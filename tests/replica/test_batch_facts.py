"""Facts of batches: right programs in which a local mean or sum is one of the global batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distjax as dj
from tests.wrong_programs.batches import (
    clipped_by_example,
    contrast,
    embedded,
    gradients_by_example,
    summed_gradient,
)
from tests.wrong_programs.program import ctx, inputs, mean, require_silence, total, weights

REPLICAS = (2, 3, 4)


# -- parts of one loss: each replica's own rows alone have a gradient -------------


def completed_by_index(s, own):
    gathered = lax.stop_gradient(lax.all_gather(own, s.axis_name))
    return gathered.at[lax.axis_index(s.axis_name)].set(own).reshape(-1, own.shape[1])


def completed_by_slice(s, own):
    gathered = lax.stop_gradient(lax.all_gather(own, s.axis_name, tiled=True))
    start = lax.axis_index(s.axis_name) * own.shape[0]
    return lax.dynamic_update_slice(gathered, own, (start, 0))


def completed_by_selection(s, own):
    gathered = lax.stop_gradient(lax.all_gather(own, s.axis_name))
    is_own = jnp.arange(s.num_replicas_in_sync) == lax.axis_index(s.axis_name)
    return jnp.where(is_own[:, None, None], own, gathered).reshape(-1, own.shape[1])


def completed_by_concatenation(s, own):
    gathered = lax.stop_gradient(lax.all_gather(own, s.axis_name, tiled=True))
    others = jnp.roll(gathered, -lax.axis_index(s.axis_name) * own.shape[0], axis=0)
    return jnp.concatenate([own, others[own.shape[0] :]])


def completed_by_addition(s, own):
    rows = jnp.zeros((s.num_replicas_in_sync, *own.shape)).at[lax.axis_index(s.axis_name)].set(own)
    return (rows + lax.stop_gradient(total(rows) - rows)).reshape(-1, own.shape[1])


COMPLETIONS = [
    completed_by_index,
    completed_by_slice,
    completed_by_selection,
    completed_by_concatenation,
    completed_by_addition,
]


@pytest.mark.parametrize("num_replicas", REPLICAS)
@pytest.mark.parametrize("complete", COMPLETIONS, ids=lambda f: f.__name__)
def test_the_sum_of_parts_of_one_loss(complete, num_replicas):
    s = dj.VirtualStrategy(num_replicas)

    def loss(w, x):
        everyone = complete(s, embedded(w, x))
        return jnp.mean(contrast(everyone, everyone))

    def step(w, x):
        return w - 0.1 * total(jax.grad(loss)(w, x))

    x, whole = inputs(s), lambda w, x: jnp.mean(contrast(embedded(w, x), embedded(w, x)))
    require_silence(s, step, weights(), x)
    everything = np.concatenate([np.asarray(part) for part in s.local_results(x)])
    expected = weights() - 0.1 * jax.grad(whole)(weights(), everything)
    np.testing.assert_allclose(s.run(step, args=(weights(), x)), expected, rtol=1e-5)


def test_the_sum_of_parts_of_one_loss_of_global_moments():
    s = dj.VirtualStrategy(2)

    def loss(w, x):
        own = embedded(w, x)
        moments = own.T @ own / 8
        moments = moments + lax.stop_gradient(total(moments) - moments)
        return jnp.mean((moments - jnp.eye(2)) ** 2)

    step = lambda w, x: w - 0.1 * total(jax.grad(loss)(w, x))
    require_silence(s, step, weights(), inputs(s))


# -- means of what each replica computes --------------------------------------------


def mean_over_own_rows(s):
    def loss(w, x):
        own = embedded(w, x)
        return jnp.mean(contrast(own, completed_by_index(s, own)))

    return lambda w, x: mean(jax.grad(loss)(w, x))


def _contrasted(s, w, x):
    own = embedded(w, x)
    return contrast(own, lax.all_gather(own, s.axis_name, tiled=True))


def mean_through_the_derivative_of_a_gather(s):
    return lambda w, x: mean(jax.grad(lambda w: jnp.mean(_contrasted(s, w, x)))(w))


def shares_through_the_derivative_of_a_gather(s):
    loss = lambda w, x: dj.losses.average_loss(_contrasted(s, w, x))
    return lambda w, x: total(jax.grad(loss)(w, x))


def means_over_the_replicas_through_the_derivative_of_a_gather(s):
    loss = lambda w, x: jnp.mean(_contrasted(s, w, x)) / s.num_replicas_in_sync
    return lambda w, x: total(jax.grad(loss)(w, x))


def mean_of_one_loss_of_a_gathered_batch(s):
    def loss(w, x):
        everyone = lax.all_gather(embedded(w, x), s.axis_name, tiled=True)
        return jnp.mean(contrast(everyone, everyone))

    return lambda w, x: mean(jax.grad(loss)(w, x))


def sum_by_example_over_the_global_batch(s):
    count = 4 * s.num_replicas_in_sync
    return lambda w, x: total(clipped_by_example(w, x).sum(0)) / count


def means_by_example_over_the_replicas(s):
    return lambda w, x: total(gradients_by_example(w, x).mean(0)) / s.num_replicas_in_sync


def shares_of_a_sum(s):
    return lambda w, x: total(summed_gradient(w, x) / s.num_replicas_in_sync) / x.shape[0]


def sum_divided_twice(s):
    return lambda w, x: total(summed_gradient(w, x)) / x.shape[0] / s.num_replicas_in_sync


def mean_over_the_replicas_of_sums(s):
    return lambda w, x: mean(summed_gradient(w, x)) / x.shape[0]


def sum_over_a_reduced_count(s):
    return lambda w, x: total(summed_gradient(w, x)) / total(jnp.float32(x.shape[0]))


def sum_of_sums(s):
    return lambda w, x: total(summed_gradient(w, x))


def rate_over_the_local_batch_size(s):
    """A rate is a number: 0.25 is no division by 4."""
    return lambda w, x: 0.25 * total(summed_gradient(w, x))


def noise_on_a_mean_by_example(s):
    def reduced(w, x):
        key = ctx().fold_in(jax.random.key(0))
        noise = jax.random.normal(key, w.shape)
        return mean((clipped_by_example(w, x).sum(0) + noise) / x.shape[0])

    return reduced


def weights_by_the_norms_of_gradients(s):
    """Of two losses, each by how much larger the other's gradient is: a replica's own quotient."""

    def reduced(w, x):
        grads = jax.jacrev(lambda w: jnp.stack([jnp.mean((x @ w) ** 2), jnp.mean(x @ w)]))(w)
        norms = jnp.linalg.norm(grads, axis=1)
        first, second = mean((jnp.mean(norms) / norms[0], jnp.mean(norms) / norms[1]))
        return mean(first * grads[0] + second * grads[1])

    return reduced


def entropies_by_example(s):
    def reduced(w, x):
        p = jax.nn.softmax(x * w)
        return mean(jnp.mean(-jnp.sum(p * jnp.log(p), axis=1)))

    return reduced


def entropy_of_global_frequencies(s):
    def reduced(w, x):
        p = mean(jax.nn.softmax(x * w).mean(0))
        return mean(-jnp.sum(p * jnp.log(p)) + jnp.mean(x * w))

    return reduced


RIGHT = [
    mean_over_own_rows,
    mean_through_the_derivative_of_a_gather,
    shares_through_the_derivative_of_a_gather,
    means_over_the_replicas_through_the_derivative_of_a_gather,
    mean_of_one_loss_of_a_gathered_batch,
    sum_by_example_over_the_global_batch,
    means_by_example_over_the_replicas,
    shares_of_a_sum,
    sum_divided_twice,
    mean_over_the_replicas_of_sums,
    sum_over_a_reduced_count,
    sum_of_sums,
    rate_over_the_local_batch_size,
    noise_on_a_mean_by_example,
    weights_by_the_norms_of_gradients,
    entropies_by_example,
    entropy_of_global_frequencies,
]


@pytest.mark.parametrize("num_replicas", REPLICAS)
@pytest.mark.parametrize("build", RIGHT, ids=lambda f: f.__name__)
def test_a_right_reduction_is_silent(build, num_replicas):
    s = dj.VirtualStrategy(num_replicas)
    reduced = build(s)
    require_silence(s, lambda w, x: w - 0.1 * reduced(w, x), weights(), inputs(s))


def test_parameters_gathered_for_the_loss():
    """Sharded parameters: the derivative of their gather sums the replicas' means."""
    s = dj.VirtualStrategy(3)
    shards = s.distribute_values_from_function(lambda c: np.full(1, 0.5, np.float32))

    def step(shard, x):
        whole = lambda shard: lax.all_gather(shard, s.axis_name, tiled=True)
        grads = jax.grad(lambda shard: jnp.mean((x @ whole(shard) - 1) ** 2))(shard)
        return shard - 0.1 * grads / s.num_replicas_in_sync

    require_silence(s, step, shards, inputs(s))
