"""What each context says of itself and which calls it allows, as TensorFlow has it."""

import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import ContextError
from tests.golden.ambient_contexts import enter
from tests.golden.distjax_side import make_strategy, plain
from tests.golden.records import Ruling, check, load, outcome_of

RECORDS = load("contexts")

INPUT_OUTSIDE = "input is taken outside of traced functions"

RULINGS = [
    Ruling("mirrored2/replica/update", 13, ContextError),
    Ruling("mirrored2/run_in_merge/update", 13, ContextError),
    Ruling("mirrored2/replica/local_results", 1, 1),  # the other components are not in the trace
    Ruling("mirrored2/run_in_merge/local_results", 1, 1),
    Ruling("mirrored2/replica/distribute_dataset", INPUT_OUTSIDE, ContextError),
    Ruling("mirrored2/run_in_merge/distribute_dataset", INPUT_OUTSIDE, ContextError),
    Ruling("mirrored2/merge/distribute_dataset", INPUT_OUTSIDE, ContextError),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.id)
def test_as_recorded(record):
    check(record, lambda case: ask(**case), RULINGS)


def ask(strategy, context, call):
    strategy = make_strategy(strategy)
    with strategy.scope():
        v = dj.Variable(1.0)
    found = []
    act = lambda: found.append(outcome_of(lambda: globals()[f"call_{call}"](strategy, v)))
    enter(context, strategy, v, act, dj.get_replica_context)
    return found[0]


def call_facts(strategy, v):
    context = dj.get_replica_context()
    return {
        "has_strategy": dj.has_strategy(),
        "in_cross_replica_context": dj.in_cross_replica_context(),
        "has_replica_context": context is not None,
        "is_own_strategy": dj.get_strategy() is strategy,
        "num_replicas": dj.get_strategy().num_replicas_in_sync,
        "replicas_of_context": context and context.num_replicas_in_sync,
    }


def call_run(strategy, v):
    return list(strategy.local_results(strategy.run(lambda: 2)))


def call_call_for_each_replica(strategy, v):
    return strategy.extended.call_for_each_replica(lambda: 3)


def call_reduce(strategy, v):
    return strategy.reduce("mean", 2.0, axis=None)


def call_scope(strategy, v):
    with strategy.scope():
        return dj.in_cross_replica_context()


def call_gather(strategy, v):
    return plain(strategy.gather(np.ones(1), axis=0))


def call_merge_call(strategy, v):
    context = dj.get_replica_context()
    return context.merge_call(lambda strategy: "merged") if context else "no replica context"


def call_all_reduce(strategy, v):
    context = dj.get_replica_context()
    if context is None:
        return "no replica context"
    return context.all_reduce("mean", jnp.asarray(2.0)).dtype.name


def call_update(strategy, v):
    strategy.extended.update(v, lambda v: v.assign(5.0))
    return "updated"


def call_reduce_to(strategy, v):
    return strategy.extended.reduce_to("mean", 2.0, v)


def call_broadcast_to(strategy, v):
    return len(strategy.local_results(strategy.extended.broadcast_to(2.0, v)))


def call_local_results(strategy, v):
    return len(strategy.local_results(v))


def call_another_run(strategy, v):
    return make_strategy("one_device").run(lambda: 2)


def call_another_scope(strategy, v):
    with make_strategy("one_device").scope():
        return dj.in_cross_replica_context()


def call_distribute_dataset(strategy, v):
    data = [np.arange(2, dtype=np.int32), np.arange(2, 4, dtype=np.int32)]
    element = next(iter(strategy.distribute_dataset(data)))
    return [plain(x) for x in strategy.local_results(element)]


def call_values(strategy, v):
    made = strategy.distribute_values_from_function(
        lambda context: np.float32(1.0 + context.replica_id_in_sync_group)
    )
    return len(strategy.local_results(made))


def call_set_strategy(strategy, v):
    dj.set_strategy(strategy)
    try:
        return dj.has_strategy()
    finally:
        dj.set_strategy(None)
