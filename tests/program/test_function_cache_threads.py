"""Programs and variables shared by threads."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax._src.strategies import reducing
from distjax._src.variables.layouts import HostLayout
from tests.own_threads import in_threads
from tests.replicas import local

SYNC, AGG = dj.VariableSynchronization, dj.VariableAggregation


def make(strategy, initial_value, **options):
    with strategy.scope():
        return dj.Variable(initial_value, **options)


@pytest.mark.parametrize("first", ["cold", "warm"])
def test_two_threads_call_one_program(pair, first, switch_often):
    v = make(pair, jnp.zeros(4), aggregation=AGG.SUM)

    def fn(x):
        v.assign_add(x)
        return dj.get_replica_context().all_reduce("sum", x)

    x = jnp.ones(4)
    if first == "warm":
        pair.run(fn, args=(x,))
    results = []

    def work():
        for _ in range(50):
            results.append(pair.run(fn, args=(x,)))

    in_threads(work, work)
    assert [r.tolist() for r in results] == [[2] * 4] * 100
    assert v.value.tolist() == [200 + 2 * (first == "warm")] * 4


@pytest.mark.parametrize("sync", [SYNC.ON_WRITE, SYNC.ON_READ])
def test_one_thread_reads_while_another_writes(pair, sync, switch_often):
    """What is read is never an array that is being donated."""
    v = make(pair, jnp.zeros(4), synchronization=sync, aggregation=AGG.MEAN)
    fn = lambda: (v.assign_add(jnp.ones(4)), None)[1]
    read = lambda: v.value + 0
    done = threading.Event()

    def write():
        try:
            for _ in range(200):
                pair.run(fn)
        finally:
            done.set()

    seen = []

    def watch():
        while not done.is_set():
            seen.append(np.asarray(v.value)[0])
            local(pair, pair.run(read))

    in_threads(write, watch)
    assert seen == sorted(seen) and v.value.tolist() == [200] * 4


def test_two_threads_with_two_strategies(switch_often):
    """Each thread has contexts of its own; programs and variables do not mix."""
    works = []
    for count in (2, 3):
        strategy = dj.VirtualStrategy(count)
        v = make(strategy, 0.0, aggregation=AGG.SUM)

        def work(strategy=strategy, v=v):
            with strategy.scope():
                for i in range(20):
                    strategy.run(shared_step, args=(v, jnp.ones(i % 3)))
            assert float(v.value) == 20 * strategy.num_replicas_in_sync

        works.append(work)
    in_threads(*works)


def shared_step(v, x):
    v.assign_add(jnp.float32(1) + 0 * jnp.sum(x))


@pytest.mark.parametrize("read", [lambda s, v: v.value, lambda s, v: v.local_results()[0]])
def test_a_value_in_host_memory_is_not_donated_while_it_is_copied(read, monkeypatch):
    strategy = dj.CentralStorageStrategy(jax.devices()[:2])
    v = make(strategy, jnp.zeros(4), aggregation=AGG.MEAN)
    step = lambda: (v.assign_add(jnp.ones(4)), None)[1]
    strategy.run(step)
    copy, writers = HostLayout.from_stored, []

    def copy_while_another_thread_writes(layout, stored, shape):
        if not writers:
            writers.append(threading.Thread(target=strategy.run, args=(step,)))
            writers[0].start()
            writers[0].join(0.1)
        return copy(layout, stored, shape)

    monkeypatch.setattr(HostLayout, "from_stored", copy_while_another_thread_writes)
    assert read(strategy, v).tolist() == [1] * 4
    writers[0].join()
    assert v.value.tolist() == [2] * 4


def test_components_are_not_donated_while_they_are_reduced(pair, monkeypatch):
    v = make(pair, jnp.zeros(4), synchronization=SYNC.ON_READ, aggregation=AGG.SUM)
    step = lambda: (v.assign_add(jnp.ones(4)), None)[1]
    pair.run(step)
    found = reducing.read_components

    def found_before_another_thread_writes(variable):
        components = found(variable)
        thread = threading.Thread(target=pair.run, args=(step,))
        thread.start()
        thread.join()
        return components

    monkeypatch.setattr(reducing, "read_components", found_before_another_thread_writes)
    assert pair.reduce("sum", v, axis=None).tolist() == [2] * 4
    assert v.value.tolist() == [4] * 4
