"""Trains a convolutional network on handwritten digits, its state held in variables.

    python examples/digits/train.py --strategy mirrored --replicas 8

`--strategy` and `--replicas` choose where replicas and variables live. Nothing else in this file
depends on them: each step is written as if for one replica.
"""

import jax
import jax.numpy as jnp
import optax

import data
import distjax as dj
import loop
import model
import options
import report


class Accuracy:
    """The fraction of right predictions, counted on each replica and summed when read."""

    def __init__(self):
        self.right, self.count = (
            dj.Variable(
                0.0,
                name=name,
                synchronization=dj.VariableSynchronization.ON_READ,
                aggregation=dj.VariableAggregation.SUM,
            )
            for name in ("right", "count")
        )

    def update(self, logits: jax.Array, labels: jax.Array) -> None:
        """In replica context: counts this replica's examples; no replica waits for another."""
        self.right.assign_add(jnp.sum(logits.argmax(-1) == labels, dtype=jnp.float32))
        self.count.assign_add(jnp.sum(labels != data.PADDING_LABEL, dtype=jnp.float32))

    def result(self) -> float:
        """In cross-replica context: the accuracy over all replicas."""
        return float(self.right.value / self.count.value)

    def reset(self) -> None:
        """In cross-replica context: restarts the count."""
        self.right.assign(0.0)
        self.count.assign(0.0)


def make_variables(tree):
    """A tree of arrays as a tree of variables named by their paths."""

    def make(path, array):
        return dj.Variable(array, name=jax.tree_util.keystr(path, simple=True, separator="/"))

    return jax.tree_util.tree_map_with_path(make, tree)


def values(variables):
    """The values of a tree of variables, as the current context sees them."""
    return jax.tree.map(lambda variable: variable.value, variables)


def assign(variables, tree) -> None:
    """Writes a tree of arrays to a tree of variables."""
    jax.tree.map(lambda variable, array: variable.assign(array), variables, tree)


class Trainer:
    """The variables of a training run, and one replica's part of each step on them."""

    def __init__(self, network: model.ConvNet, optimizer: optax.GradientTransformation, initial):
        self.network, self.optimizer = network, optimizer
        self.params = make_variables(initial["params"])
        self.batch_stats = make_variables(initial["batch_stats"])
        self.optimizer_state = make_variables(optimizer.init(initial["params"]))
        self.test_accuracy = Accuracy()

    def train_step(self, images: jax.Array, labels: jax.Array) -> jax.Array:
        """One replica's part of a training step; returns the mean loss of its own examples."""

        def loss_fn(params):
            state = {"params": params, "batch_stats": values(self.batch_stats)}
            logits, updates = self.network.apply(state, images, train=True, mutable="batch_stats")
            return model.mean_loss(logits, labels), updates["batch_stats"]

        (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(values(self.params))
        dj.get_replica_context().merge_call(self.apply_gradients, args=(grads, batch_stats))
        return loss

    def apply_gradients(self, strategy: dj.Strategy, grads, batch_stats) -> None:
        """Where all replicas meet: averages their gradients, then updates every variable once."""
        params = values(self.params)
        updates, optimizer_state = self.optimizer.update(
            strategy.reduce("mean", grads), values(self.optimizer_state), params
        )
        assign(self.params, optax.apply_updates(params, updates))
        assign(self.optimizer_state, optimizer_state)
        assign(self.batch_stats, batch_stats)

    def test_step(self, images: jax.Array, labels: jax.Array) -> None:
        """One replica's part of a test step: counts right predictions."""
        state = {"params": values(self.params), "batch_stats": values(self.batch_stats)}
        self.test_accuracy.update(self.network.apply(state, images, train=False), labels)


def plan(strategy: dj.Strategy):
    """What `python -m distjax plan examples/digits/train.py:plan` compiles: 8 images a replica."""
    images, labels = data.blank(8 * strategy.num_replicas_in_sync)
    with strategy.scope():
        network = model.ConvNet(axis_name=strategy.axis_name)
        initial = model.initialize(network, images, seed=0)
        trainer = Trainer(network, model.make_optimizer(num_steps=220), initial)

    def train(images, labels):
        return strategy.reduce("mean", strategy.run(trainer.train_step, args=(images, labels)))

    return dj.jit(train), (dj.plan.batch(images), dj.plan.batch(labels))


def main() -> None:
    """Trains, tests, reports."""
    chosen = options.parse(__doc__)
    strategy = options.make_strategy(chosen.strategy, chosen.replicas, chosen.engine)
    splits = data.load(chosen.data)
    num_steps = chosen.epochs * data.steps_per_epoch(splits[0], chosen.global_batch)
    with strategy.scope():
        network = model.ConvNet(axis_name=strategy.axis_name)
        initial = model.initialize(network, splits[0].images, chosen.seed)
        trainer = Trainer(network, model.make_optimizer(num_steps), initial)

    @dj.jit
    def train(images, labels):
        return strategy.reduce("mean", strategy.run(trainer.train_step, args=(images, labels)))

    @dj.jit
    def count_right(images, labels):
        strategy.run(trainer.test_step, args=(images, labels))

    if isinstance(strategy, dj.ParameterServerStrategy):
        coordinator = dj.Coordinator(strategy)
        train = lambda *batch: coordinator.schedule(trainer.train_step, args=batch)
        count_right = lambda *batch: coordinator.schedule(trainer.test_step, args=batch).get()

    def test(batches):
        trainer.test_accuracy.reset()
        for batch in batches:
            count_right(*batch)
        return trainer.test_accuracy.result()

    history = loop.fit(chosen, strategy, splits, train, test)
    if isinstance(strategy, dj.ParameterServerStrategy):
        print(coordinator.stats())
    report.write(chosen, strategy, history)


if __name__ == "__main__":
    main()
