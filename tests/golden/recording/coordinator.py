"""ClusterCoordinator: what it takes, gives and raises, with workers and servers in one process."""

import socket
import threading
import time

import numpy as np
import tensorflow as tf

from tests.golden.closed_form import numbers
from tests.golden.recording import tensorflow_side as side

NUM_SERVERS = 2
RESULTS = ("scalar", "tuple", "list", "dict", "nest", "none", "python_number", "dtypes", "variable")
ARGUMENTS = ("number", "array", "numpy", "dict", "list", "tuple", "none", "keyword", "default")
ARGUMENTS += ("string", "remote", "remote_in_nest", "remote_keyword", "a_list_of_arguments")
FUNCTIONS = ("traced", "python", "lambda", "number", "method")
REPORTS = ("schedule", "join", "done", "fetch")


def records():
    for num_workers, cases in ((1, serial_cases()), (2, parallel_cases())):
        cluster = Cluster(num_workers)
        for what, *parts in cases:
            case = {"what": what, "parts": parts, "workers": num_workers}
            ask = globals()[f"ask_{what}"]
            outcome = side.outcome_of(lambda ask=ask, c=cluster, p=parts: ask(c, *p))
            yield "/".join([what, *map(str, parts)]), case, outcome
            cluster.settle()


def serial_cases():
    """One worker, so there is one order."""
    yield from (("result", kind) for kind in RESULTS)
    yield from (("argument", kind) for kind in ARGUMENTS)
    yield from (("function", kind) for kind in FUNCTIONS)
    yield from (("report", method) for method in REPORTS)
    yield from (("fetch_nest",), ("order",), ("own_writes",), ("writes",), ("contexts",))
    yield from (("run_in_step",), ("merge_in_step",), ("reduce_in_step",))
    yield from (("run_outside",), ("reduce_outside",), ("docs_example",))
    yield from (("placement", count) for count in (1, 5))
    yield from (("colocation",), ("created_in_step",))
    yield from (("errors_of_many",), ("after_an_error",), ("cancelled",), ("nothing_queued",))
    yield from (("error_of_a_trace",), ("done_while_running",), ("join_with_nothing",))
    yield from (("elements",), ("iterators_of_one_dataset",), ("two_datasets_in_a_step",))
    yield from (("end_of_data",), ("element_structure",), ("no_dataset", "number"))
    yield from (("second_coordinator",), ("coordinator_of", "one_device"))


def parallel_cases():
    """Two workers: what does not depend on the order."""
    yield from (("sum", count) for count in (1, 25))
    yield from (("per_worker_sum",), ("per_worker_context",), ("per_worker_dataset",))
    yield from (("per_worker_next",), ("per_worker_error",))


class Cluster:
    """Workers and servers of this process, with a coordinator."""

    def __init__(self, num_workers):
        sockets = [socket.socket() for _ in range(num_workers + NUM_SERVERS)]
        for each in sockets:  # held until all are known
            each.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
        for each in sockets:
            each.close()
        spec = {"worker": addresses[:num_workers], "ps": addresses[num_workers:]}
        cluster = tf.train.ClusterSpec(spec)
        # Each function holds a thread while it reads what another server has.
        threads = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=num_workers + 3)
        tasks = [(job, i) for job in spec for i in range(len(spec[job]))]
        self.servers = [tf.distribute.Server(cluster, j, i, "grpc", threads) for j, i in tasks]
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
        self.strategy = tf.distribute.ParameterServerStrategy(resolver)
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)

    def variable(self, value=0.0, **options):
        with self.strategy.scope():
            return tf.Variable(value, **options)

    def schedule(self, fn, *args, **kwargs):
        return self.coordinator.schedule(tf.function(fn), args=args, kwargs=kwargs)

    def dataset(self, fn):
        return iter(self.coordinator.create_per_worker_dataset(fn))

    def settle(self):
        """Leaves no error to the next case."""
        side.outcome_of(self.coordinator.join)


