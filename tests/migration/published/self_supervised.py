"""Self-supervised learning with a target network: moving average, synchronized batch norm."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(16)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name="i")(x)
        return nn.Dense(8)(nn.relu(x))


class Experiment(NamedTuple):
    online: Any
    target: Any
    stats: Any
    opt_state: Any


model = Encoder()
optimizer = optax.lars(0.2, weight_decay=1e-4, momentum=0.9)


def augment(images, key):
    noise = jax.random.normal(key, images.shape)
    return images * jax.random.bernoulli(key, 0.8, images.shape) + 0.1 * noise


def regression_loss(x, y):
    x, y = (v / jnp.linalg.norm(v, axis=-1, keepdims=True) for v in (x, y))
    return jnp.sum((x - y) ** 2, axis=-1)


def loss_fn(online, target, stats, one, two):
    def forward(params, view):
        variables = {"params": params, "batch_stats": stats}
        return model.apply(variables, view, True, mutable=["batch_stats"])

    (first, new), (second, _) = forward(online, one), forward(online, two)
    (first_target, _), (second_target, _) = forward(target, one), forward(target, two)
    stop = jax.lax.stop_gradient
    loss = regression_loss(first, stop(second_target)) + regression_loss(second, stop(first_target))
    return loss.mean(), new["batch_stats"]


def update_fn(state, images, key, step):
    key = jax.random.fold_in(key, jax.lax.axis_index("i"))
    one, two = (augment(images, k) for k in jax.random.split(key))
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, stats), grads = grad_fn(state.online, state.target, state.stats, one, two)
    grads = jax.lax.psum(jax.tree.map(lambda g: g / jax.lax.psum(1, "i"), grads), "i")
    updates, opt_state = optimizer.update(grads, state.opt_state, state.online)
    online = optax.apply_updates(state.online, updates)
    tau = 1 - (1 - 0.99) * (jnp.cos(jnp.pi * step / 100) + 1) / 2
    target = jax.tree.map(lambda t, o: tau * t + (1 - tau) * o, state.target, online)
    metrics = jax.lax.pmean({"loss": loss, "tau": tau}, "i")
    return Experiment(online, target, stats, opt_state), metrics


def main(num_steps):
    devices = jax.local_device_count()
    random = np.random.default_rng(5)
    variables = model.init(jax.random.PRNGKey(0), jnp.ones((1, 12)), True)
    params, stats = variables["params"], variables["batch_stats"]
    state = Experiment(params, params, stats, optimizer.init(params))
    state = jax.device_put(jax.tree.map(lambda x: jnp.stack([x] * devices), state))
    update = jax.pmap(update_fn, axis_name="i", in_axes=(0, 0, None, None), donate_argnums=(0,))
    history = []
    for step in range(num_steps):
        images = random.normal(size=(devices, 8, 12)).astype(np.float32)
        state, metrics = update(state, images, jax.random.PRNGKey(step), step)
        history.append(jax.tree.map(lambda x: x[0], metrics))
    return history, jax.tree.map(lambda x: x[0], (state.target, state.stats))
