"""Trains the network of `train.py` with functional state: `TrainState` in, `TrainState` out.

    python examples/digits/functional.py --strategy mirrored --replicas 8

In `train.py` the replicas meet in cross-replica context, where variables are updated. Here they
only exchange gradients (`all_reduce`), and each computes the new state for itself. distjax proves
that all of them compute the same one, so one state comes back from `run`, not one per replica.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

import data
import distjax as dj
import loop
import model
import options
import report


class TrainState(train_state.TrainState):
    """Parameters, optimizer state and batch statistics of one training run."""

    batch_stats: Any


def make_state(
    network: model.ConvNet, optimizer: optax.GradientTransformation, images: jax.Array, seed: int
) -> TrainState:
    """The state before the first step, as one replica makes it; it is the same on each."""
    initial = model.initialize(network, images, seed)
    state = TrainState.create(apply_fn=network.apply, tx=optimizer, **initial)
    return state.replace(step=jnp.zeros((), jnp.int32))  # an array, as after each step


def train_step(
    state: TrainState, images: jax.Array, labels: jax.Array
) -> tuple[TrainState, jax.Array]:
    """One replica's part of a training step; the new state, and the mean loss over all replicas."""

    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updates = state.apply_fn(variables, images, train=True, mutable="batch_stats")
        return model.mean_loss(logits, labels), updates["batch_stats"]

    (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    loss, grads = dj.get_replica_context().all_reduce("mean", (loss, grads))
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss


def test_step(
    state: TrainState, images: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One replica's part of a test step; right predictions and examples, over all replicas."""
    logits = state.apply_fn(
        {"params": state.params, "batch_stats": state.batch_stats}, images, train=False
    )
    right, count = jnp.sum(logits.argmax(-1) == labels), jnp.sum(labels != data.PADDING_LABEL)
    return dj.get_replica_context().all_reduce("sum", (right, count))


def plan(strategy: dj.Strategy):
    """What `python -m distjax plan examples/digits/functional.py:plan` compiles."""
    images, labels = data.blank(8 * strategy.num_replicas_in_sync)
    network, optimizer = model.ConvNet(axis_name=strategy.axis_name), model.make_optimizer(220)
    state = jax.eval_shape(lambda: make_state(network, optimizer, images, 0))
    step = dj.jit(lambda *args: strategy.run(train_step, args=args), donate_argnums=0)
    return step, (state, dj.plan.batch(images), dj.plan.batch(labels))


def main() -> None:
    """Trains, tests, reports."""
    chosen = options.parse(__doc__)
    strategy = options.make_strategy(chosen.strategy, chosen.replicas)
    splits = data.load(chosen.data)
    num_steps = chosen.epochs * data.steps_per_epoch(splits[0], chosen.global_batch)
    network = model.ConvNet(axis_name=strategy.axis_name)
    optimizer = model.make_optimizer(num_steps)
    state = strategy.run(make_state, args=(network, optimizer, splits[0].images[:1], chosen.seed))

    @dj.jit(donate_argnums=0)
    def next_state(state, images, labels):
        return strategy.run(train_step, args=(state, images, labels))

    @dj.jit
    def count_right(state, images, labels):
        return strategy.run(test_step, args=(state, images, labels))

    def train(images, labels):
        nonlocal state
        state, loss = next_state(state, images, labels)
        return loss

    def test(batches):
        counts = [count_right(state, *batch) for batch in batches]
        right, count = (sum(int(each) for each in column) for column in zip(*counts, strict=True))
        return right / count

    report.write(chosen, strategy, loop.fit(chosen, strategy, splits, train, test))


if __name__ == "__main__":
    main()
