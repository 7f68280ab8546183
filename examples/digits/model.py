"""The network, its loss and its optimizer: plain Flax and optax."""

from typing import Any

import flax.linen as nn
import jax
import optax


class ConvNet(nn.Module):
    """Three convolutions with batch normalization, then a linear layer.

    The activation is smooth on purpose. Many pixels are blank in every image, so thousands of
    activations are exactly equal. With a kink, as in `relu`, the rounding of one sum can push all
    of them across it at once, and loss curves that began 1e-7 apart are soon 1e-4 apart. With
    `silu` rounding stays rounding, and every strategy gives the same curve.

    Attributes:
        axis_name: The axis over which batch statistics are averaged: `strategy.axis_name`, which
            is None where there is no axis.
    """

    axis_name: str | None = None

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        """Logits `[B, 10]` of images `[B, height, width, 1]`."""
        x = images
        for features, stride in ((16, 1), (32, 1), (32, 2)):
            x = nn.Conv(features, kernel_size=(3, 3), strides=stride, use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name=self.axis_name)(
                x
            )
            x = nn.silu(x)
        return nn.Dense(10)(x.reshape(len(x), -1))


def initialize(network: ConvNet, images: jax.Array, seed: int) -> dict[str, Any]:
    """The `params` and `batch_stats` before the first step, for images of this shape."""
    key = jax.random.key(seed, impl="rbg")  # compiles in a third of the default's time
    return jax.jit(lambda key: network.init(key, images[:1], train=False))(key)


def mean_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross entropy `[]` of logits `[B, 10]` against labels `[B]`."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make_optimizer(num_steps: int) -> optax.GradientTransformation:
    """Gradient descent with momentum, its rate falling to zero over `num_steps`."""
    return optax.sgd(optax.cosine_decay_schedule(0.05, num_steps), momentum=0.9)
