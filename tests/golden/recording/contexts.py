"""Who is asking: what each context says of itself, and which calls it allows."""

import itertools

import tensorflow as tf

from tests.golden.ambient_contexts import CONTEXTS, enter
from tests.golden.recording import tensorflow_side as side

CALLS = ("facts", "run", "reduce", "scope", "gather", "merge_call", "all_reduce", "update")
CALLS += ("reduce_to", "broadcast_to", "local_results", "another_run", "another_scope")
CALLS += ("call_for_each_replica", "distribute_dataset", "values", "set_strategy")


def records():
    strategies = ("mirrored2", "one_device", "default")
    for strategy, context, call in itertools.product(strategies, CONTEXTS, CALLS):
        if strategy == "mirrored2" or call in ("facts", "run", "reduce", "merge_call"):
            case = dict(strategy=strategy, context=context, call=call)
            yield "/".join(case.values()), case, side.outcome_of(lambda case=case: ask(**case))


def ask(strategy, context, call):
    """Returns what `call` gives when it is made in `context`, or its error."""
    strategy = side.make_strategy(strategy)
    with strategy.scope():
        v = tf.Variable(1.0)
    found = []
    act = lambda: found.append(side.outcome_of(lambda: globals()[f"call_{call}"](strategy, v)))
    enter(context, strategy, v, act, tf.distribute.get_replica_context)
    return found[0]  # of replica 0, where every replica makes the call


def call_facts(strategy, v):
    context = tf.distribute.get_replica_context()
    return {
        "has_strategy": tf.distribute.has_strategy(),
        "in_cross_replica_context": tf.distribute.in_cross_replica_context(),
        "has_replica_context": context is not None,
        "is_own_strategy": tf.distribute.get_strategy() is strategy,
        "num_replicas": tf.distribute.get_strategy().num_replicas_in_sync,
        "replicas_of_context": context and context.num_replicas_in_sync,
    }


def call_run(strategy, v):
    return [side.plain(x) for x in strategy.experimental_local_results(strategy.run(lambda: 2))]


def call_call_for_each_replica(strategy, v):
    return strategy.extended.call_for_each_replica(lambda: 3)


def call_reduce(strategy, v):
    return side.plain(strategy.reduce("mean", 2.0, axis=None))


def call_scope(strategy, v):
    with strategy.scope():
        return tf.distribute.in_cross_replica_context()


def call_gather(strategy, v):
    return side.plain(strategy.gather(tf.constant([1.0]), axis=0))


def call_merge_call(strategy, v):
    context = tf.distribute.get_replica_context()
    return context.merge_call(lambda strategy: "merged") if context else "no replica context"


def call_all_reduce(strategy, v):
    context = tf.distribute.get_replica_context()
    if context is None:
        return "no replica context"
    return side.array(context.all_reduce("mean", tf.constant(2.0)))["dtype"]


def call_update(strategy, v):
    strategy.extended.update(v, lambda v: v.assign(5.0))
    return "updated"


def call_reduce_to(strategy, v):
    return side.plain(strategy.extended.reduce_to("mean", 2.0, v))


def call_broadcast_to(strategy, v):
    sent = strategy.extended.broadcast_to(tf.constant(2.0), v)
    return len(strategy.experimental_local_results(sent))


def call_local_results(strategy, v):
    return len(strategy.experimental_local_results(v))


def call_another_run(strategy, v):
    return side.plain(side.make_strategy("one_device").run(lambda: 2))


def call_another_scope(strategy, v):
    with side.make_strategy("one_device").scope():
        return tf.distribute.in_cross_replica_context()


def call_distribute_dataset(strategy, v):
    data = tf.data.Dataset.range(4, output_type=tf.int32).batch(2)
    element = next(iter(strategy.experimental_distribute_dataset(data)))
    return [side.plain(x) for x in strategy.experimental_local_results(element)]


def call_values(strategy, v):
    made = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(1.0 + context.replica_id_in_sync_group)
    )
    return len(strategy.experimental_local_results(made))


def call_set_strategy(strategy, v):
    tf.distribute.experimental_set_strategy(strategy)
    try:
        return tf.distribute.has_strategy()
    finally:
        tf.distribute.experimental_set_strategy(None)
