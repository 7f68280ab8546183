"""Trains a classifier of handwritten digits by local SGD, for several numbers of local steps.

    python examples/local_sgd/train.py

The strategy is in `local_sgd.py`. A step is the same for any number of them.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import distjax as dj
from local_sgd import LocalSGDStrategy

NUM_TRAIN, GLOBAL_BATCH, LEARNING_RATE = 1437, 64, 0.3


def split_digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Images `[n, 64]` in 0 to 1 and labels `[n]`: 1437 to train on, 360 to test on."""
    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:NUM_TRAIN], order[NUM_TRAIN:]
    return (images[train], digits.target[train]), (images[test], digits.target[test])


def batches(images: np.ndarray, labels: np.ndarray, num_steps: int):
    """Global batches, drawn at random."""
    rng = np.random.default_rng(1)
    for _ in range(num_steps):
        rows = rng.integers(len(images), size=GLOBAL_BATCH)
        yield images[rows], labels[rows]


class Classifier:
    """Two layers, in variables of the active strategy."""

    def __init__(self, seed: int, hidden: int = 64):
        first, second = jax.random.split(jax.random.key(seed))
        scaled_normal = jax.nn.initializers.he_normal()
        self.variables = [
            dj.Variable(scaled_normal(first, (64, hidden)), name="hidden/kernel"),
            dj.Variable(jnp.zeros(hidden), name="hidden/bias"),
            dj.Variable(scaled_normal(second, (hidden, 10)), name="output/kernel"),
            dj.Variable(jnp.zeros(10), name="output/bias"),
        ]

    def values(self) -> list[jax.Array]:
        """The parameters as the current context sees them."""
        return [variable.value for variable in self.variables]

    def train_step(self, images: jax.Array, labels: jax.Array) -> jax.Array:
        """In replica context: one step on the replica's own copy; returns its loss."""
        loss, gradients = jax.value_and_grad(mean_loss)(self.values(), images, labels)
        for variable, gradient in zip(self.variables, gradients, strict=True):
            variable.assign_sub(LEARNING_RATE * gradient)
        return loss


def logits_of(parameters: list[jax.Array], images: jax.Array) -> jax.Array:
    """Scores `[n, 10]` of images `[n, 64]`."""
    hidden_kernel, hidden_bias, kernel, bias = parameters
    return jax.nn.silu(images @ hidden_kernel + hidden_bias) @ kernel + bias


def mean_loss(parameters: list[jax.Array], images: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross entropy."""
    log_probabilities = jax.nn.log_softmax(logits_of(parameters, images))
    return -jnp.take_along_axis(log_probabilities, labels[:, None], axis=1).mean()


def train(local_steps: int, num_steps: int) -> tuple[float, float, int]:
    """Trains on all devices; returns the last loss, the test accuracy and the averaging count."""
    train_set, (test_images, test_labels) = split_digits()
    strategy = LocalSGDStrategy(local_steps)
    with strategy.scope():
        classifier = Classifier(seed=0)

    @dj.jit
    def local_step(batch):
        with dj.expect("replicas train apart and are averaged every few steps"):
            losses = strategy.run(classifier.train_step, args=batch)
        return strategy.reduce("mean", losses)

    average = dj.jit(lambda: strategy.average(classifier.variables))
    num_averages = 0
    data = strategy.distribute_dataset(list(batches(*train_set, num_steps)))
    for step, batch in enumerate(data, start=1):
        loss = local_step(batch)
        if step % strategy.local_steps == 0 or step == num_steps:
            average()
            num_averages += 1
    predicted = logits_of(classifier.values(), jnp.asarray(test_images)).argmax(axis=1)
    return float(loss), float(np.mean(predicted == test_labels)), num_averages


def main() -> None:
    """Trains once for each number of local steps; prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--local-steps", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--steps", type=int, default=600, help="training steps (600)")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)  # has no effect on other platforms
    print("local steps  averages  last loss  test accuracy")
    for local_steps in options.local_steps:
        loss, accuracy, num_averages = train(local_steps, options.steps)
        print(f"{local_steps:11d}  {num_averages:8d}  {loss:9.4f}  {accuracy:13.2%}")


if __name__ == "__main__":
    main()
