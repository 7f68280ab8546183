"""Trains a small transformer to write text, under a strategy chosen on the command line.

    python examples/language_model/train.py --strategy mirrored --replicas 2

To run as a job of several processes, with `--strategy multi_worker` or similar, see README.md.

With `--checkpoints FOLDER` the run can be killed at any moment and started again with another
strategy or another number of replicas: it continues from its last checkpoint.
"""

import argparse
import json
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import distjax as dj
import model as models
import options
import text

PROMPT = "The import statement"


class Trainer:
    """The state of a training run, and one replica's part of each step on it."""

    def __init__(self, chosen: argparse.Namespace):
        schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, chosen.steps // 10, chosen.steps)
        clipped_adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))

        def build():
            rngs = nnx.Rngs(params=chosen.seed, dropout=chosen.seed + 1)
            model = models.LanguageModel(
                chosen.context, chosen.width, chosen.layers, 4, chosen.dropout, rngs=rngs
            )
            model.train()
            return model, nnx.Optimizer(model, clipped_adam, wrt=nnx.Param)

        self.model, self.optimizer = dj.flax.create(build, rules=models.SPLIT)
        self.loss = nnx.metrics.Average()
        self.num_micro_batches = chosen.micro_batches

    def train_step(self, windows: jax.Array) -> None:
        """One replica's part of a training step on its windows `[B, T + 1]`."""
        total = None
        for part in jnp.split(windows, self.num_micro_batches):
            loss, grads = dj.flax.value_and_grad(models.mean_loss)(self.model, part)
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
            self.loss.update(values=loss)
        # One reduction for all parts, and one update.
        grads = jax.tree.map(lambda g: g / self.num_micro_batches, total)
        dj.flax.apply_gradients(self.optimizer, self.model, grads)

    def test_step(self, windows: jax.Array) -> jax.Array:
        """The mean loss of all replicas' windows."""
        return dj.get_replica_context().all_reduce("mean", models.mean_loss(self.model, windows))


def training(
    strategy: dj.Strategy, trainer: Trainer, chosen: argparse.Namespace, tokens: np.ndarray
) -> list[float]:
    """Trains from the last checkpoint, if any, to the last step; returns the logged losses."""
    windows = text.Windows(tokens, chosen.context, chosen.global_batch, chosen.steps, chosen.seed)
    batches = iter(strategy.distribute_dataset(windows))
    state = {"model": trainer.model, "optimizer": trainer.optimizer, "loss": trainer.loss}
    losses = []
    for step, batch in saved_and_resumed(batches, state, chosen):
        strategy.run(trainer.train_step, args=(batch,))
        if step % chosen.log_every == 0 or step == chosen.steps:
            losses.append(float(trainer.loss.compute()))
            say(f"step {step}: loss {losses[-1]:.3f}")
            trainer.loss.reset()
    return losses


def say(text: str) -> None:
    """Prints once for all processes of a job."""
    if jax.process_index() == 0:
        print(text, flush=True)


def saved_and_resumed(
    batches: dj.DistributedIterator, state: dict, chosen: argparse.Namespace
) -> Iterator[tuple[int, jax.Array]]:
    """Yields the number and the batch of each remaining step; saves a checkpoint now and then."""
    if chosen.checkpoints is None:
        yield from enumerate(batches, start=1)
        return
    with dj.checkpoint.Checkpointer(chosen.checkpoints, max_to_keep=2) as checkpointer:
        state = {**state, "data": batches}
        step = checkpointer.latest_step() or 0
        if step:
            checkpointer.restore(state)
            say(f"resumed after step {step}")
        for batch in batches:
            step += 1
            yield step, batch
            if step % chosen.save_every == 0 or step == chosen.steps:
                checkpointer.save(step, state)


def plan(strategy: dj.Strategy):
    """What `python -m distjax plan examples/language_model/train.py:plan` compiles."""
    chosen = options.defaults()
    with strategy.scope():
        trainer = Trainer(chosen)
    windows = np.zeros((8 * strategy.num_replicas_in_sync, chosen.context + 1), np.int32)
    return lambda x: strategy.run(trainer.train_step, args=(x,)), (dj.plan.batch(windows),)


def main() -> None:
    """Trains, tests, writes some text."""
    chosen = options.parse(__doc__)
    strategy = options.make_strategy(chosen.strategy, chosen.replicas, chosen.model_axes)
    train_tokens, test_tokens = text.load(chosen.data)
    with strategy.scope():
        trainer = Trainer(chosen)
        logged = training(strategy, trainer, chosen, train_tokens)
        trainer.model.eval()
        tests = text.Windows(test_tokens, chosen.context, 4 * chosen.global_batch, 4, chosen.seed)
        losses = [
            strategy.run(trainer.test_step, args=(windows,))
            for windows in strategy.distribute_dataset(tests)
        ]
        prompt = jnp.asarray(np.frombuffer(PROMPT.encode(), np.uint8), jnp.int32)
        draw = dj.jit(models.continued, static_argnames="count")
        drawn = draw(trainer.model, prompt, chosen.sample, jax.random.key(chosen.seed), 0.7)
    say(text.as_text(np.asarray(drawn)))
    say(f"{chosen.strategy}: test loss {np.mean(losses):.4f} after {chosen.steps} steps")
    if chosen.dump_losses is not None and jax.process_index() == 0:
        chosen.dump_losses.write_text(json.dumps(logged))


if __name__ == "__main__":
    main()
