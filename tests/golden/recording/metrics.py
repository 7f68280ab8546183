"""Mean and accuracy by hand: two ON_READ SUM variables each, over batches, with a reset."""

import itertools

import tensorflow as tf

from tests.golden.closed_form import labeled
from tests.golden.recording import tensorflow_side as side


def records():
    sizes = [(24, 8), (21, 8), (10, 4)]  # number of examples, batch size
    strategies = ("default", "mirrored2", "mirrored3", "mirrored8")
    for strategy, (total, batch) in itertools.product(strategies, sizes):
        case = dict(strategy=strategy, num_examples=total, batch_size=batch)
        outcome = side.outcome_of(lambda case=case: ask(**case))
        yield f"{strategy}/{total}by{batch}", case, outcome


def ask(strategy, num_examples, batch_size):
    """Returns after each step mean and accuracy so far, and components and values at the end."""
    strategy = side.make_strategy(strategy)
    data = tf.data.Dataset.from_tensor_slices(labeled(num_examples)).batch(batch_size)
    with strategy.scope():
        names = ("total", "count", "hits", "seen")
        state = {
            n: side.make_variable(0.0, name=n, sync="ON_READ", aggregation="SUM") for n in names
        }

    def step(batch):
        logits, labels = batch
        hits = tf.cast(tf.argmax(logits, -1, tf.int32) == labels, tf.float32)
        state["total"].assign_add(tf.reduce_sum(logits))
        state["count"].assign_add(tf.cast(tf.size(logits), tf.float32))
        state["hits"].assign_add(tf.reduce_sum(hits))
        state["seen"].assign_add(tf.cast(tf.size(labels), tf.float32))

    def results():
        mean = state["total"].read_value() / state["count"].read_value()
        accuracy = state["hits"].read_value() / state["seen"].read_value()
        return {"mean": side.plain(mean), "accuracy": side.plain(accuracy)}

    def components():
        return {
            name: [side.plain(c) for c in strategy.experimental_local_results(v)]
            for name, v in state.items()
        }

    steps = []
    for batch in strategy.experimental_distribute_dataset(data):
        strategy.run(step, (batch,))
        steps.append(results())
    after = components()
    for v in state.values():
        v.assign(0.0)
    return {"steps": steps, "components": after, "after_reset": components()}
