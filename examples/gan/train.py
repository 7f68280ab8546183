"""Trains a generative adversarial network on handwritten digits: two models, two optimizers.

    python examples/gan/train.py --strategy mirrored --replicas 8

Each replica has its own noise and images. One step updates the discriminator, then the
generator, each with an optimizer whose slot variables live beside the variables that it trains.
"""

import argparse
import math
from pathlib import Path

import jax
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

import distjax as dj
import networks

GLOBAL_BATCH = 64
OUT = Path(__file__).parent / "out"
STRATEGIES = {
    "mirrored": lambda replicas: dj.MirroredStrategy(jax.devices()[:replicas]),
    "virtual": dj.VirtualStrategy,
    "sharded": lambda replicas: dj.ShardedStrategy(jax.devices()[:replicas], min_split_bytes=0),
    "one_device": lambda _: dj.OneDeviceStrategy(),
}


class Game:
    """Both players, and one replica's part of a step."""

    def __init__(self, num_pixels: int, seed: int):
        key, inner = jax.random.split(jax.random.key(seed))
        self.generator = networks.Dense("generator", [networks.NOISE, 128, 128, num_pixels], key)
        self.discriminator = networks.Dense("discriminator", [num_pixels, 128, 64, 1], inner)
        # The mean over replicas of mean losses is the mean over the global batch.
        self.generator_optimizer = dj.optim.Optimizer(optax.adam(1e-3, b1=0.5), "mean")
        self.discriminator_optimizer = dj.optim.Optimizer(optax.adam(1e-3, b1=0.5), "mean")
        self.generator_optimizer.init(self.generator.variables)
        self.discriminator_optimizer.init(self.discriminator.variables)

    def step(self, images: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """In replica context: updates both players; returns their losses over the global batch."""
        context = dj.get_replica_context()
        first, second = jax.random.split(context.fold_in(key))  # each replica draws its own noise
        noise = jax.random.normal(first, (len(images), networks.NOISE))
        discriminator_loss, gradients = jax.value_and_grad(networks.discriminator_loss)(
            self.discriminator.values(), self.generator.values(), images, noise
        )
        self.discriminator_optimizer.apply_gradients(
            zip(gradients, self.discriminator.variables, strict=True)
        )
        noise = jax.random.normal(second, noise.shape)
        generator_loss, gradients = jax.value_and_grad(networks.generator_loss)(
            self.generator.values(), self.discriminator.values(), noise
        )
        self.generator_optimizer.apply_gradients(
            zip(gradients, self.generator.variables, strict=True)
        )
        return context.all_reduce("mean", (discriminator_loss, generator_loss))

    def draw(self, count: int, seed: int) -> np.ndarray:
        """Generated images `[count, num_pixels]`."""
        noise = jax.random.normal(jax.random.key(seed), (count, networks.NOISE))
        return np.asarray(networks.generate(self.generator.values(), noise))


def load(path: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Real images `[n, num_pixels]` in 0 to 1 and their labels `[n]`.

    Args:
        path: An `.npz` file with square images `x_train` `[n, side, side]` in 0 to 255 and
            labels `y_train`, as MNIST is distributed. None: the digits of scikit-learn.
    """
    if path is None:
        digits = load_digits()
        return (digits.data / 16).astype(np.float32), digits.target
    with np.load(path) as file:
        images = file["x_train"]
        return (images.reshape(len(images), -1) / 255).astype(np.float32), file["y_train"]


def batches(images: np.ndarray, num_steps: int, seed: int):
    """Global batches of real images `[64, num_pixels]`, drawn at random."""
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        yield images[rng.integers(len(images), size=GLOBAL_BATCH)]


def judged(drawn: np.ndarray, images: np.ndarray, labels: np.ndarray) -> tuple[float, int]:
    """How sure a classifier of real images is of generated ones, and how many classes it sees."""
    judge = LogisticRegression(max_iter=2000).fit(images[:2000], labels[:2000])
    probabilities = judge.predict_proba(drawn)
    return float(probabilities.max(axis=1).mean()), len(set(probabilities.argmax(axis=1)))


def save_picture(images: np.ndarray, path: Path) -> None:
    """Saves 8 rows of 8 images as one picture."""
    figure = Figure(figsize=(4, 4), layout="constrained")
    axes = figure.subplots()
    side = math.isqrt(images.shape[1])
    rows = images[:64].reshape(8, 8, side, side).transpose(0, 2, 1, 3).reshape(8 * side, 8 * side)
    axes.imshow(rows, cmap="gray_r", vmin=0, vmax=1)
    axes.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main() -> None:
    """Trains, draws, asks the judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", choices=STRATEGIES, default="mirrored")
    parser.add_argument("--replicas", type=int, default=8, help="must divide 64 (8)")
    parser.add_argument("--steps", type=int, default=3000, help="training steps (3000)")
    parser.add_argument("--data", type=Path, metavar="FILE", help="an .npz file such as MNIST's")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.replicas < 1 or GLOBAL_BATCH % options.replicas:
        parser.error(f"--replicas {options.replicas} does not divide a batch of {GLOBAL_BATCH}")
    jax.config.update("jax_num_cpu_devices", options.replicas)  # no effect on other platforms
    strategy = STRATEGIES[options.strategy](options.replicas)
    images, labels = load(options.data)
    with strategy.scope():
        game = Game(images.shape[1], options.seed)

    @dj.jit
    def train(images, key):
        return strategy.run(game.step, args=(images, key))

    key = jax.random.key(options.seed)
    data = strategy.distribute_dataset(list(batches(images, options.steps, options.seed)))
    for number, batch in enumerate(data):
        losses = train(batch, jax.random.fold_in(key, number))
        if (number + 1) % 500 == 0:
            print(f"step {number + 1}: discriminator {losses[0]:.3f}, generator {losses[1]:.3f}")
    drawn = game.draw(256, options.seed)
    picture = OUT / f"{options.strategy}.png"
    save_picture(drawn, picture)
    sure, classes = judged(drawn, images, labels)
    print(f"picture: {picture}")
    print(
        f"{options.strategy}: a judge is {sure:.0%} sure of the images, and sees {classes} digits"
    )


if __name__ == "__main__":
    main()
