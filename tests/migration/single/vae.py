"""A variational autoencoder of linen for one device, after the form of Flax's `examples/vae`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state


class VAE(nn.Module):
    latents: int = 4
    features: int = 16

    def setup(self):
        self.encoder, self.decoder = nn.Dense(16), nn.Dense(16)
        self.mean, self.logvar = nn.Dense(self.latents), nn.Dense(self.latents)
        self.out = nn.Dense(self.features)

    def __call__(self, x, z_rng):
        x = nn.relu(self.encoder(x))
        mean, logvar = self.mean(x), self.logvar(x)
        eps = jax.random.normal(z_rng, logvar.shape)
        z = mean + eps * jnp.exp(0.5 * logvar)
        return self.out(nn.relu(self.decoder(z))), mean, logvar


@jax.vmap
def kl_divergence(mean, logvar):
    return -0.5 * jnp.sum(1 + logvar - jnp.square(mean) - jnp.exp(logvar))


@jax.vmap
def binary_cross_entropy_with_logits(logits, labels):
    return jnp.sum(optax.sigmoid_binary_cross_entropy(logits, labels))


@jax.jit
def train_step(state, batch, z_rng):
    def loss_fn(params):
        recon_x, mean, logvar = state.apply_fn({"params": params}, batch, z_rng)
        bce_loss = binary_cross_entropy_with_logits(recon_x, batch).mean()
        return bce_loss + kl_divergence(mean, logvar).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def batches(num_steps):
    random = np.random.default_rng(0)
    for _ in range(num_steps):
        yield random.integers(0, 2, (16, 16)).astype(np.float32)


def main(num_steps):
    rng, key = jax.random.split(jax.random.key(0))
    model = VAE()
    params = model.init(key, jnp.ones((1, 16)), rng)["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.01))
    losses = []
    for batch in batches(num_steps):
        rng, key = jax.random.split(rng)
        state, loss = train_step(state, batch, key)
        losses.append(loss)
    return losses, state.params
