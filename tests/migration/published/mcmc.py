"""Markov chains in parallel, as samplers map them: Hamiltonian Monte Carlo, a chain per device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

x = np.random.default_rng(3).normal(size=(32, 3)).astype(np.float32)
y = (x @ np.array([1.0, -2.0, 0.5], np.float32) > 0).astype(np.float32)


def log_density(w):
    logits = x @ w
    return jnp.sum(y * logits - jnp.logaddexp(0.0, logits)) - 0.5 * jnp.sum(w**2)


def leapfrog(w, momentum, step_size):
    gradient = jax.grad(log_density)

    def body(_, carry):
        w, momentum = carry
        momentum = momentum + 0.5 * step_size * gradient(w)
        w = w + step_size * momentum
        return w, momentum + 0.5 * step_size * gradient(w)

    return jax.lax.fori_loop(0, 5, body, (w, momentum))


def transition(carry, key):
    w, step_size = carry
    momentum_key, accept_key = jax.random.split(key)
    momentum = jax.random.normal(momentum_key, w.shape)
    proposal, end = leapfrog(w, momentum, step_size)
    before = log_density(w) - 0.5 * jnp.sum(momentum**2)
    after = log_density(proposal) - 0.5 * jnp.sum(end**2)
    probability = jnp.minimum(1.0, jnp.exp(after - before))
    accepted = jax.random.uniform(accept_key) < probability
    w = jnp.where(accepted, proposal, w)
    step_size = step_size * jnp.exp(0.05 * (jax.lax.pmean(probability, "chain") - 0.8))
    return (w, step_size), (w, probability)


@functools.partial(jax.pmap, axis_name="chain", in_axes=(0, 0, None), static_broadcasted_argnums=3)
def sample(carry, key, temperature, num_samples):
    keys = jax.random.split(key, num_samples)
    carry, (draws, probability) = jax.lax.scan(transition, carry, keys)
    within = draws.var(axis=0) * temperature
    between = jnp.var(jax.lax.all_gather(draws.mean(axis=0), "chain"), axis=0)
    pooled = jax.lax.pmean(within, "chain") + 1e-9
    return carry, draws, jnp.sqrt((pooled + between) / pooled), probability.mean()


def main(num_steps):
    chains = jax.local_device_count()
    key = jax.random.PRNGKey(0)
    carry = (jax.random.normal(key, (chains, 3)), jnp.full(chains, 0.1))
    rhat, acceptance = [], []
    for step in range(num_steps):
        keys = jax.random.split(jax.random.fold_in(key, step), chains)
        carry, draws, statistic, rate = sample(carry, keys, 1.0, 10)
        rhat.append(statistic[0])
        acceptance.append(rate)
    return rhat, acceptance, draws.reshape(-1, 3)
