"""reduce, reduce_to, batch_reduce_to, gather, all_reduce, all_gather, broadcast_to."""

import itertools

import numpy as np
import tensorflow as tf

from tests.golden.closed_form import numbers
from tests.golden.recording import tensorflow_side as side

OPS = ("sum", "mean")
SHAPES_AND_AXES = [
    ([], [None]),
    ([3], [None, 0, -1]),
    ([2, 3], [None, 0, 1, -1, [0, 1], [-1, 0], []]),
]


def cases():
    """Yields what is asked, as dicts of JSON values."""
    yield from reduce_cases()
    for strategy, op in itertools.product(("mirrored2", "mirrored3"), OPS):
        for dtype, to in itertools.product(("float32", "int32"), ("variable", "value", "CPU:1")):
            yield dict(method="reduce_to", strategy=strategy, op=op, dtype=dtype, to=to)
        yield dict(method="batch_reduce_to", strategy=strategy, op=op)
        for dtype in ("float32", "int32", "float16"):
            yield dict(method="all_reduce", strategy=strategy, op=op, dtype=dtype, what="array")
        for what in ("nest", "number", "None", "variable"):
            yield dict(method="all_reduce", strategy=strategy, op=op, dtype="float32", what=what)
    for strategy in ("mirrored2", "mirrored3", "default"):
        for shape, axis in (([2, 3], 0), ([2, 3], 1), ([3], 0), ([3], -1), ([2, 3], 2), ([], 0)):
            yield dict(method="all_gather", strategy=strategy, shape=shape, axis=axis)
        for shape, axis in (([2, 3], 0), ([2, 3], 1), ([2, 3], -1), ([3], 0), ([], 0)):
            yield dict(
                method="gather", strategy=strategy, kind="per_replica", shape=shape, axis=axis
            )
        for kind in ("mirrored", "tensor", "number")[strategy == "default" :]:
            yield dict(method="gather", strategy=strategy, kind=kind, shape=[3], axis=0)
        for to in ("variable", "CPU:0"):
            yield dict(method="broadcast_to", strategy=strategy, to=to)


def reduce_cases():
    for op, (shape, axes) in itertools.product(OPS, SHAPES_AND_AXES):
        for axis in axes:
            yield reduce_case("mirrored2", op, "per_replica", "float32", shape, axis)
        for axis in axes[:2]:
            yield reduce_case("mirrored2", op, "per_replica", "int32", shape, axis)
        for dtype in ("float32", "int32"):
            yield reduce_case("mirrored3", op, "per_replica", dtype, shape, axes[-1])
    for op, dtype in itertools.product(OPS, ("float16", "bfloat16", "complex64", "int8", "uint8")):
        yield reduce_case("mirrored2", op, "per_replica", dtype, [3], None)
        yield reduce_case("mirrored2", op, "per_replica", dtype, [3], 0)
    for strategy in ("mirrored2", "default"):
        kinds = ("mirrored", "mirrored_variable", "on_read_SUM", "on_read_MEAN")
        kinds = kinds[strategy == "default" :]  # there, broadcast_to is not implemented
        for kind, op in itertools.product(
            (*kinds, "number", "numpy", "numpy_zeros", "tensor"), OPS
        ):
            for axis in (None, 0):
                if kind != "number" or axis is None:
                    yield reduce_case(strategy, op, kind, "float32", [3], axis)
    yield reduce_case("mirrored1", "sum", "mirrored_variable", "float32", [3], None)
    for shape, axis in (([2, 3], 2), ([2, 3], -3), ([], 0), ([3], "x")):
        yield reduce_case("mirrored2", "sum", "per_replica", "float32", shape, axis)
    for op in ("SUM", "Mean", "ReduceOp.SUM", "VariableAggregation.SUM", "max", None):
        yield reduce_case("mirrored2", op, "per_replica", "float32", [3], None)
    for axis in (None, 0):
        yield reduce_case("mirrored2", "sum", "nest", "float32", [3], axis)


def reduce_case(strategy, op, kind, dtype, shape, axis):
    return dict(
        method="reduce", strategy=strategy, op=op, kind=kind, dtype=dtype, shape=shape, axis=axis
    )


