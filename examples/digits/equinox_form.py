"""Trains a network like that of `train.py`, written in Equinox: model and state in, both out.

    python examples/digits/equinox_form.py --strategy mirrored --replicas 8

A step is written for one replica, as one would write it for one device, and one line of it takes
the mean over the replicas. What is not an array in the model (its dropout rate, its flags) stays a
Python value in the step, by Equinox's own rule.
"""

import equinox as eqx
import jax
import jax.numpy as jnp

import data
import distjax as dj
import loop
import model
import options
import report

EXAMPLE_AXIS = "example"


class ConvNet(eqx.Module):
    """Three convolutions with batch normalization, dropout, then a linear layer."""

    convolutions: list[eqx.nn.Conv2d]
    norms: list[eqx.nn.BatchNorm]
    dropout: eqx.nn.Dropout
    linear: eqx.nn.Linear

    def __init__(self, axis_name: str | None, key: jax.Array):
        *keys, last = jax.random.split(key, 4)
        shapes = ((1, 16, 1), (16, 32, 1), (32, 32, 2))
        self.convolutions = [
            eqx.nn.Conv2d(before, after, 3, stride, padding=1, use_bias=False, key=key)
            for (before, after, stride), key in zip(shapes, keys, strict=True)
        ]
        axes = tuple(filter(None, (EXAMPLE_AXIS, axis_name)))
        self.norms = [
            eqx.nn.BatchNorm(after, axes, momentum=0.9, mode="batch") for _, after, _ in shapes
        ]
        self.dropout = eqx.nn.Dropout(0.0)  # 0 gives the same curve under every strategy; try 0.3
        self.linear = eqx.nn.Linear(32 * 4 * 4, 10, key=last)

    def __call__(self, image, state, key):
        """Logits `[10]` of an image `[height, width, 1]`, and the new running statistics."""
        x = image.transpose(2, 0, 1)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x, state = norm(convolution(x), state)
            x = jax.nn.silu(x)
        return self.linear(self.dropout(x.reshape(-1), key=key)), state


def apply(network, state, images, key):
    """Logits `[B, 10]` of images `[B, height, width, 1]`, and the new running statistics."""
    keys = jax.random.split(key, len(images))
    over_examples = jax.vmap(network, (0, None, 0), (0, None), axis_name=EXAMPLE_AXIS)
    return over_examples(images, state, keys)


def train_step(network, state, optimizer_state, optimizer, images, labels, key):
    """One replica's part of a training step."""
    context = dj.get_replica_context()

    @eqx.filter_value_and_grad(has_aux=True)
    def loss_fn(network):
        logits, new_state = apply(network, state, images, context.fold_in(key))
        return model.mean_loss(logits, labels), new_state

    (loss, new_state), grads = loss_fn(network)
    loss, grads = context.all_reduce("mean", (loss, grads))
    updates, optimizer_state = optimizer.update(grads, optimizer_state)
    return eqx.apply_updates(network, updates), new_state, optimizer_state, loss


def test_step(network, state, images, labels):
    """One replica's part of a test step; right predictions and examples, over all replicas."""
    logits, _ = apply(eqx.nn.inference_mode(network), state, images, jax.random.key(0))
    right, count = jnp.sum(logits.argmax(-1) == labels), jnp.sum(labels != data.PADDING_LABEL)
    return dj.get_replica_context().all_reduce("sum", (right, count))


def main() -> None:
    """Trains, tests, reports."""
    chosen = options.parse(__doc__)
    strategy = options.make_strategy(chosen.strategy, chosen.replicas)
    splits = data.load(chosen.data)
    num_steps = chosen.epochs * data.steps_per_epoch(splits[0], chosen.global_batch)
    optimizer = model.make_optimizer(num_steps)
    key = jax.random.key(chosen.seed)
    network, state = eqx.nn.make_with_state(ConvNet)(strategy.axis_name, key)
    optimizer_state = optimizer.init(eqx.filter(network, eqx.is_array))

    next_state, count_right = strategy.jit(train_step), strategy.jit(test_step)

    def train(images, labels):
        nonlocal network, state, optimizer_state, key
        key, step_key = jax.random.split(key)
        network, state, optimizer_state, loss = next_state(
            network, state, optimizer_state, optimizer, images, labels, step_key
        )
        return loss

    def test(batches):
        counts = [count_right(network, state, *batch) for batch in batches]
        right, count = (sum(int(each) for each in column) for column in zip(*counts, strict=True))
        return right / count

    report.write(chosen, strategy, loop.fit(chosen, strategy, splits, train, test))


if __name__ == "__main__":
    main()