def raised(act):
    """Returns "nothing", or the name of the error that `act` raises."""
    outcome = side.outcome_of(act)
    return outcome["error"] if isinstance(outcome, dict) and "error" in outcome else "nothing"


def did_raise(act):
    return raised(act) != "nothing"


def check(x):
    """Fails at the worker for what is negative."""
    tf.debugging.assert_non_negative(x)
    return x


NEGATIVE = tf.constant(-1.0)


# -- values ---------------------------------------------------------------------


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


# -- contexts -------------------------------------------------------------------


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


def ask_run_outside(c):
    v = c.variable(1.0)
    return side.plain(c.strategy.run(tf.function(lambda x: v.assign_add(x)), args=(2.0,)))


def ask_reduce_outside(c):
    value = c.strategy.run(tf.function(lambda: tf.constant(3.0)))
    return side.plain(c.strategy.reduce("sum", value, axis=None))


# -- variables ------------------------------------------------------------------


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


# -- errors ---------------------------------------------------------------------


def ask_report(c, method):
    """Which calls raise after an error: the first that asks, and no later one."""
    failed = c.schedule(check, NEGATIVE)
    side.outcome_of(failed.fetch)  # waits
    asked = {
        "schedule": lambda: c.schedule(check, tf.constant(1.0)),
        "join": c.coordinator.join,
        "done": c.coordinator.done,
        "fetch": failed.fetch,
    }
    first = did_raise(asked[method])
    return [first, did_raise(c.coordinator.join), did_raise(c.coordinator.join)]


def ask_errors_of_many(c):
    values = [side.outcome_of(lambda: c.schedule(check, NEGATIVE)) for _ in range(3)]
    return [did_raise(c.coordinator.join), did_raise(c.coordinator.join), len(values)]


def ask_after_an_error(c):
    v = c.variable(0.0)
    add = lambda x: v.assign_add(x)
    c.schedule(add, tf.constant(1.0))
    failed = c.schedule(check, NEGATIVE)
    side.outcome_of(failed.fetch)
    is_refused = did_raise(lambda: c.schedule(add, tf.constant(10.0)))
    c.schedule(add, tf.constant(100.0))
    c.coordinator.join()
    return [is_refused, side.plain(v), did_raise(failed.fetch)]


def ask_cancelled(c):
    """What becomes of closures that wait behind one that fails."""
    v, go_on = c.variable(0.0), threading.Event()

    def fail():
        return check(tf.numpy_function(lambda: np.float32(go_on.wait() * -1), [], tf.float32))

    def nap():  # `join` is what cancels: it has to find closures that wait
        return tf.numpy_function(lambda: np.float32(time.sleep(0.5) or 0), [], tf.float32)

    failed = c.schedule(fail)
    c.schedule(nap)
    waiting = [c.schedule(lambda x: v.assign_add(x), tf.constant(1.0)) for _ in range(2)]
    go_on.set()
    reports = did_raise(c.coordinator.join)
    errors = [raised(value.fetch) for value in waiting]
    return [reports, did_raise(failed.fetch), errors, side.plain(v)]


def ask_nothing_queued(c):
    """A call that raises what an earlier closure did has not queued its own."""
    v = c.variable(0.0)
    side.outcome_of(c.schedule(check, NEGATIVE).fetch)
    raises = did_raise(lambda: c.schedule(lambda: v.assign_add(1.0)))
    c.coordinator.join()
    return [raises, side.plain(v)]


def ask_error_of_a_trace(c):
    def step():
        raise ZeroDivisionError

    return [did_raise(lambda: c.schedule(step)), did_raise(c.coordinator.join)]


def ask_done_while_running(c):
    go_on = threading.Event()
    wait = lambda: tf.numpy_function(lambda: np.float32(go_on.wait()), [], tf.float32)
    value = c.schedule(wait)
    before = c.coordinator.done()
    go_on.set()
    c.coordinator.join()
    return [before, c.coordinator.done(), side.plain(value.fetch())]