def records():
    for case in cases():
        strategy = side.make_strategy(case["strategy"])
        ask = globals()[f"ask_{case['method']}"]
        outcome = side.outcome_of(lambda ask=ask, s=strategy, c=case: ask(s, c))
        name = "/".join(str(value).replace(" ", "") for value in case.values())
        yield name, case, outcome


def reduce_op(name):
    enums = {
        "ReduceOp.SUM": tf.distribute.ReduceOp.SUM,
        "VariableAggregation.SUM": tf.VariableAggregation.SUM,
    }
    return enums.get(name, name)


def make_value(strategy, kind, dtype, shape):
    """Returns a value of one of the kinds that `reduce` tells apart."""
    x = numbers(shape, "float32" if dtype == "bfloat16" else dtype)
    if kind == "per_replica":
        if dtype == "bfloat16":
            value = make_value(strategy, kind, "float32", shape)
            return strategy.run(lambda x: tf.cast(x, tf.bfloat16), (value,))
        return side.numbers_per_replica(strategy, shape, dtype)
    if kind == "nest":
        value = make_value(strategy, "per_replica", dtype, shape)
        return {"a": value, "b": [value]}
    with strategy.scope():
        if kind == "mirrored":
            where = tf.Variable(0.0)
            return strategy.extended.broadcast_to(tf.constant(x), destinations=where)
        if kind == "mirrored_variable":
            return tf.Variable(x)
        if kind.startswith("on_read"):
            v = side.make_variable(x, sync="ON_READ", aggregation=kind.split("_")[2])
            value = make_value(strategy, "per_replica", dtype, shape)
            strategy.run(v.assign, (value,))
            return v
    return {
        "number": 3.0,
        "numpy": x,
        "numpy_zeros": np.zeros_like(x),
        "tensor": tf.constant(x),
    }[kind]


def ask_reduce(strategy, case):
    value = make_value(strategy, case["kind"], case["dtype"], case["shape"])
    axis = tuple(case["axis"]) if isinstance(case["axis"], list) else case["axis"]
    result = strategy.reduce(reduce_op(case["op"]), value, axis=axis)
    return side.plain(result) if case["kind"] == "nest" else side.array(result)


def ask_gather(strategy, case):
    value = make_value(strategy, case["kind"], "float32", case["shape"])
    return side.array(strategy.gather(value, axis=case["axis"]))


def destination(strategy, name, value):
    if name == "variable":
        with strategy.scope():
            return tf.Variable(0.0)
    return value if name == "value" else name


def ask_reduce_to(strategy, case):
    value = side.numbers_per_replica(strategy, [3], case["dtype"])
    to = destination(strategy, case["to"], value)
    return side.locals_of(strategy, strategy.extended.reduce_to(case["op"], value, to))


def ask_batch_reduce_to(strategy, case):
    values = [side.numbers_per_replica(strategy, shape, "float32") for shape in ([3], [], [2, 2])]
    places = ("variable", "CPU:0", "value")
    pairs = [(v, destination(strategy, to, v)) for v, to in zip(values, places, strict=True)]
    reduced = strategy.extended.batch_reduce_to(case["op"], pairs)
    return [side.locals_of(strategy, x) for x in reduced]


def ask_broadcast_to(strategy, case):
    to = destination(strategy, case["to"], None)
    value = strategy.extended.broadcast_to(tf.constant(numbers([3])), to)
    return side.locals_of(strategy, value)


def ask_all_reduce(strategy, case):
    x = side.numbers_per_replica(strategy, [3], case["dtype"])
    with strategy.scope():
        v = side.make_variable(numbers([3]), sync="ON_READ", aggregation="SUM")

    def fn(x):
        value = {"array": x, "nest": {"a": x, "b": [2 * x]}, "number": 2.0, "None": None}
        value["variable"] = v
        return tf.distribute.get_replica_context().all_reduce(case["op"], value[case["what"]])

    result = strategy.run(fn, (x,))
    if case["what"] != "nest":
        return side.locals_of(strategy, result)
    return {
        "a": side.locals_of(strategy, result["a"]),
        "b": side.locals_of(strategy, result["b"][0]),
    }


def ask_all_gather(strategy, case):
    x = side.numbers_per_replica(strategy, case["shape"], "float32")
    gather = lambda x: tf.distribute.get_replica_context().all_gather(x, axis=case["axis"])
    return side.locals_of(strategy, strategy.run(gather, (x,)))
