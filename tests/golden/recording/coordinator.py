"""ClusterCoordinator: when it raises what, and the data of workers."""

import threading
import time

import numpy as np
import tensorflow as tf

from tests.golden.recording import tensorflow_side as side
from tests.golden.recording.in_process_cluster import (
    NEGATIVE,
    ask_all,
    check,
    did_raise,
    of_numbers,
    raised,
)

REPORTS = ("schedule", "join", "done", "fetch")


def records():
    # One worker has one order; with two is asked what does not depend on it.
    return ask_all({1: serial_cases(), 2: parallel_cases()}, globals())


def serial_cases():
    yield from (("report", method) for method in REPORTS)
    yield from (("errors_of_many",), ("after_an_error",), ("cancelled",), ("nothing_queued",))
    yield from (("error_of_a_trace",), ("done_while_running",), ("join_with_nothing",))
    yield from (("elements",), ("iterators_of_one_dataset",), ("two_datasets_in_a_step",))
    yield from (("end_of_data",), ("element_structure",), ("no_dataset", "number"))
    yield from (("elements_after_an_error",),)
    yield from (("second_coordinator",), ("coordinator_of", "one_device"))


def parallel_cases():
    yield from (("per_worker_sum",), ("per_worker_context",), ("per_worker_dataset",))
    yield from (("per_worker_next",), ("per_worker_error",))


# -- errors -----------------------------------------------------------------------


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


# -- data -------------------------------------------------------------------------


def ask_elements(c):
    iterator = c.dataset(of_numbers(5))
    values = [c.schedule(lambda it: 10 * next(it), iterator) for _ in range(3)]
    return [side.plain(value.fetch()) for value in values]


def ask_elements_after_an_error(c):
    """An iterator goes on after closures were cancelled."""
    iterator = c.dataset(of_numbers(5))
    step = lambda it: next(it)
    first = side.plain(c.schedule(step, iterator).fetch())
    c.schedule(check, NEGATIVE)
    reports = did_raise(c.coordinator.join)
    return [first, reports, side.plain(c.schedule(step, iterator).fetch())]


def ask_iterators_of_one_dataset(c):
    dataset = c.coordinator.create_per_worker_dataset(of_numbers(5))
    step = lambda it: next(it)
    first, second = iter(dataset), iter(dataset)
    values = [c.schedule(step, it) for it in (first, first, second, first)]
    return [side.plain(value.fetch()) for value in values]


def ask_two_datasets_in_a_step(c):
    small, large = (
        c.dataset(of_numbers(5)),
        c.dataset(lambda: of_numbers(5)().map(lambda x: 10 * x)),
    )
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


# -- coordinators -----------------------------------------------------------------


def ask_second_coordinator(c):
    return tf.distribute.coordinator.ClusterCoordinator(c.strategy) is c.coordinator


def ask_coordinator_of(c, strategy):
    tf.distribute.coordinator.ClusterCoordinator(side.make_strategy(strategy))
    return "made"
