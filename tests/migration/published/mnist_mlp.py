"""A multi-layer perceptron in pure functions with optax, as haiku's and optax's examples are."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax


class TrainingState(NamedTuple):
    params: dict
    avg_params: dict
    opt_state: optax.OptState


def init_net(rng):
    sizes, params = (16, 32, 16, 10), {}
    for i, (m, n) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
        rng, key = jax.random.split(rng)
        w = jax.random.truncated_normal(key, -2, 2, (m, n)) / np.sqrt(m)
        params[f"linear_{i}"] = {"w": w, "b": jnp.zeros(n)}
    return params


def net(params, images):
    x = images.astype(jnp.float32) / 255.0
    for i in range(len(params)):
        x = x @ params[f"linear_{i}"]["w"] + params[f"linear_{i}"]["b"]
        x = jax.nn.relu(x) if i < len(params) - 1 else x
    return x


optimizer = optax.adam(1e-3)


def loss(params, images, labels):
    l2 = 0.5 * sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))
    log_probs = jax.nn.log_softmax(net(params, images))
    return -jnp.mean(jnp.sum(jax.nn.one_hot(labels, 10) * log_probs, axis=-1)) + 1e-4 * l2


@functools.partial(jax.pmap, axis_name="i", donate_argnums=0)
def update(state, images, labels):
    value, grads = jax.value_and_grad(loss)(state.params, images, labels)
    grads, value = jax.lax.pmean((grads, value), axis_name="i")
    updates, opt_state = optimizer.update(grads, state.opt_state)
    params = optax.apply_updates(state.params, updates)
    avg_params = optax.incremental_update(params, state.avg_params, step_size=0.001)
    return TrainingState(params, avg_params, opt_state), value


@functools.partial(jax.pmap, axis_name="i")
def evaluate(params, images, labels):
    correct = jnp.sum(jnp.argmax(net(params, images), axis=-1) == labels)
    return jax.lax.psum(correct, "i") / (jax.lax.psum(1, "i") * labels.size)


def main(num_steps):
    num_devices = jax.local_device_count()
    random = np.random.default_rng(1)
    params = init_net(jax.random.PRNGKey(42))
    state = TrainingState(params, params, optimizer.init(params))
    state = jax.tree.map(lambda x: jnp.stack([x] * num_devices), state)
    losses = []
    for _ in range(num_steps):
        images = random.integers(0, 256, size=(num_devices, 4, 16)).astype(np.uint8)
        labels = random.integers(0, 10, size=(num_devices, 4))
        state, value = update(state, images, labels)
        losses.append(value[0])
    accuracy = evaluate(state.avg_params, images, labels)[0]
    return losses, accuracy, jax.tree.map(lambda x: x[0], state.params)
