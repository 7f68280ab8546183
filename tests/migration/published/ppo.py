"""Proximal policy optimization on devices, as the Anakin examples have it: rollout and update."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

NUM_ENVS, NUM_STEPS, GAMMA, LAMBDA, CLIP = 4, 8, 0.99, 0.95, 0.2


class Transition(NamedTuple):
    observation: Any
    action: Any
    log_prob: Any
    value: Any
    reward: Any
    done: Any


def env_reset(key):
    return jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)


def env_step(state, action, key):
    position, velocity, angle, spin = state
    force = jnp.where(action == 1, 10.0, -10.0)
    acceleration = (9.8 * jnp.sin(angle) - jnp.cos(angle) * force / 1.1) / 0.7
    state = state + 0.02 * jnp.stack([velocity, force / 1.1, spin, acceleration])
    done = (jnp.abs(state[2]) > 0.2) | (jnp.abs(state[0]) > 2.4)
    return jnp.where(done, env_reset(key), state), 1.0, done


def apply(params, x):
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return hidden @ params["policy"], (hidden @ params["value"])[..., 0]


optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-3))


def loss_fn(params, batch, advantages, targets):
    logits, value = apply(params, batch.observation)
    log_probs = jax.nn.log_softmax(logits)
    log_prob = jnp.take_along_axis(log_probs, batch.action[..., None], -1)[..., 0]
    ratio = jnp.exp(log_prob - batch.log_prob)
    gae = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    actor = -jnp.minimum(ratio * gae, clipped * gae).mean()
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
    return actor + 0.5 * jnp.square(value - targets).mean() - 0.01 * entropy


@partial(jax.pmap, axis_name="device")
def update_step(runner):
    params, opt_state, env_state, key = runner

    def env_loop(carry, _):
        env_state, key = carry
        key, action_key, step_key = jax.random.split(key, 3)
        logits, value = apply(params, env_state)
        action = jax.random.categorical(action_key, logits)
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], -1)[:, 0]
        step_keys = jax.random.split(step_key, NUM_ENVS)
        state, reward, done = jax.vmap(env_step)(env_state, action, step_keys)
        reward = jnp.full(NUM_ENVS, reward)
        return (state, key), Transition(env_state, action, log_prob, value, reward, done)

    (env_state, key), batch = jax.lax.scan(env_loop, (env_state, key), None, NUM_STEPS)
    _, last_value = apply(params, env_state)

    def advantage(carry, transition):
        gae, next_value = carry
        alive = 1 - transition.done
        delta = transition.reward + GAMMA * next_value * alive - transition.value
        gae = delta + GAMMA * LAMBDA * alive * gae
        return (gae, transition.value), gae

    start = (jnp.zeros(NUM_ENVS), last_value)
    _, advantages = jax.lax.scan(advantage, start, batch, reverse=True)

    def epoch(carry, _):
        params, opt_state = carry
        loss, grads = jax.value_and_grad(loss_fn)(
            params, batch, advantages, advantages + batch.value
        )
        grads, loss = jax.lax.pmean((grads, loss), axis_name="device")
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    (params, opt_state), losses = jax.lax.scan(epoch, (params, opt_state), None, 4)
    return (params, opt_state, env_state, key), losses


def main(num_steps):
    devices = jax.local_device_count()
    k1, k2, k3, key = jax.random.split(jax.random.key(0), 4)
    params = {
        "w": 0.5 * jax.random.normal(k1, (4, 16)),
        "b": jnp.zeros(16),
        "policy": 0.1 * jax.random.normal(k2, (16, 2)),
        "value": 0.1 * jax.random.normal(k3, (16, 1)),
    }
    broadcast = lambda x: jnp.broadcast_to(x, (devices, *x.shape))
    keys = jax.random.split(key, (devices, NUM_ENVS))
    runner = (
        jax.tree.map(broadcast, params),
        jax.tree.map(broadcast, optimizer.init(params)),
        jax.vmap(jax.vmap(env_reset))(keys),
        jax.random.split(jax.random.key(1), devices),
    )
    losses = []
    for _ in range(num_steps):
        runner, loss = update_step(runner)
        losses.append(loss[0])
    return losses, jax.tree.map(lambda x: x[0], runner[0]), runner[2]
