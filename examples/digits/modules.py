"""Trains a network of Flax NNX modules: an `nnx.jit` training loop, put under a strategy.

    python examples/digits/modules.py --strategy mirrored --replicas 8

Modules, optimizer and metrics change in place, as in any NNX loop. What distjax adds is
marked: where the objects are made, the reduction of the gradients, and `run`.
"""

import jax
from flax import nnx

import data
import distjax as dj
import loop
import model
import options
import report


class ConvNet(nnx.Module):
    """Three convolutions with batch normalization, then a linear layer, as in `model.py`.

    Args:
        shape: `(height, width, 1)` of an image.
        axis_name: The axis over which batch statistics are averaged, or None.
        rngs: Has a stream "params".
    """

    def __init__(self, shape: tuple[int, ...], axis_name: str | None, *, rngs: nnx.Rngs):
        height, width, features = shape
        self.convolutions, self.norms = nnx.List(), nnx.List()
        for outputs, stride in ((16, 1), (32, 1), (32, 2)):
            self.convolutions.append(
                nnx.Conv(features, outputs, (3, 3), stride, use_bias=False, rngs=rngs)
            )
            self.norms.append(nnx.BatchNorm(outputs, momentum=0.9, axis_name=axis_name, rngs=rngs))
            features, height, width = outputs, -(-height // stride), -(-width // stride)
        self.linear = nnx.Linear(height * width * features, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits `[B, 10]` of images `[B, height, width, 1]`."""
        x = images
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = nnx.silu(norm(convolution(x)))
        return self.linear(x.reshape(len(x), -1))


def loss_fn(network: ConvNet, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross entropy `[]`."""
    return model.mean_loss(network(images), labels)


def train_step(network, optimizer, images, labels) -> jax.Array:
    """One replica's part of a training step; the mean loss over all replicas."""
    loss, grads = nnx.value_and_grad(loss_fn)(network, images, labels)
    loss, grads = dj.get_replica_context().all_reduce("mean", (loss, grads))  # distjax
    optimizer.update(network, grads)
    return loss


def test_step(network, accuracy, images, labels) -> None:
    """One replica's part of a test step: counts right predictions."""
    accuracy.update(network(images), labels, mask=labels != data.PADDING_LABEL)


def plan(strategy: dj.Strategy):
    """What `python -m distjax plan examples/digits/modules.py:plan` compiles."""
    images, labels = data.blank(8 * strategy.num_replicas_in_sync)
    with strategy.scope():
        shape, axis_name = images.shape[1:], strategy.axis_name
        network = dj.flax.create(lambda: ConvNet(shape, axis_name, rngs=nnx.Rngs(0)))
        optimizer = nnx.Optimizer(network, model.make_optimizer(220), wrt=nnx.Param)

    def train(images, labels):
        return strategy.run(train_step, args=(network, optimizer, images, labels))

    return train, (dj.plan.batch(images), dj.plan.batch(labels))


def main() -> None:
    """Trains, tests, reports."""
    chosen = options.parse(__doc__)
    strategy = options.make_strategy(chosen.strategy, chosen.replicas)
    splits = data.load(chosen.data)
    num_steps = chosen.epochs * data.steps_per_epoch(splits[0], chosen.global_batch)

    with strategy.scope():  # distjax
        shape, axis_name = splits[0].images.shape[1:], strategy.axis_name
        network = dj.flax.create(  # distjax
            lambda: ConvNet(shape, axis_name, rngs=nnx.Rngs(chosen.seed))
        )
        optimizer = nnx.Optimizer(network, model.make_optimizer(num_steps), wrt=nnx.Param)
        accuracy = dj.metrics.Accuracy()

    def train(images, labels):
        network.train()
        return strategy.run(train_step, args=(network, optimizer, images, labels))  # distjax

    def test(batches):
        network.eval()
        accuracy.reset()
        for batch in batches:
            strategy.run(test_step, args=(network, accuracy, *batch))  # distjax
        return float(accuracy.result())

    report.write(chosen, strategy, loop.fit(chosen, strategy, splits, train, test))


if __name__ == "__main__":
    main()
