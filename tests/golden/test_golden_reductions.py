"""Reductions and gathers: op, axis, dtype and kind of value, as TensorFlow has them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import LocalityError
from tests.golden.closed_form import numbers
from tests.golden.distjax_side import (
    array,
    locals_of,
    make_strategy,
    make_variable,
    numbers_per_replica,
    plain,
)
from tests.golden.records import CLEAN_ERROR, Ruling, check, load

RECORDS = load("reductions")


def in_default_float(record):
    return {**record.outcome, "dtype": "float32"}


def times_two(record):
    """Returns the sum of two equal copies."""
    return {"value": plain(2 * numbers([3])), "dtype": "float32"}


def of_two_everywhere(record):
    """Returns what all_reduce makes of the number 2."""
    count = int(record.case["strategy"][-1])
    value = 2.0 * count if record.case["op"] == "sum" else 2.0
    return {"locals": [value] * count, "dtype": "float32"}


def array_of_one(record):
    return {"value": plain(numbers([3])), "dtype": "float32"}


def as_sum(record):
    """Returns what the op "sum" gives: the sum of the numbers of seeds 0 and 1."""
    return {"value": plain(numbers([3]) + numbers([3], seed=1)), "dtype": "float32"}


#: Where nothing is gathered TensorFlow does not look at the axis; its collectives
#: refuse a negative one, its reduction to one device (recorded here) does not.
ONE_CHECK = "gathers check their axis alike on every strategy"

RULINGS = [
    Ruling("reduce/mirrored*/mean/per_replica/int32/*", 7, in_default_float),
    Ruling("reduce_to/mirrored*/mean/int32/*", 7, in_default_float),
    Ruling("all_reduce/mirrored*/mean/int32/array", 7, in_default_float),
    Ruling("reduce/mirrored2/sum/mirrored/*/None", 6, times_two),
    Ruling("reduce/mirrored2/sum/mirrored_variable/*/0", 6, LocalityError),
    Ruling("reduce/mirrored2/sum/mirrored_variable/*/None", CLEAN_ERROR, LocalityError),
    Ruling("reduce/mirrored1/sum/mirrored_variable/*/None", 3, array_of_one),
    Ruling("reduce/mirrored2/sum/numpy/*/0", 6, ValueError),
    Ruling("reduce/mirrored2/sum/numpy_zeros/*", 6, ValueError),
    Ruling("reduce/mirrored2/sum/tensor/*/0", 6, ValueError),
    Ruling("reduce/mirrored2/VariableAggregation.SUM/*", 22, as_sum),
    Ruling("reduce/mirrored2/None/*", 22, ValueError),
    Ruling("all_reduce/*/number", 25, of_two_everywhere),
    Ruling("all_reduce/*/None", 25, None),
    Ruling("gather/*/-1", ONE_CHECK, ValueError),
    Ruling("all_gather/mirrored*/-1", ONE_CHECK, ValueError),
    Ruling("gather/default/per_replica/[]/0", ONE_CHECK, ValueError),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.id)
def test_as_recorded(record):
    check(record, ask, RULINGS)


def ask(case):
    return globals()[f"ask_{case['method']}"](make_strategy(case["strategy"]), case)


def reduce_op(name):
    enums = {
        "ReduceOp.SUM": dj.ReduceOp.SUM,
        "VariableAggregation.SUM": dj.VariableAggregation.SUM,
    }
    return enums.get(name, name)


def make_value(strategy, kind, dtype, shape):
    """Returns a value of one of the kinds that `reduce` tells apart."""
    x = numbers(shape, "float32" if dtype == "bfloat16" else dtype)
    if kind == "per_replica":
        if dtype == "bfloat16":
            value = make_value(strategy, kind, "float32", shape)
            return strategy.run(lambda x: x.astype(jnp.bfloat16), (value,))
        return numbers_per_replica(strategy, shape, dtype)
    if kind == "nest":
        value = make_value(strategy, "per_replica", dtype, shape)
        return {"a": value, "b": [value]}
    with strategy.scope():
        if kind == "mirrored":
            return strategy.extended.broadcast_to(jnp.asarray(x), destinations=dj.Variable(0.0))
        if kind == "mirrored_variable":
            return dj.Variable(x)
        if kind.startswith("on_read"):
            v = make_variable(x, sync="ON_READ", aggregation=kind.split("_")[2])
            value = make_value(strategy, "per_replica", dtype, shape)
            strategy.run(lambda x: v.assign(x), (value,))
            return v
    return {
        "number": 3.0,
        "numpy": x,
        "numpy_zeros": np.zeros_like(x),
        "tensor": jnp.asarray(x),
    }[kind]


def ask_reduce(strategy, case):
    value = make_value(strategy, case["kind"], case["dtype"], case["shape"])
    axis = tuple(case["axis"]) if isinstance(case["axis"], list) else case["axis"]
    result = strategy.reduce(reduce_op(case["op"]), value, axis=axis)
    return jax.tree.map(plain, result) if case["kind"] == "nest" else array(result)


def ask_gather(strategy, case):
    value = make_value(strategy, case["kind"], "float32", case["shape"])
    return array(strategy.gather(value, axis=case["axis"]))


def destination(strategy, name, value):
    if name == "variable":
        with strategy.scope():
            return dj.Variable(0.0)
    return value if name == "value" else jax.devices()[int(name.removeprefix("CPU:"))]


def ask_reduce_to(strategy, case):
    value = numbers_per_replica(strategy, [3], case["dtype"])
    to = destination(strategy, case["to"], value)
    return locals_of(strategy, strategy.extended.reduce_to(case["op"], value, to))


def ask_batch_reduce_to(strategy, case):
    values = [numbers_per_replica(strategy, shape, "float32") for shape in ([3], [], [2, 2])]
    places = ("variable", "CPU:0", "value")
    pairs = [(v, destination(strategy, to, v)) for v, to in zip(values, places, strict=True)]
    return [locals_of(strategy, x) for x in strategy.extended.batch_reduce_to(case["op"], pairs)]


def ask_broadcast_to(strategy, case):
    to = destination(strategy, case["to"], None)
    return locals_of(strategy, strategy.extended.broadcast_to(jnp.asarray(numbers([3])), to))


def ask_all_reduce(strategy, case):
    x = numbers_per_replica(strategy, [3], case["dtype"])
    with strategy.scope():
        v = make_variable(numbers([3]), sync="ON_READ", aggregation="SUM")

    def fn(x):
        value = {"array": x, "nest": {"a": x, "b": [2 * x]}, "number": 2.0, "None": None}
        value["variable"] = v
        return dj.get_replica_context().all_reduce(case["op"], value[case["what"]])

    result = strategy.run(fn, (x,))
    if result is None:
        return None
    if case["what"] != "nest":
        return locals_of(strategy, result)
    return {"a": locals_of(strategy, result["a"]), "b": locals_of(strategy, result["b"][0])}


def ask_all_gather(strategy, case):
    x = numbers_per_replica(strategy, case["shape"], "float32")
    gather = lambda x: dj.get_replica_context().all_gather(x, axis=case["axis"])
    return locals_of(strategy, strategy.run(gather, (x,)))
