"""What closures take, give back and see, as those of TensorFlow's ClusterCoordinator do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import TraceLeakError
from tests.golden.closed_form import numbers
from tests.golden.records import Ruling, load
from tests.golden.served import NUM_SERVERS, check_record

RECORDS = load("closures")

IS_REPLICA = "a scheduled function is a replica function, as that of strategy.run"

RULINGS = [
    Ruling("function/python", "any function is traced", 1.0),
    Ruling("function/lambda", "any function is traced", 1.0),
    Ruling("contexts", IS_REPLICA, lambda r: r.outcome | {"in_cross_replica_context": False}),
    Ruling("reduce_in_step", "all_reduce is the identity of one replica", 4.0),
    Ruling("created_in_step", "variables are made before the step", TraceLeakError),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.id)
def test_as_recorded(record):
    check_record(record, globals(), RULINGS)


# -- values -----------------------------------------------------------------------


def ask_result(c, kind):
    v = c.variable(3.0)
    results = {
        "scalar": lambda: jnp.float32(2),
        "tuple": lambda: (jnp.float32(1), jnp.array([2.0, 3.0])),
        "list": lambda: [jnp.array(1), jnp.array(2)],
        "dict": lambda: {"b": jnp.float32(1), "a": jnp.float32(2)},
        "nest": lambda: {"x": (jnp.float32(1), [jnp.float32(2)]), "y": jnp.array(3)},
        "none": lambda: None,
        "python_number": lambda: 5,
        "dtypes": lambda: [jnp.float32(1).astype(d) for d in ("int32", "bool", "float16")],
        "variable": lambda: v.value,
    }
    return c.schedule(results[kind]).fetch()


def ask_argument(c, kind):
    array = numbers((2, 3), "float32")
    double = lambda x: jax.tree.map(lambda leaf: leaf * 2, x)
    one, two, three = map(jnp.float32, (1, 2, 3))
    remote = lambda: c.schedule(lambda: jnp.float32(1))
    asked = {
        "number": lambda: c.schedule(double, 3.0),
        "array": lambda: c.schedule(double, jnp.asarray(array)),
        "numpy": lambda: c.schedule(double, array),
        "dict": lambda: c.schedule(double, {"a": one, "b": two}),
        "list": lambda: c.schedule(double, [one, two]),
        "tuple": lambda: c.schedule(double, (one, (two,))),
        "none": lambda: c.schedule(lambda x: jnp.array(x is None), None),
        "keyword": lambda: c.schedule(lambda a, b: a - b, b=one, a=three),
        "default": lambda: c.schedule(lambda a, b=2.0: a - b, three),
        "string": lambda: c.schedule(lambda x, op: x * 2 if op == "double" else x, 1.0, "double"),
        "remote": lambda: c.schedule(double, remote()),
        "remote_in_nest": lambda: c.schedule(double, {"a": [remote()]}),
        "remote_keyword": lambda: c.schedule(double, x=remote()),
        "a_list_of_arguments": lambda: c.coordinator.schedule(lambda a, b: a - b, [three, one]),
    }
    return asked[kind]().fetch()


def ask_function(c, kind):
    class Steps:
        def step(self):
            return jnp.float32(1)

    def step():
        return jnp.float32(1)

    functions = {
        "traced": jax.jit(step),
        "python": step,
        "lambda": lambda: jnp.float32(1),
        "number": 3,
        "method": Steps().step,
    }
    return c.coordinator.schedule(functions[kind]).fetch()


def ask_fetch_nest(c):
    values = [c.schedule(lambda x: x + 1.0, np.float32(i)) for i in range(3)]
    return c.coordinator.fetch({"some": values[:2], "pair": (values[2], 7.0), "none": None})


def ask_order(c):
    v = c.variable()

    def step(x):
        v.assign(2 * v.value + x)
        return v.value

    values = [c.schedule(step, np.float32(x)) for x in (1, 2, 3)]
    return [value.fetch() for value in values]


def ask_sum(c, count):
    v = c.variable()

    def step(x):
        v.assign_add(x)

    for i in range(count):
        c.schedule(step, np.float32(i))
    c.coordinator.join()
    return [v.value, c.coordinator.done()]


def ask_own_writes(c):
    v = c.variable(1.0)

    def step():
        before = v.value
        v.assign_add(1.0)
        between = v.value
        v.assign(10 * between)
        return before, between, v.value

    return c.schedule(step).fetch()


def ask_writes(c):
    v, w = c.variable(8.0), c.variable(jnp.array([1.0, 2.0]))

    def step():
        v.assign_sub(2.0)
        w.assign_add(jnp.array([0.5, 0.5]))

    c.schedule(step)
    c.coordinator.join()
    v.assign_add(1.0)
    return [v.value, w.value]


def ask_docs_example(c):
    v1, v2 = c.variable(0.0), c.variable(1.0)

    def step():
        v1.assign_add(0.1)
        v2.assign_sub(0.2)
        return v1.value / v2.value

    return c.schedule(step).fetch()


# -- contexts ---------------------------------------------------------------------


def ask_contexts(c):
    found = {}

    def step():
        found["has_strategy"] = dj.has_strategy()
        found["in_cross_replica_context"] = dj.in_cross_replica_context()
        found["num_replicas"] = dj.get_strategy().num_replicas_in_sync

    c.schedule(step).fetch()
    return found


def ask_run_in_step(c):
    step = lambda x: x + dj.get_replica_context().num_replicas_in_sync
    return c.schedule(step, 1.0).fetch()


def ask_merge_in_step(c):
    step = lambda x: dj.get_replica_context().merge_call(lambda s, x: x * 3, args=(x,))
    return c.schedule(step, 2.0).fetch()


def ask_reduce_in_step(c):
    return c.schedule(lambda x: dj.get_replica_context().all_reduce("sum", x), 4.0).fetch()


def ask_in_scope(c):
    v = c.variable(1.0)
    with c.strategy.scope():
        return c.schedule(lambda x: (x + v.value, x - v.value), 3.0).fetch()


def ask_run_outside(c):
    v = c.variable(1.0)

    def step(x):
        v.assign_add(x)
        return v.value

    return c.strategy.run(step, args=(2.0,))


def ask_reduce_outside(c):
    return c.strategy.reduce("sum", c.strategy.run(lambda: jnp.float32(3)), axis=None)


# -- variables --------------------------------------------------------------------


def ask_placement(c, count):
    before, *variables = [c.variable() for _ in range(1 + count)]
    return [(v.layout.server - before.layout.server) % NUM_SERVERS for v in variables]


def ask_colocation(c):
    v = c.variable(jnp.zeros(2))
    with c.strategy.scope(), c.strategy.extended.colocate_vars_with(v):
        beside = [dj.Variable(0.0), dj.Variable(jnp.ones(1))]
    return [w.layout.server == v.layout.server for w in beside]


def ask_created_in_step(c):
    return c.schedule(lambda: dj.Variable(1.0).value + 1.0).fetch()
