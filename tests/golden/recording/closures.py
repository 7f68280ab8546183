"""Closures of a ClusterCoordinator: what they take, give back and see."""

import tensorflow as tf

from tests.golden.closed_form import numbers
from tests.golden.recording import tensorflow_side as side
from tests.golden.recording.in_process_cluster import NUM_SERVERS, ask_all

RESULTS = ("scalar", "tuple", "list", "dict", "nest", "none", "python_number", "dtypes", "variable")
ARGUMENTS = ("number", "array", "numpy", "dict", "list", "tuple", "none", "keyword", "default")
ARGUMENTS += ("string", "remote", "remote_in_nest", "remote_keyword", "a_list_of_arguments")
FUNCTIONS = ("traced", "python", "lambda", "number", "method")


def records():
    # One worker has one order; with two is asked what does not depend on it.
    return ask_all({1: serial_cases(), 2: [("sum", 1), ("sum", 25)]}, globals())


def serial_cases():
    yield from (("result", kind) for kind in RESULTS)
    yield from (("argument", kind) for kind in ARGUMENTS)
    yield from (("function", kind) for kind in FUNCTIONS)
    yield from (("fetch_nest",), ("order",), ("own_writes",), ("writes",), ("contexts",))
    yield from (("run_in_step",), ("merge_in_step",), ("reduce_in_step",), ("in_scope",))
    yield from (("run_outside",), ("reduce_outside",), ("docs_example",))
    yield from (("placement", count) for count in (1, 5))
    yield from (("colocation",), ("created_in_step",))


# -- values -----------------------------------------------------------------------


def ask_result(c, kind):
    v = c.variable(3.0)
    results = {
        "scalar": lambda: tf.constant(2.0),
        "tuple": lambda: (tf.constant(1.0), tf.constant([2.0, 3.0])),
        "list": lambda: [tf.constant(1), tf.constant(2)],
        "dict": lambda: {"b": tf.constant(1.0), "a": tf.constant(2.0)},
        "nest": lambda: {"x": (tf.constant(1.0), [tf.constant(2.0)]), "y": tf.constant(3)},
        "none": lambda: None,
        "python_number": lambda: 5,
        "dtypes": lambda: [tf.cast(tf.constant(1.0), d) for d in ("int32", "bool", "float16")],
        "variable": lambda: v.read_value(),
    }
    return side.plain(c.schedule(results[kind]).fetch())


def ask_argument(c, kind):
    array = numbers((2, 3), "float32")
    double = lambda x: tf.nest.map_structure(lambda leaf: leaf * 2, x)
    remote = lambda: c.schedule(lambda: tf.constant(1.0))
    asked = {
        "number": lambda: c.schedule(double, 3.0),
        "array": lambda: c.schedule(double, tf.constant(array)),
        "numpy": lambda: c.schedule(double, array),
        "dict": lambda: c.schedule(double, {"a": tf.constant(1.0), "b": tf.constant(2.0)}),
        "list": lambda: c.schedule(double, [tf.constant(1.0), tf.constant(2.0)]),
        "tuple": lambda: c.schedule(double, (tf.constant(1.0), (tf.constant(2.0),))),
        "none": lambda: c.schedule(lambda x: tf.constant(x is None), None),
        "keyword": lambda: c.schedule(lambda a, b: a - b, b=tf.constant(1.0), a=tf.constant(3.0)),
        "default": lambda: c.schedule(lambda a, b=2.0: a - b, tf.constant(3.0)),
        "string": lambda: c.schedule(lambda x, op: x * 2 if op == "double" else x, 1.0, "double"),
        "remote": lambda: c.schedule(double, remote()),
        "remote_in_nest": lambda: c.schedule(double, {"a": [remote()]}),
        "remote_keyword": lambda: c.schedule(double, x=remote()),
        "a_list_of_arguments": lambda: c.coordinator.schedule(
            tf.function(lambda a, b: a - b), args=[tf.constant(3.0), tf.constant(1.0)]
        ),
    }
    return side.plain(asked[kind]().fetch())


def ask_function(c, kind):
    class Steps:
        @tf.function
        def step(self):
            return tf.constant(1.0)

    def step():
        return tf.constant(1.0)

    functions = {
        "traced": tf.function(step),
        "python": step,
        "lambda": lambda: tf.constant(1.0),
        "number": 3,
        "method": Steps().step,
    }
    return side.plain(c.coordinator.schedule(functions[kind]).fetch())


