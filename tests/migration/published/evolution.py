"""Evolution strategies: each device evaluates members of the population, all update alike."""

from functools import partial

import jax
import jax.numpy as jnp
import optax

POPULATION, SIGMA, SIZE = 64, 0.1, 12
optimizer = optax.adam(0.05)


def fitness(theta, key):
    noise = 0.01 * jax.random.normal(key)
    shifted = theta - jnp.linspace(-1, 1, SIZE)
    return -jnp.sum(shifted**2 - jnp.cos(6 * shifted)) + noise


def centered_rank(x):
    ranks = jnp.argsort(jnp.argsort(x.ravel())).reshape(x.shape)
    return ranks / (x.size - 1) - 0.5


@partial(jax.pmap, axis_name="pop", in_axes=(None, None, 0), out_axes=(0, 0, None))
def generation(theta, opt_state, key):
    members = POPULATION // jax.lax.psum(1, "pop") // 2
    noise_key, eval_key = jax.random.split(key)
    noise = jax.random.normal(noise_key, (members, SIZE))
    candidates = theta + SIGMA * jnp.concatenate([noise, -noise])
    scores = jax.vmap(fitness)(candidates, jax.random.split(eval_key, 2 * members))
    everyone = jax.lax.all_gather(scores, "pop")
    ranks = centered_rank(everyone)[jax.lax.axis_index("pop")]
    weights = ranks[:members] - ranks[members:]
    gradient = -jax.lax.psum(weights @ noise, "pop") / (POPULATION * SIGMA)
    updates, opt_state = optimizer.update(gradient, opt_state)
    metrics = {"mean": everyone.mean(), "best": jax.lax.pmax(scores.max(), "pop")}
    return optax.apply_updates(theta, updates), opt_state, metrics


def main(num_steps):
    devices = jax.local_device_count()
    theta, key = jnp.zeros(SIZE), jax.random.key(7)
    opt_state, history = optimizer.init(theta), []
    for step in range(num_steps):
        keys = jax.random.split(jax.random.fold_in(key, step), devices)
        theta, opt_state, metrics = generation(theta, opt_state, keys)
        theta, opt_state = jax.tree.map(lambda x: x[0], (theta, opt_state))
        history.append(metrics)
    return history, theta
