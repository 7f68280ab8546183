"""Adversarial training on one device, after the form of optax's `examples/adversarial_training`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

EPSILON = 0.1
L2_REG = 0.01


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(4, (3, 3))(x))
        x = nn.avg_pool(x, (2, 2), (2, 2))
        return nn.Dense(3)(x.reshape(x.shape[0], -1))


net = CNN()
optimizer = optax.adam(0.01)


@jax.jit
def accuracy(params, data):
    inputs, labels = data
    logits = net.apply({"params": params}, inputs)
    return jnp.mean(jnp.argmax(logits, axis=-1) == labels)


@jax.jit
def loss_fun(params, l2reg, data):
    inputs, labels = data
    logits = net.apply({"params": params}, inputs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses) + 0.5 * l2reg * optax.global_norm(params) ** 2


@jax.jit
def pgd_attack(image, label, params, epsilon=0.1, maxiter=3):
    perturbation = jnp.zeros_like(image)

    def adversarial_loss(perturbation):
        return loss_fun(params, 0, (image + perturbation, label))

    for _ in range(maxiter):
        sign_grad = jnp.sign(jax.grad(adversarial_loss)(perturbation))
        perturbation += (2 * epsilon / maxiter) * sign_grad
        perturbation = jnp.clip(perturbation, -epsilon, epsilon)
    return jnp.clip(image + perturbation, 0, 1)


@jax.jit
def train_step(params, opt_state, batch):
    images, labels = batch
    adversarial = pgd_attack(images, labels, params, epsilon=EPSILON)
    grads = jax.grad(loss_fun)(params, L2_REG, (adversarial, labels))
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state


def batches(num_steps):
    random = np.random.default_rng(0)
    for _ in range(num_steps):
        yield random.random((16, 6, 6, 1)).astype(np.float32), random.integers(0, 3, 16)


def dataset_stats(params, data):
    images, labels = data
    attacked = pgd_attack(images, labels, params, epsilon=EPSILON)
    return accuracy(params, data), accuracy(params, (attacked, labels))


def main(num_steps):
    params = net.init(jax.random.key(0), jnp.zeros((1, 6, 6, 1)))["params"]
    opt_state = optimizer.init(params)
    for batch in batches(num_steps):
        params, opt_state = train_step(params, opt_state, batch)
    return dataset_stats(params, batch), params
