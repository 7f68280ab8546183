"""Outputs of run_steps_on_iterator, as TensorFlow's MultiStepContext has them."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.golden.distjax_side import make_strategy, plain
from tests.golden.records import Ruling, check, load

RECORDS = load("steps")


def of_the_steps_left(record):
    """Returns what the record of three steps has: the data ends there."""
    same = record.id.replace("/4/4/", "/4/3/")
    return next(r.outcome for r in RECORDS if r.id == same)


RULINGS = [Ruling("mirrored2/12/4/4/*", 27, of_the_steps_left)]


@pytest.mark.parametrize("kind", ["mirrored", "virtual"])
@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.id)
def test_as_recorded(record, kind):
    check(record, lambda case: ask(kind, **case), RULINGS)


def ask(kind, strategy, num_examples, batch_size, iterations, dtype):
    strategy = make_strategy(strategy.replace("mirrored", kind))

    def step(context, inputs):
        def replica(x):
            total = jnp.sum(x)
            context.set_last_step_output("replica_mean", total, reduce_op="mean")
            context.set_last_step_output("replica_sum", total, reduce_op="sum")
            context.set_non_tensor_output("replica_object", "halves")
            return total

        raw = strategy.run(replica, args=(inputs,))
        context.set_last_step_output("raw", raw)
        context.set_last_step_output("sum", raw, reduce_op="sum")
        context.set_last_step_output("mean", raw, reduce_op="mean")
        context.set_non_tensor_output("object", "cross")

    starts = range(0, num_examples, batch_size)
    data = [np.arange(i, i + batch_size).astype(dtype) for i in starts]
    iterator = iter(strategy.distribute_dataset(data))
    context = strategy.extended.run_steps_on_iterator(step, iterator, iterations)
    outputs = dict(context.last_step_outputs)
    outputs["raw"] = strategy.local_results(outputs["raw"])
    objects = context.non_tensor_outputs
    objects["replica_object"] = list(objects["replica_object"])  # a tuple, which JSON has not
    return {**{key: plain(value) for key, value in outputs.items()}, **objects}
