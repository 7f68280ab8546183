"""Trains a small network on handwritten digits in any number of processes, also after a stop.

    distjax launch --processes 2 --max-restarts 3 examples/pod/train.py --checkpoints runs/digits

The same file runs alone, under the launcher, and under Slurm, JobSet and Cloud TPU VMs, as the
files beside it show: `dj.initialize` finds out where it is.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import distjax as dj

BATCH = 96  # of all replicas together: 1, 2, 3, 4, 6, 8, 12, ... of them


def make_batches(num_steps: int):
    """Global batches of images [G, 64] and labels [G], the same on every process."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0)
    for _ in range(num_steps):
        rows = order.integers(len(images), size=BATCH)
        yield (images[rows] / 16).astype(np.float32), labels[rows].astype(np.int32)


def main() -> None:
    """Trains up to the last step, from the latest checkpoint on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--checkpoints", help="a directory that all processes share; none: no saves"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-every", type=int, default=50)
    chosen = parser.parse_args()

    dj.initialize()
    strategy = dj.MultiWorkerMirroredStrategy()
    draw, mean = np.random.default_rng(1), dj.VariableAggregation.MEAN
    with strategy.scope():
        hidden = dj.Variable(draw.normal(size=(64, 64)).astype(np.float32) / 8, aggregation=mean)
        out = dj.Variable(draw.normal(size=(64, 10)).astype(np.float32) / 8, aggregation=mean)

    def step(images: jax.Array, labels: jax.Array) -> jax.Array:
        """One replica's part of a step of gradient descent; its mean loss."""

        def loss_of(hidden: jax.Array, out: jax.Array) -> jax.Array:
            scores = jax.nn.log_softmax(jnp.tanh(images @ hidden) @ out)
            return -jnp.mean(scores[jnp.arange(len(labels)), labels])

        loss, gradients = jax.value_and_grad(loss_of, argnums=(0, 1))(hidden.value, out.value)
        for variable, gradient in zip((hidden, out), gradients, strict=True):
            variable.assign(variable.value - 0.5 * gradient)  # MEAN: that of all replicas
        return loss

    train = dj.jit(lambda batch: strategy.reduce("mean", strategy.run(step, args=batch)))
    data = iter(strategy.distribute_dataset(make_batches(chosen.steps)))
    state = {"hidden": hidden, "out": out, "data": data}
    if chosen.checkpoints is None:
        for _ in range(chosen.steps):
            loss = train(next(data))
        print(f"step {chosen.steps}: loss {float(loss):.6f}")
        return
    with (
        dj.checkpoint.Checkpointer(chosen.checkpoints, max_to_keep=3) as checkpointer,
        dj.launch.Job(checkpointer, state, save_every=chosen.save_every) as job,
    ):
        for number in job.steps(chosen.steps):
            loss = train(next(data))
            if (number + 1) % chosen.save_every == 0 and jax.process_index() == 0:
                print(f"step {number + 1}: loss {float(loss):.6f}", flush=True)
        if jax.process_index() == 0:
            came = "the start" if job.restored_step is None else f"step {job.restored_step}"
            print(f"{job.step} steps, in this run from {came}")


if __name__ == "__main__":
    main()
