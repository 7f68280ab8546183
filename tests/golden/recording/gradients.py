"""Derivatives through all_reduce and all_gather, taken inside a replica function."""

import itertools

import tensorflow as tf

from tests.golden.closed_form import numbers
from tests.golden.recording import tensorflow_side as side

FUNCTIONS = ("linear", "square", "reduced_twice", "loss", "variable", "all_gather")


def records():
    for strategy, op, fn in itertools.product(
        ("mirrored2", "mirrored3", "one_device"), ("sum", "mean"), FUNCTIONS
    ):
        if fn == "all_gather" and op == "mean":
            continue  # a gather has no op
        case = dict(strategy=strategy, op=op, fn=fn)
        yield "/".join(case.values()), case, side.outcome_of(lambda case=case: ask(**case))


def ask(strategy, op, fn):
    """Returns each replica's gradient of a scalar with respect to its own x, or to a variable."""
    strategy = side.make_strategy(strategy)
    x = side.numbers_per_replica(strategy, [3], "float32")
    with strategy.scope():
        w = side.make_variable(numbers([3], seed=5), name="w")

    def replica(x):
        context = tf.distribute.get_replica_context()
        weight = tf.cast(context.replica_id_in_sync_group, tf.float32) * 2 + 1
        with tf.GradientTape() as tape:
            tape.watch(x)
            if fn == "linear":
                y = tf.reduce_sum(weight * context.all_reduce(op, x))
            elif fn == "square":
                y = tf.reduce_sum(weight * context.all_reduce(op, x * x) ** 2)
            elif fn == "reduced_twice":
                y = tf.reduce_sum(weight * context.all_reduce(op, x * context.all_reduce(op, x)))
            elif fn == "loss":
                y = context.all_reduce(op, tf.reduce_sum(x**3))
            elif fn == "variable":
                y = tf.reduce_sum(weight * context.all_reduce(op, x * w))
            else:
                gathered = context.all_gather(x, axis=0)
                y = tf.reduce_sum(weight * gathered * gathered)
        return tape.gradient(y, w if fn == "variable" else x)

    return side.locals_of(strategy, strategy.run(replica, (x,)))
