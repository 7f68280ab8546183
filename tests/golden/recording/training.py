"""A two-layer network trained ten steps: losses, weights, slots, moving statistics."""

import itertools

import tensorflow as tf

from tests.golden import mlp
from tests.golden.recording import tensorflow_side as side


def records():
    every = ("mirrored1", "mirrored2", "mirrored3", "mirrored8")
    cases = itertools.product(every, ("sgd_all_reduce", "adam_merge_call", "batch_norm_on_read"))
    cases = [*cases, *itertools.product(("mirrored2",), mlp.METHODS)]
    cases += [("mirrored3", "sgd_merge_call"), ("mirrored8", "momentum_merge_call")]
    cases += [("mirrored8", "batch_norm_on_write"), ("default", "batch_norm_on_write")]
    cases += [("one_device", "adam_merge_call"), ("central2", "adam_merge_call")]
    cases += [("central2", "sgd_aggregation")]
    for strategy, method in dict.fromkeys(cases):
        case = dict(strategy=strategy, method=method)
        outcome = side.outcome_of(lambda case=case: Training(**case).outcome())
        yield "/".join(case.values()), case, outcome


class Training:
    """The variables of one run, and its step."""

    def __init__(self, strategy, method):
        self.strategy = side.make_strategy(strategy)
        self.optimizer, self.how, self.moving_sync = mlp.METHODS[method]
        aggregation = mlp.AGGREGATIONS[self.how]
        with self.strategy.scope():
            self.weights = {
                name: side.make_variable(value, name=name, aggregation=aggregation)
                for name, value in mlp.first_weights().items()
            }
            self.slots = {
                name: [self.make_slot(weight) for _ in mlp.SLOTS[self.optimizer]]
                for name, weight in self.weights.items()
            }
            modes = dict(sync=self.moving_sync or "AUTO", aggregation="MEAN")
            self.moving = {
                "mean": side.make_variable(tf.zeros(5), name="mean", **modes),
                "variance": side.make_variable(tf.ones(5), name="variance", **modes),
            }

    def make_slot(self, weight):
        with self.strategy.extended.colocate_vars_with(weight):
            return tf.Variable(tf.zeros(weight.shape), trainable=False, name="slot")

    def outcome(self):
        losses = []
        for step in range(mlp.NUM_STEPS):
            losses.append(side.plain(self.step(step)))
        outcome = {"losses": losses, "weights": side.plain(dict(self.weights))}
        if self.slots["w1"]:
            outcome["slots"] = {name: side.plain(slots) for name, slots in self.slots.items()}
        if self.moving_sync:
            outcome["moving"] = {
                name: {
                    "read": side.plain(v.read_value()),
                    "components": side.plain(self.strategy.experimental_local_results(v)),
                }
                for name, v in self.moving.items()
            }
        return outcome

    def step(self, step):
        shares = [
            tf.split(tf.constant(x), self.strategy.num_replicas_in_sync) for x in mlp.batch(step)
        ]
        data = [side.per_replica(self.strategy, share) for share in shares]
        losses = self.strategy.run(self.replica_step, (*data, tf.constant(step + 1.0)))
        return self.strategy.experimental_local_results(losses)[0]

    def replica_step(self, x, target, count):
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((self.predict(x) - target) ** 2) / mlp.GLOBAL_BATCH
        names = list(self.weights)
        gradients = tape.gradient(loss, [self.weights[name] for name in names])
        if self.how == "merge_call":
            context.merge_call(self.apply, args=(dict(zip(names, gradients, strict=True)), count))
        for name, gradient in zip(names, gradients, strict=True):
            if self.how == "all_reduce":
                gradient = context.all_reduce("sum", gradient)
            if self.how != "merge_call":
                self.weights[name].assign_sub(mlp.LEARNING_RATE * gradient)
        return context.all_reduce("sum", loss)

    def predict(self, x):
        w = self.weights
        hidden = tf.tanh(x @ w["w1"] + w["b1"])
        if self.moving_sync:
            mean, variance = tf.nn.moments(hidden, axes=[0])
            for name, value in (("mean", mean), ("variance", variance)):
                moving = self.moving[name]
                moving.assign(mlp.MOVING * moving.read_value() + (1 - mlp.MOVING) * value)
            hidden = (hidden - mean) / tf.sqrt(variance + mlp.BN_EPSILON)
        return hidden @ w["w2"] + w["b2"]

    def apply(self, strategy, gradients, count):
        pairs = [(gradients[name], weight) for name, weight in self.weights.items()]
        reduced = strategy.extended.batch_reduce_to("sum", pairs)
        for (name, weight), gradient in zip(self.weights.items(), reduced, strict=True):
            args = (gradient, self.slots[name], count)
            strategy.extended.update(weight, UPDATES[self.optimizer], args=args, group=False)


def sgd(weight, gradient, slots, count):
    weight.assign_sub(mlp.LEARNING_RATE * gradient)


def momentum(weight, gradient, slots, count):
    (velocity,) = slots
    velocity.assign(mlp.MOMENTUM * velocity + gradient)
    weight.assign_sub(mlp.LEARNING_RATE * velocity)


def adam(weight, gradient, slots, count):
    m, v = slots
    m.assign(mlp.BETA1 * m + (1 - mlp.BETA1) * gradient)
    v.assign(mlp.BETA2 * v + (1 - mlp.BETA2) * gradient**2)
    mean, square = m / (1 - mlp.BETA1**count), v / (1 - mlp.BETA2**count)
    weight.assign_sub(mlp.LEARNING_RATE * mean / (tf.sqrt(square) + mlp.EPSILON))


UPDATES = {"sgd": sgd, "momentum": momentum, "adam": adam}
