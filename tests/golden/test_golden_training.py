"""Ten steps of a two-layer network: losses, weights, slots and statistics as TensorFlow's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distjax as dj
from tests.golden import mlp
from tests.golden.distjax_side import make_strategy, make_variable, per_replica, plain
from tests.golden.records import check, difference, load

RECORDS = load("training")
WITH_SLOTS = ("momentum_merge_call", "adam_merge_call")
LIBRARY = [r for r in RECORDS if r.case["method"] in WITH_SLOTS and "3/" not in r.id]
ON_TWO = [r for r in RECORDS if r.id.startswith("mirrored2/")]
ON_ONE_DEVICE = ("mirrored8/adam_merge_call", "mirrored8/batch_norm_on_read")


def strategies_of(record):
    """Returns the strategies that replay a record: some, eight replicas on one device too."""
    name = record.case["strategy"]
    return [name, "virtual8"] if record.id in ON_ONE_DEVICE else [name]


REPLAYS = [pytest.param(r, name, id=f"{r.id}-{name}") for r in RECORDS for name in strategies_of(r)]


@pytest.mark.parametrize(("record", "kind"), REPLAYS)
def test_by_hand_as_recorded(record, kind):
    check(record, lambda case: Training(kind, case["method"]).outcome(), rtol=1e-5)


@pytest.mark.parametrize("record", LIBRARY, ids=lambda r: r.id)
def test_library_optimizers_give_the_same_training(record):
    training = Training(**record.case)
    make = {"adam": make_adam, "momentum": make_momentum}[training.optimizer]
    training.library = dj.optim.Optimizer(make(), "sum")
    training.library.init(list(training.weights.values()))
    training.how = "library"
    got = training.outcome()
    for part in ("losses", "weights"):
        assert difference(record.outcome[part], got[part], rtol=1e-5) is None


@pytest.mark.parametrize("record", ON_TWO, ids=lambda r: r.id)
def test_there_is_nothing_to_say_about_its_step(record):
    training = Training(**record.case)
    args, strategy = training.arguments(0), training.strategy
    # As in TensorFlow, each replica normalizes by the statistics of its own rows.
    is_local = "batch_norm" in record.id
    assert dj.check(training.replica_step, *args, strategy=strategy, rules_only=is_local) is None


def make_momentum():
    return optax.sgd(mlp.LEARNING_RATE, momentum=mlp.MOMENTUM)


def make_adam():
    return optax.adam(mlp.LEARNING_RATE, b1=mlp.BETA1, b2=mlp.BETA2, eps=mlp.EPSILON)


class Training:
    """The variables of one run, and its step."""

    def __init__(self, strategy, method):
        self.strategy = make_strategy(strategy)
        self.optimizer, self.how, self.moving_sync = mlp.METHODS[method]
        aggregation = mlp.AGGREGATIONS[self.how]
        with self.strategy.scope():
            self.weights = {
                name: make_variable(value, name=name, aggregation=aggregation)
                for name, value in mlp.first_weights().items()
            }
            self.slots = {
                name: [self.make_slot(weight) for _ in mlp.SLOTS[self.optimizer]]
                for name, weight in self.weights.items()
            }
            modes = dict(sync=self.moving_sync or "AUTO", aggregation="MEAN")
            self.moving = {
                "mean": make_variable(np.zeros(5, np.float32), name="mean", **modes),
                "variance": make_variable(np.ones(5, np.float32), name="variance", **modes),
            }

    def make_slot(self, weight):
        with self.strategy.extended.colocate_vars_with(weight):
            return dj.Variable(np.zeros(weight.shape, np.float32), trainable=False, name="slot")

    def outcome(self):
        losses = [plain(self.step(step)) for step in range(mlp.NUM_STEPS)]
        weights = {name: plain(v.value) for name, v in self.weights.items()}
        outcome = {"losses": losses, "weights": weights}
        if self.slots["w1"]:
            outcome["slots"] = {
                name: [plain(v.value) for v in slots] for name, slots in self.slots.items()
            }
        if self.moving_sync:
            outcome["moving"] = {
                name: {
                    "read": plain(v.value),
                    "components": [plain(c) for c in v.local_results()],
                }
                for name, v in self.moving.items()
            }
        return outcome

    def step(self, step):
        return self.strategy.run(self.replica_step, self.arguments(step))

    def arguments(self, step):
        count = self.strategy.num_replicas_in_sync
        data = [per_replica(self.strategy, np.split(x, count)) for x in mlp.batch(step)]
        return *data, np.float32(step + 1)

    def replica_step(self, x, target, count):
        context = dj.get_replica_context()

        def loss_of(values):
            predicted, moments = self.predict(values, x)
            return jnp.sum((predicted - target) ** 2) / mlp.GLOBAL_BATCH, moments

        values = {name: v.value for name, v in self.weights.items()}
        (loss, moments), gradients = jax.value_and_grad(loss_of, has_aux=True)(values)
        for name, value in moments.items():
            moving = self.moving[name]
            moving.assign(mlp.MOVING * moving.value + (1 - mlp.MOVING) * value)
        if self.how == "merge_call":
            context.merge_call(self.apply, args=(gradients, count))
        if self.how == "library":
            self.library.apply_gradients([(gradients[n], v) for n, v in self.weights.items()])
        if self.how == "all_reduce":
            gradients = context.all_reduce("sum", gradients)
        if self.how in ("all_reduce", "aggregation"):
            for name, gradient in gradients.items():
                self.weights[name].assign_sub(mlp.LEARNING_RATE * gradient)
        return context.all_reduce("sum", loss)

    def predict(self, w, x):
        hidden = jnp.tanh(x @ w["w1"] + w["b1"])
        moments = {}
        if self.moving_sync:
            moments = {"mean": hidden.mean(0), "variance": hidden.var(0)}
            scale = jnp.sqrt(moments["variance"] + mlp.BN_EPSILON)
            hidden = (hidden - moments["mean"]) / scale
        return hidden @ w["w2"] + w["b2"], moments

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
    velocity.assign(mlp.MOMENTUM * velocity.value + gradient)
    weight.assign_sub(mlp.LEARNING_RATE * velocity.value)


def adam(weight, gradient, slots, count):
    m, v = slots
    m.assign(mlp.BETA1 * m.value + (1 - mlp.BETA1) * gradient)
    v.assign(mlp.BETA2 * v.value + (1 - mlp.BETA2) * gradient**2)
    mean, square = m.value / (1 - mlp.BETA1**count), v.value / (1 - mlp.BETA2**count)
    weight.assign_sub(mlp.LEARNING_RATE * mean / (jnp.sqrt(square) + mlp.EPSILON))


UPDATES = {"sgd": sgd, "momentum": momentum, "adam": adam}
