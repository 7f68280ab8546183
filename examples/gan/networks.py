"""Generator and discriminator: small dense networks whose parameters are variables."""

import jax
import jax.numpy as jnp

import distjax as dj

NOISE = 16


class Dense:
    """Layers of the given widths, with leaky ReLU between them.

    Args:
        name: The prefix of the variables' names.
        widths: `[inputs, ..., outputs]`.
        key: Draws the initial kernels.
    """

    def __init__(self, name: str, widths: list[int], key: jax.Array):
        kernel = jax.nn.initializers.he_normal()
        keys = jax.random.split(key, len(widths) - 1)
        self.variables = []
        for i, (inputs, outputs) in enumerate(zip(widths, widths[1:], strict=False)):
            self.variables += [
                dj.Variable(kernel(keys[i], (inputs, outputs)), name=f"{name}/{i}/kernel"),
                dj.Variable(jnp.zeros(outputs), name=f"{name}/{i}/bias"),
            ]

    def values(self) -> list[jax.Array]:
        """The parameters as the current context sees them."""
        return [variable.value for variable in self.variables]


def apply(parameters: list[jax.Array], x: jax.Array) -> jax.Array:
    """`[n, outputs]` of inputs `[n, inputs]`."""
    *hidden, kernel, bias = parameters
    for inner_kernel, inner_bias in zip(hidden[::2], hidden[1::2], strict=True):
        x = jax.nn.leaky_relu(x @ inner_kernel + inner_bias, 0.2)
    return x @ kernel + bias


def generate(parameters: list[jax.Array], noise: jax.Array) -> jax.Array:
    """Images `[n, num_pixels]` in 0 to 1 of noise `[n, 16]`."""
    return jax.nn.sigmoid(apply(parameters, noise))


def generator_loss(generator, discriminator, noise) -> jax.Array:
    """How far the discriminator is from mistaking generated images for real ones."""
    scores = apply(discriminator, generate(generator, noise))
    return jax.nn.softplus(-scores).mean()


def discriminator_loss(discriminator, generator, images, noise) -> jax.Array:
    """How far the discriminator is from telling real images from generated ones."""
    real = apply(discriminator, images)
    fake = apply(discriminator, generate(generator, noise))
    return jax.nn.softplus(-real).mean() + jax.nn.softplus(fake).mean()