def ask_fetch_nest(c):
    values = [c.schedule(lambda x: x + 1.0, tf.constant(float(i))) for i in range(3)]
    nest = {"some": values[:2], "pair": (values[2], 7.0), "none": None}
    return side.plain(c.coordinator.fetch(nest))


def ask_order(c):
    v = c.variable(0.0)
    values = [c.schedule(lambda x: v.assign(2 * v + x), tf.constant(x)) for x in (1.0, 2.0, 3.0)]
    return [side.plain(value.fetch()) for value in values]


def ask_sum(c, count):
    v = c.variable(0.0)
    for i in range(count):
        c.schedule(lambda x: v.assign_add(x), tf.constant(float(i)))
    c.coordinator.join()
    return [side.plain(v), c.coordinator.done()]


def ask_own_writes(c):
    v = c.variable(1.0)

    def step():
        before = v.read_value()
        v.assign_add(1.0)
        between = v.read_value()
        v.assign(10 * v)
        return before, between, v.read_value()

    return side.plain(c.schedule(step).fetch())


def ask_writes(c):
    v, w = c.variable(8.0), c.variable([1.0, 2.0])

    def step():
        v.assign_sub(2.0)
        w.assign_add([0.5, 0.5])

    c.schedule(step)
    c.coordinator.join()
    v.assign_add(1.0)  # outside of closures
    return [side.plain(v), side.plain(w)]


def ask_docs_example(c):
    v1, v2 = c.variable(0.0), c.variable(1.0)

    def step():
        v1.assign_add(0.1)
        v2.assign_sub(0.2)
        return v1.read_value() / v2.read_value()

    return side.plain(c.schedule(step).fetch())


# -- contexts ---------------------------------------------------------------------


def ask_contexts(c):
    found = {}

    def step():
        found["has_strategy"] = tf.distribute.has_strategy()
        found["in_cross_replica_context"] = tf.distribute.in_cross_replica_context()
        found["num_replicas"] = tf.distribute.get_strategy().num_replicas_in_sync
        return tf.constant(0)

    c.schedule(step).fetch()
    return found


def ask_run_in_step(c):
    def replica_step(x):
        return x + tf.distribute.get_replica_context().num_replicas_in_sync

    return side.plain(c.schedule(lambda x: c.strategy.run(replica_step, (x,)), 1.0).fetch())


def ask_merge_in_step(c):
    def replica_step(x):
        return tf.distribute.get_replica_context().merge_call(lambda s, x: x * 3, args=(x,))

    return side.plain(c.schedule(lambda x: c.strategy.run(replica_step, (x,)), 2.0).fetch())


def ask_reduce_in_step(c):
    def replica_step(x):
        return tf.distribute.get_replica_context().all_reduce("sum", x)

    step = lambda x: c.strategy.run(replica_step, (x,))
    return side.plain(c.schedule(step, tf.constant(4.0)).fetch())


def ask_in_scope(c):
    """A call of `schedule` under the strategy's scope."""
    v = c.variable(1.0)
    with c.strategy.scope():
        value = c.schedule(lambda x: (x + v, x - v), tf.constant(3.0))
    return side.plain(value.fetch())


def ask_run_outside(c):
    v = c.variable(1.0)
    return side.plain(c.strategy.run(tf.function(lambda x: v.assign_add(x)), args=(2.0,)))


def ask_reduce_outside(c):
    value = c.strategy.run(tf.function(lambda: tf.constant(3.0)))
    return side.plain(c.strategy.reduce("sum", value, axis=None))


# -- variables --------------------------------------------------------------------


def server_of(v):
    return int(v.device.split("task:")[1].split("/")[0])


def ask_placement(c, count):
    with c.strategy.scope():
        before = tf.Variable(0.0)
        variables = [tf.Variable(0.0) for _ in range(count)]
    return [(server_of(v) - server_of(before)) % NUM_SERVERS for v in variables]


def ask_colocation(c):
    v = c.variable([0.0, 0.0])
    with c.strategy.scope(), c.strategy.extended.colocate_vars_with(v):
        beside = [tf.Variable(0.0), tf.Variable([1.0])]
    return [server_of(w) == server_of(v) for w in beside]


def ask_created_in_step(c):
    return c.schedule(lambda: tf.Variable(1.0) + 1.0).fetch()
