"""Differentially private SGD on one device: optax's `examples/differentially_private_sgd`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib


def predict(params, x):
    return jnp.tanh(x @ params["hidden"]) @ params["out"]


def loss_fn(params, batch):
    logits = predict(params, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


tx = contrib.dpsgd(learning_rate=0.15, l2_norm_clip=0.5, noise_multiplier=1.1, seed=1337)


@jax.jit
def train_step(params, opt_state, batch):
    batch = jax.tree.map(lambda x: x[:, None], batch)
    grads = jax.vmap(jax.grad(loss_fn), in_axes=(None, 0))(params, batch)  # of each example
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


@jax.jit
def test_step(params, batch):
    hits = predict(params, batch["image"]).argmax(1) == batch["label"]
    return loss_fn(params, batch), hits.mean() * 100


def batches(num_steps):
    random = np.random.default_rng(0)
    for _ in range(num_steps):
        image = random.normal(size=(16, 6)).astype(np.float32)
        yield {"image": image, "label": (image.sum(1) > 0).astype(np.int32)}


def main(num_steps):
    keys = jax.random.split(jax.random.key(1337))
    shapes = {"hidden": (6, 8), "out": (8, 2)}
    params = {
        name: 0.5 * jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    opt_state = tx.init(params)
    for batch in batches(num_steps):
        params, opt_state = train_step(params, opt_state, batch)
    return test_step(params, batch), params
