"""When a coordinator raises what, and its data, as TensorFlow's ClusterCoordinator."""

import threading

import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from tests.golden.coordinator_tests import OF_TENSORFLOW
from tests.golden.distjax_side import make_strategy
from tests.golden.records import Ruling, load, outcome_of
from tests.golden.served import (
    NEGATIVE,
    check_record,
    check_value,
    did_raise,
    of_numbers,
    raised,
    waiting,
)

RECORDS = load("coordinator")

END = "data that has ended is no error of the training: join returns"

RULINGS = [
    Ruling(
        "end_of_data", END, lambda r: r.outcome | {"join raises": False, "fetch": "EndOfDataError"}
    ),
    Ruling("no_dataset/number", "a wrong type is a TypeError", TypeError),
    Ruling("second_coordinator", "coordinators are closed, so each has an owner", ValueError),
    Ruling("coordinator_of/*", "clean error", TypeError),
    Ruling("per_worker_context", "workers have shards, not all of the data", [[2, 0], [2, 1]]),
    Ruling("per_worker_next", "elements can be taken by hand", 2),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.id)
def test_as_recorded(record):
    check_record(record, globals(), RULINGS)


def test_each_test_of_tensorflow_is_asked_or_has_a_reason():
    asked = [ids for ids in OF_TENSORFLOW.values() if not ids.startswith("none: ")]
    records = RECORDS + load("closures")
    assert not [ids for ids in asked if not any(map(Ruling(ids, 0, 0).holds_for, records))]


# -- errors -----------------------------------------------------------------------


def ask_report(c, method):
    failed = c.schedule(check_value, NEGATIVE)
    outcome_of(failed.fetch)
    asked = {
        "schedule": lambda: c.schedule(check_value, np.float32(1)),
        "join": c.coordinator.join,
        "done": c.coordinator.done,
        "fetch": failed.fetch,
    }
    first = did_raise(asked[method])
    return [first, did_raise(c.coordinator.join), did_raise(c.coordinator.join)]


def ask_errors_of_many(c):
    values = [outcome_of(lambda: c.schedule(check_value, NEGATIVE)) for _ in range(3)]
    return [did_raise(c.coordinator.join), did_raise(c.coordinator.join), len(values)]


def ask_after_an_error(c):
    v = c.variable()

    def add(x):
        v.assign_add(x)

    c.schedule(add, np.float32(1))
    failed = c.schedule(check_value, NEGATIVE)
    outcome_of(failed.fetch)
    is_refused = did_raise(lambda: c.schedule(add, np.float32(10)))
    c.schedule(add, np.float32(100))
    c.coordinator.join()
    return [is_refused, v.value, did_raise(failed.fetch)]


def ask_cancelled(c):
    v, go_on = c.variable(), threading.Event()
    wait = waiting(go_on, -1)
    failed = c.schedule(lambda: check_value(wait()))
    behind = [c.schedule(lambda x: v.assign_add(x), np.float32(1)) for _ in range(2)]
    go_on.set()
    reports = did_raise(c.coordinator.join)
    errors = [raised(value.fetch) for value in behind]
    return [reports, did_raise(failed.fetch), errors, v.value]


def ask_nothing_queued(c):
    v = c.variable()
    outcome_of(c.schedule(check_value, NEGATIVE).fetch)
    raises = did_raise(lambda: c.schedule(lambda: v.assign_add(1.0)))
    c.coordinator.join()
    return [raises, v.value]


def ask_error_of_a_trace(c):
    def step():
        raise ZeroDivisionError

    return [did_raise(lambda: c.schedule(step)), did_raise(c.coordinator.join)]


def ask_done_while_running(c):
    go_on = threading.Event()
    value = c.schedule(waiting(go_on, 1))
    before = c.coordinator.done()
    go_on.set()
    c.coordinator.join()
    return [before, c.coordinator.done(), value.fetch()]


def ask_join_with_nothing(c):
    c.coordinator.join()
    return c.coordinator.done()


# -- data -------------------------------------------------------------------------


def ask_elements(c):
    iterator = c.dataset(of_numbers(5))
    values = [c.schedule(lambda x: 10 * x, iterator) for _ in range(3)]
    return [value.fetch() for value in values]


def ask_elements_after_an_error(c):
    iterator = c.dataset(of_numbers(5))
    first = c.schedule(lambda x: x, iterator).fetch()
    c.schedule(check_value, NEGATIVE)
    reports = did_raise(c.coordinator.join)
    return [first, reports, c.schedule(lambda x: x, iterator).fetch()]


def ask_iterators_of_one_dataset(c):
    dataset = c.coordinator.create_per_worker_dataset(of_numbers(5))
    first, second = iter(dataset), iter(dataset)
    values = [c.schedule(lambda x: x, it) for it in (first, first, second, first)]
    return [value.fetch() for value in values]


def ask_two_datasets_in_a_step(c):
    small, large = c.dataset(of_numbers(5)), c.dataset(lambda context: range(0, 50, 10))
    return [c.schedule(lambda a, b: a + b, small, large).fetch() for _ in range(2)]


def ask_element_structure(c):
    make = lambda context: [{"x": np.array([1.0, 2.0], np.float32), "y": 3}] * 2
    return c.schedule(lambda e: (e["x"] * 2, e["y"]), c.dataset(make)).fetch()


def ask_end_of_data(c):
    iterator = c.dataset(of_numbers(2))
    values = [c.schedule(lambda x: x, iterator) for _ in range(2)]
    c.coordinator.join()
    late = c.schedule(lambda x: x, iterator)
    return {
        "values": [value.fetch() for value in values],
        "join raises": did_raise(c.coordinator.join),
        "fetch": raised(late.fetch),
    }


def ask_no_dataset(c, kind):
    return iter(c.coordinator.create_per_worker_dataset({"number": 3}[kind]))


def ask_per_worker_sum(c):
    v = c.variable(0)
    iterator = c.dataset(lambda context: iter(lambda: 3, None))

    def step(x):
        v.assign_add(x)

    for _ in range(8):
        c.schedule(step, iterator)
    c.coordinator.join()
    return v.value


def ask_per_worker_context(c):
    found = []

    def make(context):
        found.append([context.num_input_pipelines, context.input_pipeline_id])
        return range(3)

    next(c.dataset(make))
    return sorted(found)


def ask_per_worker_dataset(c):
    v, iterator = c.variable(0), c.dataset([2] * 10)

    def step(x):
        v.assign_add(x)

    for _ in range(4):
        c.schedule(step, iterator)
    c.coordinator.join()
    return v.value


def ask_per_worker_next(c):
    return len(next(c.dataset(of_numbers(3))).values)


def ask_per_worker_error(c):
    def make(context):
        raise ZeroDivisionError

    def use():
        c.schedule(lambda x: x, c.dataset(make))
        c.coordinator.join()

    return [did_raise(use), c.schedule(lambda: jnp.float32(1)).fetch()]


# -- coordinators -----------------------------------------------------------------


def ask_second_coordinator(c):
    return dj.Coordinator(c.strategy) is c.coordinator


def ask_coordinator_of(c, strategy):
    return dj.Coordinator(make_strategy(strategy))
