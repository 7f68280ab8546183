"""Reads and writes of variables: synchronization x aggregation x method x context x dtype."""

import itertools

import numpy as np
import tensorflow as tf

from tests.golden.recording import tensorflow_side as side

METHODS = ("assign", "assign_add", "assign_sub")
SYNCS = ("ON_WRITE", "ON_READ")
AGGREGATIONS = ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")
WRITERS = ("replica_tensor", "replica_number", "cross", "merge", "update")
READERS = ("replica", "cross", "merge", "update", "read_var")


def cases():
    modes = list(itertools.product(SYNCS, AGGREGATIONS))
    for dtype, (sync, aggregation) in itertools.product(("float32", "int32"), modes):
        if aggregation == "MEAN" and dtype == "int32":
            continue  # refused when it is created, see creation_cases
        common = dict(sync=sync, aggregation=aggregation, dtype=dtype)
        for method, by in itertools.product(METHODS, WRITERS):
            if by == "merge" and method != "assign":
                continue  # as in cross-replica context
            if dtype == "float32" or (by in ("replica_tensor", "cross") and method != "assign_sub"):
                yield dict(what="write", strategy="mirrored2", **common, method=method, by=by)
        for by in READERS:
            yield dict(what="read", strategy="mirrored2", **common, by=by)
    for strategy, (sync, aggregation) in itertools.product(
        ("mirrored3", "central2", "one_device"), modes
    ):
        common = dict(strategy=strategy, sync=sync, aggregation=aggregation, dtype="float32")
        for by in ("replica_tensor", "cross"):
            yield dict(what="write", **common, method="assign_add", by=by)
    yield from creation_cases()


def creation_cases():
    for sync, aggregation, dtype in itertools.product(
        ("AUTO", "NONE", *SYNCS), ("NONE", "MEAN"), ("float32", "int32", "bool")
    ):
        common = dict(sync=sync, aggregation=aggregation, dtype=dtype)
        yield dict(what="create", strategy="mirrored2", **common)
    for value in ("float", "shape", "per_replica", "mirrored", "variable"):
        yield dict(what="assign_a", strategy="mirrored2", value=value)


def records():
    for case in cases():
        strategy = side.make_strategy(case["strategy"])
        ask = globals()[f"ask_{case['what']}"]
        outcome = side.outcome_of(lambda ask=ask, s=strategy, c=case: ask(s, c))
        yield "/".join(case.values()), case, outcome


def make(strategy, case):
    with strategy.scope():
        return side.make_variable(
            np.dtype(case["dtype"]).type(10), sync=case["sync"], aggregation=case["aggregation"]
        )


def state(strategy, v):
    """Returns the components, and what a cross-replica read gives."""
    components = [side.plain(c) for c in strategy.experimental_local_results(v)]
    return {"components": components, "read": side.outcome_of(lambda: side.array(v.read_value()))}


def one_two(strategy, dtype):
    return side.per_replica(
        strategy, [np.dtype(dtype).type(r + 1) for r in range(strategy.num_replicas_in_sync)]
    )


def ask_write(strategy, case):
    v = make(strategy, case)
    write, by = getattr(v, case["method"]), case["by"]
    number = 4.0 if case["dtype"] == "float32" else 7

    def act():
        if by == "replica_tensor":
            strategy.run(write, (one_two(strategy, case["dtype"]),))
        elif by == "replica_number":
            strategy.run(write, (number,))
        elif by == "cross":
            with strategy.scope():
                write(number)
        elif by == "merge":
            merge = lambda strategy: [write(number)]
            strategy.run(lambda: tf.distribute.get_replica_context().merge_call(merge))
        else:
            update = lambda v, x: getattr(v, case["method"])(x)
            strategy.extended.update(v, update, args=(number,))

    return {"write": side.outcome_of(act), **state(strategy, v)}


def ask_read(strategy, case):
    v, by = make(strategy, case), case["by"]
    if case["sync"] == "ON_READ":
        strategy.run(v.assign, (one_two(strategy, case["dtype"]),))
    if by == "replica":
        return side.locals_of(strategy, strategy.run(v.read_value))
    if by == "cross":
        with strategy.scope():
            return side.array(v.read_value())
    if by == "merge":
        merge = lambda strategy: v.read_value()
        seen = strategy.run(lambda: tf.distribute.get_replica_context().merge_call(merge))
        return side.array(strategy.experimental_local_results(seen)[0])  # one tensor for all
    if by == "read_var":
        return side.array(strategy.extended.read_var(v))
    seen = strategy.extended.update(v, lambda v: v.read_value(), group=False)
    return [side.array(x) for x in seen]


def ask_create(strategy, case):
    with strategy.scope():
        v = side.make_variable(
            np.dtype(case["dtype"]).type(1), sync=case["sync"], aggregation=case["aggregation"]
        )
    return {
        "synchronization": v.synchronization.name,
        "aggregation": v.aggregation.name,
        "trainable": v.trainable,
        "dtype": v.dtype.name,
        "num_components": len(strategy.experimental_local_results(v)),
    }


def ask_assign_a(strategy, case):
    """Assigns what is no plain number, in cross-replica context."""
    with strategy.scope():
        v = side.make_variable(np.int32(10) if case["value"] == "float" else np.float32(10))
        other = side.make_variable(np.float32(3), name="other")
        value = {
            "float": 1.5,
            "shape": np.zeros(2, np.float32),
            "per_replica": one_two(strategy, "float32"),
            "mirrored": strategy.extended.broadcast_to(tf.constant(5.0), other),
            "variable": other,
        }[case["value"]]
        v.assign(value)
    return state(strategy, v)
