"""Score-based diffusion on one device, after Equinox's `examples/score_based_diffusion`."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax


class Score(eqx.Module):
    mlp: eqx.nn.MLP
    t1: float

    def __call__(self, t, y):
        return self.mlp(jnp.append(y, t / self.t1))


def single_loss_fn(model, weight, int_beta, data, t, key):
    mean = data * jnp.exp(-0.5 * int_beta(t))
    std = jnp.sqrt(jnp.maximum(1 - jnp.exp(-int_beta(t)), 1e-5))
    noise = jr.normal(key, data.shape)
    pred = model(t, mean + std * noise)
    return weight(t) * jnp.mean((pred + noise / std) ** 2)


def batch_loss_fn(model, weight, int_beta, data, t1, key):
    batch_size = data.shape[0]
    tkey, losskey = jr.split(key)
    losskey = jr.split(losskey, batch_size)
    # Low-discrepancy sampling over t to reduce variance
    t = jr.uniform(tkey, (batch_size,), minval=0, maxval=t1 / batch_size)
    t = t + (t1 / batch_size) * jnp.arange(batch_size)
    loss_fn = jax.vmap(ft.partial(single_loss_fn, model, weight, int_beta))
    return jnp.mean(loss_fn(data, t, losskey))


@eqx.filter_jit
def make_step(model, weight, int_beta, data, t1, key, opt_state, opt_update):
    loss_fn = eqx.filter_value_and_grad(batch_loss_fn)
    loss, grads = loss_fn(model, weight, int_beta, data, t1, key)
    updates, opt_state = opt_update(grads, opt_state)
    model = eqx.apply_updates(model, updates)
    key = jr.split(key, 1)[0]
    return loss, model, key, opt_state


def batches(num_steps):
    random = np.random.default_rng(0)
    for _ in range(num_steps):
        yield random.normal(size=(16, 4)).astype(np.float32)


def main(num_steps):
    model_key, train_key = jr.split(jr.key(5678))
    t1 = 10.0
    model = Score(eqx.nn.MLP(5, 4, 16, 1, key=model_key), t1)
    int_beta = lambda t: t
    weight = lambda t: 1 - jnp.exp(-int_beta(t))
    opt = optax.adabelief(3e-3)
    opt_state = opt.init(eqx.filter(model, eqx.is_inexact_array))
    values = []
    for data in batches(num_steps):
        value, model, train_key, opt_state = make_step(
            model, weight, int_beta, data, t1, train_key, opt_state, opt.update
        )
        values.append(value)
    return values, jax.tree.leaves(eqx.filter(model, eqx.is_array))