def ask_join_with_nothing(c):
    c.coordinator.join()
    return c.coordinator.done()


# -- data -----------------------------------------------------------------------


def of_numbers(count):
    return lambda: tf.data.Dataset.range(count, output_type=tf.int32)


def ask_elements(c):
    iterator = c.dataset(of_numbers(5))
    values = [c.schedule(lambda it: 10 * next(it), iterator) for _ in range(3)]
    return [side.plain(value.fetch()) for value in values]


def ask_iterators_of_one_dataset(c):
    dataset = c.coordinator.create_per_worker_dataset(of_numbers(5))
    step = lambda it: next(it)
    first, second = iter(dataset), iter(dataset)
    values = [c.schedule(step, it) for it in (first, first, second, first)]
    return [side.plain(value.fetch()) for value in values]


def ask_two_datasets_in_a_step(c):
    small, large = c.dataset(of_numbers(5)), c.dataset(lambda: of_numbers(5)().map(lambda x: 10 * x))
    step = lambda a, b: next(a) + next(b)
    return [side.plain(c.schedule(step, small, large).fetch()) for _ in range(2)]


def ask_element_structure(c):
    make = lambda: tf.data.Dataset.from_tensors({"x": [1.0, 2.0], "y": 3}).repeat(2)
    step = lambda it: (lambda e: (e["x"] * 2, e["y"]))(next(it))
    return side.plain(c.schedule(step, c.dataset(make)).fetch())


def ask_end_of_data(c):
    iterator = c.dataset(of_numbers(2))
    values = [c.schedule(lambda it: next(it), iterator) for _ in range(2)]
    c.coordinator.join()
    late = c.schedule(lambda it: next(it), iterator)
    return {
        "values": [side.plain(value.fetch()) for value in values],
        "join raises": did_raise(c.coordinator.join),
        "fetch": raised(late.fetch),
    }


def ask_no_dataset(c, kind):
    made = iter(c.coordinator.create_per_worker_dataset({"number": 3}[kind]))
    return side.plain(c.schedule(lambda it: next(it), made).fetch())


def ask_per_worker_sum(c):
    v, iterator = c.variable(0), c.dataset(lambda: of_numbers(1)().map(lambda x: x + 3).repeat())
    for _ in range(8):
        c.schedule(lambda it: v.assign_add(next(it)), iterator)
    c.coordinator.join()
    return side.plain(v)


def ask_per_worker_context(c):
    found = []

    def make(context):
        found.append([context.num_input_pipelines, context.input_pipeline_id])
        return of_numbers(3)()

    iterator = c.dataset(make)
    for _ in range(4):
        c.schedule(lambda it: next(it), iterator)
    side.outcome_of(c.coordinator.join)
    return sorted(found)


def ask_per_worker_dataset(c):
    """A dataset in place of a function."""
    v, iterator = c.variable(0), c.dataset(tf.data.Dataset.from_tensors(2).repeat(10))
    for _ in range(4):
        c.schedule(lambda it: v.assign_add(next(it)), iterator)
    c.coordinator.join()
    return side.plain(v)


def ask_per_worker_next(c):
    return len(next(c.dataset(of_numbers(3))).fetch())


def ask_per_worker_error(c):
    """An error of a function of a dataset comes out, and later closures run."""

    def make():
        raise ZeroDivisionError

    def use():
        iterator = c.dataset(make)
        c.schedule(lambda it: next(it), iterator)
        c.coordinator.join()

    return [did_raise(use), side.plain(c.schedule(lambda: tf.constant(1.0)).fetch())]


# -- coordinators ---------------------------------------------------------------


def ask_second_coordinator(c):
    return tf.distribute.coordinator.ClusterCoordinator(c.strategy) is c.coordinator


def ask_coordinator_of(c, strategy):
    tf.distribute.coordinator.ClusterCoordinator(side.make_strategy(strategy))
    return "made"
