"""Steps on an iterator, in the graph mode of the first age: what the last step leaves."""

import itertools

import tensorflow as tf

from tests.golden.recording import tensorflow_side as side


def records():
    cases = [("mirrored2", 12, 4, k) for k in (1, 2, 3, 4)] + [("mirrored3", 18, 6, 2)]
    for (strategy, examples, batch, steps), dtype in itertools.product(cases, ("int32", "float32")):
        case = dict(strategy=strategy, num_examples=examples, batch_size=batch, iterations=steps)
        case["dtype"] = dtype
        name = "/".join(str(value) for value in case.values())
        with tf.Graph().as_default():
            outcome = side.outcome_of(lambda case=case: ask(**case))
        yield name, case, outcome


def ask(strategy, num_examples, batch_size, iterations, dtype):
    """Returns the outputs of the last step, by how they were set."""
    count = int(strategy[-1])
    strategy = tf.compat.v1.distribute.MirroredStrategy(
        side.DEVICES[:count], tf.distribute.ReductionToOneDevice()
    )

    def step(context, inputs):
        def replica(x):
            total = tf.reduce_sum(x)
            context.set_last_step_output("replica_mean", total, reduce_op="mean")
            context.set_last_step_output("replica_sum", total, reduce_op="sum")
            context.set_non_tensor_output("replica_object", "halves")
            return total

        raw = strategy.run(replica, args=(inputs,))
        context.set_last_step_output("raw", raw)
        context.set_last_step_output("sum", raw, reduce_op="sum")
        context.set_last_step_output("mean", raw, reduce_op="mean")
        context.set_non_tensor_output("object", "cross")
        return tf.group(strategy.experimental_local_results(raw))

    data = tf.data.Dataset.range(num_examples, output_type=tf.as_dtype(dtype)).batch(batch_size)
    iterator = strategy.make_dataset_iterator(data)
    total = tf.zeros([], dtype)
    mean = tf.zeros([], "float64" if dtype == "int32" else dtype)
    initial = {"mean": mean, "raw": [total] * count, "replica_mean": mean}  # the loop needs all
    initial |= {"replica_sum": total, "sum": total}
    context = strategy.extended.experimental_run_steps_on_iterator(
        step, iterator, iterations, initial
    )
    outputs = dict(context.last_step_outputs)
    outputs["raw"] = list(strategy.experimental_local_results(outputs["raw"]))
    with tf.compat.v1.Session() as session:
        session.run(iterator.initializer)
        _, values = session.run((context.run_op, outputs))
    others = {key: side.plain(value) for key, value in context.non_tensor_outputs.items()}
    return {**side.plain(values), **others}
