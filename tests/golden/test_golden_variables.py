"""Reads, writes and creation of variables, as TensorFlow has them."""

import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import AggregationError, LocalityError
from tests.golden.distjax_side import (
    array,
    locals_of,
    make_strategy,
    make_variable,
    per_replica,
    plain,
)
from tests.golden.records import Ruling, check, load, outcome_of

RECORDS = load("variables")


def unchanged(record):
    """Returns what a refused write leaves: the start value 10 everywhere."""
    ten = 10 if record.case["dtype"] == "int32" else 10.0
    count = int(record.case["strategy"][-1])
    is_unreadable = record.case["sync"] == "ON_READ"  # and has no aggregation
    read = AggregationError if is_unreadable else {"value": ten, "dtype": record.case["dtype"]}
    return {"write": AggregationError, "components": [ten] * count, "read": read}


def as_mirrored(record):
    """Returns what the same write does on two mirrored replicas."""
    if record.case["aggregation"] == "NONE" and record.case["by"] == "cross":
        return unchanged(record)
    same = record.id.replace("central2", "mirrored2")
    return next(r.outcome for r in RECORDS if r.id == same)


#: TensorFlow writes the components, then fails when it reads the result back (or
#: does not fail where nobody does, as in a merge function).
BEFORE_CHANGE = "an error comes before anything is changed"

#: Central storage decides where the copies of on-write variables live, and no more.
#: (TensorFlow takes ON_READ for ON_WRITE there.)
A_COMPONENT_EACH = "a sync-on-read variable has a component per replica on every strategy"

RULINGS = [
    Ruling("write/central2/ON_READ/*", A_COMPONENT_EACH, as_mirrored),
    Ruling("write/mirrored*/ON_WRITE/NONE/*/replica_*", 9, unchanged),
    Ruling("write/mirrored*/ON_READ/NONE/*/cross", BEFORE_CHANGE, unchanged),
    Ruling("write/mirrored*/ON_READ/NONE/*/merge", BEFORE_CHANGE, unchanged),
    Ruling(
        "write/mirrored2/ON_READ/SUM/int32/assign/cross",
        12,
        {"write": None, "components": [4, 3], "read": {"value": 7, "dtype": "int32"}},
    ),
    Ruling("assign_a/mirrored2/per_replica", 11, LocalityError),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.id)
def test_as_recorded(record):
    check(record, ask, RULINGS)


def ask(case):
    return globals()[f"ask_{case['what']}"](make_strategy(case["strategy"]), case)


def make(strategy, case):
    with strategy.scope():
        return make_variable(
            np.dtype(case["dtype"]).type(10), sync=case["sync"], aggregation=case["aggregation"]
        )


def state(v):
    """Returns the components, and what a cross-replica read gives."""
    return {
        "components": [plain(c) for c in v.local_results()],
        "read": outcome_of(lambda: array(v.value)),
    }


def one_two(strategy, dtype):
    return per_replica(
        strategy, [np.dtype(dtype).type(r + 1) for r in range(strategy.num_replicas_in_sync)]
    )


def ask_write(strategy, case):
    v = make(strategy, case)
    write, by = getattr(v, case["method"]), case["by"]
    number = 4.0 if case["dtype"] == "float32" else 7

    def act():
        if by == "replica_tensor":
            strategy.run(lambda x: write(x), (one_two(strategy, case["dtype"]),))
        elif by == "replica_number":
            strategy.run(lambda: write(number))
        elif by == "cross":
            with strategy.scope():
                write(number)
        elif by == "merge":
            merge = lambda strategy: write(number)
            strategy.run(lambda: dj.get_replica_context().merge_call(merge))
        else:
            update = lambda v, x: getattr(v, case["method"])(x)
            strategy.extended.update(v, update, args=(number,))

    return {"write": outcome_of(act), **state(v)}


def ask_read(strategy, case):
    v, by = make(strategy, case), case["by"]
    if case["sync"] == "ON_READ":
        strategy.run(lambda x: v.assign(x), (one_two(strategy, case["dtype"]),))
    if by == "replica":
        return locals_of(strategy, strategy.run(lambda: v.value))
    if by == "cross":
        with strategy.scope():
            return array(v.value)
    if by == "merge":
        merge = lambda strategy: v.value
        seen = strategy.run(lambda: dj.get_replica_context().merge_call(merge))
        return array(seen)
    if by == "read_var":
        return array(strategy.extended.read_var(v))
    return [array(x) for x in strategy.extended.update(v, lambda v: v.value * 1, group=False)]


def ask_create(strategy, case):
    with strategy.scope():
        v = make_variable(
            np.dtype(case["dtype"]).type(1), sync=case["sync"], aggregation=case["aggregation"]
        )
    return {
        "synchronization": v.synchronization.name,
        "aggregation": v.aggregation.name,
        "trainable": v.trainable,
        "dtype": v.dtype.name,
        "num_components": len(v.local_results()),
    }


def ask_assign_a(strategy, case):
    with strategy.scope():
        v = make_variable(np.int32(10) if case["value"] == "float" else np.float32(10))
        other = make_variable(np.float32(3), name="other")
        value = {
            "float": 1.5,
            "shape": np.zeros(2, np.float32),
            "per_replica": one_two(strategy, "float32"),
            "mirrored": strategy.extended.broadcast_to(jnp.asarray(5.0), other),
            "variable": other,
        }[case["value"]]
        v.assign(value)
    return state(v)
