"""A training run to be killed: it saves as it goes, and goes on where the last save was.

    python -m tests.drills.training DIRECTORY

It counts on the devices what may be neither lost nor done twice: steps applied, and for each
example how often it was used. Process 0 prints a line of JSON for each thing that happens.
"""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

import distjax as dj

NUM_STEPS, BATCH, WIDTH = 20, 16, 32
NUM_EXAMPLES = NUM_STEPS * BATCH
SUM, MEAN = dj.VariableAggregation.SUM, dj.VariableAggregation.MEAN
FIRST = dj.VariableAggregation.ONLY_FIRST_REPLICA


def make_batches() -> list[dict[str, np.ndarray]]:
    """The global batches `[G, ...]`, each example once."""
    rng = np.random.default_rng(0)
    width = jnp.result_type(float)  # 64 bits where JAX_ENABLE_X64 says so
    x = rng.normal(size=(NUM_EXAMPLES, WIDTH)).astype(width)
    y = np.tanh(x @ rng.normal(size=WIDTH)).astype(width)
    index = rng.permutation(NUM_EXAMPLES).astype(np.int32)
    rows = [slice(i, i + BATCH) for i in range(0, NUM_EXAMPLES, BATCH)]
    return [{"x": x[index[r]], "y": y[index[r]], "index": index[r]} for r in rows]


class Trainer:
    """The state of the run, and one replica's part of a step."""

    def __init__(self) -> None:
        normal = jax.random.normal(jax.random.key(1), (WIDTH,))
        self.weights = dj.Variable(normal, name="weights", aggregation=MEAN)
        self.speed = dj.Variable(jnp.zeros(WIDTH), name="speed", aggregation=MEAN)
        self.key = dj.Variable(jax.random.key(2), name="key", aggregation=FIRST)
        self.used = dj.Variable(jnp.zeros(NUM_EXAMPLES, jnp.int32), name="used", aggregation=SUM)
        self.applied = dj.Variable(np.int32(0), name="applied", aggregation=FIRST)
        self.seen = dj.Variable(  # a part on each replica
            np.int32(0),
            name="seen",
            synchronization=dj.VariableSynchronization.ON_READ,
            aggregation=SUM,
        )

    def step(self, batch: dict[str, jax.Array]) -> jax.Array:
        """Momentum on noisy gradients; the replica's loss."""
        key, draw = jax.random.split(self.key.value)

        def loss_of(weights):
            return jnp.mean((jnp.tanh(batch["x"] @ weights) - batch["y"]) ** 2)

        loss, gradient = jax.value_and_grad(loss_of)(self.weights.value)
        noisy = gradient + 0.01 * jax.random.normal(draw, (WIDTH,))
        self.speed.assign(0.9 * self.speed.value + noisy)
        self.weights.assign_sub(0.1 * self.speed.value)
        self.key.assign(key)
        self.used.assign_add(jnp.zeros(NUM_EXAMPLES, jnp.int32).at[batch["index"]].add(1))
        self.applied.assign_add(1)
        self.seen.assign_add(batch["x"].shape[0])
        return loss


def say(**what: object) -> None:
    """Prints what has happened, once for all processes."""
    if jax.process_index() == 0:
        print(json.dumps(what), flush=True)


def train(directory: str, strategy: dj.Strategy) -> None:
    """Trains from the last complete step to the end, and says what came out."""
    with strategy.scope():
        trainer = Trainer()
    data = iter(strategy.distribute_dataset(make_batches()))
    state = {"trainer": trainer, "data": data}
    with dj.checkpoint.Checkpointer(directory, max_to_keep=3) as checkpointer:
        step = checkpointer.latest_step() or 0
        if step:
            checkpointer.restore(state)
        say(restored=step, applied=int(trainer.applied.value))
        for batch in data:
            step += 1
            loss = strategy.reduce("mean", strategy.run(trainer.step, args=(batch,)))
            say(step=step, loss=float(loss).hex())
            checkpointer.save(step, state)
            say(committed=step - 1)  # those before are complete
        checkpointer.wait()
    say(committed=step)
    say(
        weights=[float(w).hex() for w in np.asarray(trainer.weights)],
        applied=int(trainer.applied.value),
        seen=int(trainer.seen.value),
        used=sorted(set(np.asarray(trainer.used).tolist())),
    )


def main() -> None:
    """Joins the job, if there is one, and trains."""
    dj.initialize(initialization_timeout=120, meeting_timeout=120, heartbeat_timeout=10)
    train(sys.argv[1], dj.MultiWorkerMirroredStrategy())


if __name__ == "__main__":
    main()
