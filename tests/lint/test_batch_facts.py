"""Facts of batches: right programs in which a local mean or sum is one of the global batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
from tests.wrong_programs.program import (
    ctx,
    inputs,
    mean,
    require_silence,
    require_silence_at,
    total,
    weights,
)

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


@pytest.mark.parametrize("complete", COMPLETIONS, ids=lambda f: f.__name__)
def test_the_sum_of_parts_of_one_loss(complete):
    def make(s):
        def loss(w, x):
            everyone = complete(s, embedded(w, x))
            return jnp.mean(contrast(everyone, everyone))

        return lambda w, x: w - 0.1 * total(jax.grad(loss)(w, x)), weights(), inputs(s)

    require_silence_at(REPLICAS, make)
    s = dj.VirtualStrategy(3)
    step, _, x = make(s)
    whole = lambda w, x: jnp.mean(contrast(embedded(w, x), embedded(w, x)))
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


# -- randomness that is meant to be equal --------------------------------------------


def one_brightness_for_all(s):
    brightness = lambda: jax.random.uniform(jax.random.key(0))
    return lambda w, x: mean(summed_gradient(w, x * brightness() + brightness()))


def one_direction_for_all(s):
    """A gradient by two evaluations, in a direction that all replicas share."""

    def reduced(w, x):
        by, shift = jax.random.normal(jax.random.key(0), (2,)), jax.random.normal(jax.random.key(1))
        loss = lambda t: jnp.mean((x @ (w + t * by[0]) + t * shift - 1) ** 2)
        return mean(loss(0.1) - loss(-0.1)) * by[0]

    return reduced


def one_mask_of_the_features(s):
    """As many features as examples."""

    def reduced(w, x):
        kept = jax.random.bernoulli(jax.random.key(0), 0.5, (x.shape[0],))
        square = x @ x.T
        return mean(jnp.sum(jnp.where(kept, square, 0)) + jnp.sum(kept * square)) * w

    return reduced


# -- what is computed of one example --------------------------------------------------


def _of_each(measure):
    """A mean over the examples, one after the other, of a function of each."""
    return lambda s: lambda w, x: mean(jnp.mean(jax.lax.map(lambda row: measure(w, row), x)))


root_mean_squares = _of_each(lambda w, row: jnp.sqrt(jnp.mean((row * w) ** 2)))
perplexities = _of_each(lambda w, row: jnp.exp(jnp.mean(row * w)))
quotients = _of_each(lambda w, row: jnp.sum(row * w) / (jnp.sum(row**2) + 1))
variances = _of_each(lambda w, row: jnp.mean((row - jnp.mean(row)) ** 2))
OF_EXAMPLES = {
    "root_mean_squares": root_mean_squares,
    "perplexities": perplexities,
    "quotients": quotients,
    "variances": variances,
}


@pytest.mark.parametrize("build", OF_EXAMPLES.values(), ids=OF_EXAMPLES)
@pytest.mark.parametrize("count", (1, 4))
def test_what_is_computed_of_one_example(build, count):
    s = dj.VirtualStrategy(2)
    draw = lambda c: np.random.default_rng(c.replica_id_in_sync_group).normal(size=(count, 3))
    x = s.distribute_values_from_function(lambda c: draw(c).astype(np.float32))
    require_silence(s, build(s), weights(), x)


@pytest.mark.parametrize("measure", OF_EXAMPLES)
def test_the_one_example_of_a_replica(measure):
    s = dj.VirtualStrategy(2)
    draw = lambda c: np.random.default_rng(c.replica_id_in_sync_group).normal(size=(1, 3))
    x = s.distribute_values_from_function(lambda c: draw(c).astype(np.float32))
    of_batch = {
        "root_mean_squares": lambda x: jnp.sqrt(jnp.mean(x**2)),
        "perplexities": lambda x: jnp.exp(jnp.mean(x)),
        "quotients": lambda x: jnp.sum(x) / (jnp.sum(x**2) + 1),
        "variances": lambda x: jnp.mean((x - jnp.mean(x)) ** 2),
    }[measure]
    require_silence(s, lambda w, x: mean(of_batch(x * w)), weights(), x)


RIGHT = [
    one_brightness_for_all,
    one_direction_for_all,
    one_mask_of_the_features,
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


@pytest.mark.parametrize("build", RIGHT, ids=lambda f: f.__name__)
def test_a_right_reduction_is_silent(build):
    def make(s):
        reduced = build(s)
        return lambda w, x: w - 0.1 * reduced(w, x), weights(), inputs(s)

    require_silence_at(REPLICAS, make)


def test_parameters_gathered_for_the_loss():
    """Sharded parameters: the derivative of their gather sums the replicas' means."""
    s = dj.VirtualStrategy(3)
    shards = s.distribute_values_from_function(lambda c: np.full(1, 0.5, np.float32))

    def step(shard, x):
        whole = lambda shard: lax.all_gather(shard, s.axis_name, tiled=True)
        grads = jax.grad(lambda shard: jnp.mean((x @ whole(shard) - 1) ** 2))(shard)
        return shard - 0.1 * grads / s.num_replicas_in_sync

    require_silence(s, step, shards, inputs(s))


# -- gradients that are equal beside others that differ ---------------------------


def penalized(params, x):
    loss = jnp.mean((x @ params["w"] - 1.0) ** 2)
    return loss + 1e-4 * sum(jnp.sum(p**2) for p in params.values())


def descended(params, grads):
    return {name: p - 0.1 * grads[name] for name, p in params.items()}


@pytest.mark.parametrize("order", [("w", "unused"), ("unused", "w")])
def test_a_parameter_that_only_a_penalty_depends_on(order):
    """Its gradient is equal on every replica, whatever the batches."""
    s = dj.VirtualStrategy(2)
    params = dict.fromkeys(order, weights())
    gradients = lambda params, x: jax.grad(penalized)(params, x)
    step = lambda params, x: descended(params, mean(gradients(params, x)))
    require_silence(s, step, params, inputs(s))

    def outside(params, x):
        return descended(params, s.reduce("mean", s.run(gradients, args=(params, x))))

    assert dj.check(outside, params, inputs(s), rules_only=True) is None
    with s.scope():
        variables = jax.tree.map(dj.Variable, params)
    optimizer = dj.optim.Optimizer(optax.sgd(0.1), "mean")
    optimizer.init(variables)

    def updated(x):
        grads = gradients(jax.tree.map(lambda v: v.value, variables), x)
        optimizer.apply_gradients([(grads, variables)])

    require_silence(s, updated, inputs(s))
