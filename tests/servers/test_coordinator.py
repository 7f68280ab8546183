"""What a coordinator promises, on plans made by hand."""

import gc
import threading
import time
import types
import weakref
from concurrent.futures import CancelledError, ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax._src.servers import coordinator as coordinator_module
from distjax._src.servers.coordinator import Coordinator, run_step
from distjax._src.servers.engine import WorkerDied
from distjax._src.servers.per_worker import PerWorkerValues
from distjax._src.servers.server import ServerDied
from distjax.errors import ClosureError, EndOfDataError, ServerLostError
from tests.faults.four_parts import is_explained
from tests.servers.faults import run_with_faults
from tests.servers.hand_made import HandMade, counter, read_total, two_counters, two_stages


def make(**options):
    strategy = HandMade(**options)
    strategy.engine.servers[0].create("total", np.float32(0))
    return strategy


def one(x):
    return (np.float32(x),)


class Held:
    """A fault function that holds closures at a point until it is let go."""

    def __init__(self, point="pull", closures=None):
        self.point, self.closures = point, closures
        self.arrived, self.let_go = threading.Semaphore(0), threading.Event()

    def __call__(self, point, worker, closure):
        if point == self.point and (self.closures is None or closure in self.closures):
            self.arrived.release()
            self.let_go.wait()


def test_results_versions_and_sums():
    strategy = make()
    with Coordinator(strategy) as coordinator:
        values = [coordinator.schedule(counter(), one(i)) for i in range(20)]
        coordinator.join()
        assert coordinator.done() and all(value.done() for value in values)
        assert sorted(value.version for value in values) == [(i + 1,) for i in range(20)]
        in_order = sorted(values, key=lambda value: value.version)
        fetched = coordinator.fetch({"all": in_order, "other": 3})
        assert fetched["other"] == 3
        steps = np.diff([0.0, *fetched["all"]])
        assert sorted(steps) == list(range(20))  # each closure saw those before it
        assert coordinator.schedule(read_total()).version == (20,)
        stats = coordinator.stats()
    assert stats["closures"]["scheduled"] == 21 and sum(stats["staleness"].values()) == 20
    assert (stats["versions"], stats["queue"]) == ([20], 0)
    assert sum(worker["closures"] for worker in stats["workers"]) == stats["closures"]["done"]


def test_a_closure_of_several_stages_sees_its_own_writes():
    strategy = make()
    for key in "ab":
        strategy.engine.servers[0].create(key, np.float32(0))
    with Coordinator(strategy) as coordinator:
        assert coordinator.schedule(two_stages(), one(3)).fetch() == 30
        assert coordinator.schedule(two_stages(), one(4)).fetch() == 100  # a is 7, b is 10
    assert strategy.engine.servers[0].report().num_kept == 0


def test_a_full_queue_makes_schedule_wait():
    held = Held()
    strategy = make(workers=1, fault=held)
    coordinator = Coordinator(strategy, queue_size=2)
    coordinator.schedule(counter(), one(1))
    held.arrived.acquire()
    for _ in range(2):
        coordinator.schedule(counter(), one(1))
    fourth = threading.Thread(target=coordinator.schedule, args=(counter(), one(1)))
    fourth.start()
    assert coordinator.stats()["queue"] == 2 and not coordinator.done()
    with pytest.raises(TimeoutError, match=r"^join needs all closures to end within 0 s"):
        coordinator.join(timeout=0)
    held.let_go.set()
    fourth.join()
    coordinator.join()
    assert strategy.value("total") == 4
    coordinator.close()


def test_the_first_error_is_raised_once_and_drops_the_queue():
    strategy = make(workers=1)
    held = Held()
    strategy.engine._fault = held
    coordinator = Coordinator(strategy, queue_size=10)

    def fail(point, worker, closure):
        held(point, worker, closure)
        if closure == 1 and point == "before_push":
            raise ZeroDivisionError("as the user's function does")

    strategy.engine._fault = fail
    values = [coordinator.schedule(counter(), one(1)) for _ in range(4)]
    held.let_go.set()
    with pytest.raises(ZeroDivisionError) as raised:
        coordinator.join()
    assert raised.value.__notes__ == ["It was raised in closure 1 (add)."]
    assert values[0].fetch() == 1
    with pytest.raises(ZeroDivisionError):
        values[1].fetch()
    for value in values[2:]:
        with pytest.raises(CancelledError, match=r"closure 1 \(add\) failed"):
            value.fetch()
        with pytest.raises(CancelledError):
            value.version  # noqa: B018
    coordinator.join()
    assert coordinator.schedule(counter(), one(1)).fetch() == 2
    coordinator.close()
    assert strategy.engine.servers[0].report().num_kept == 0


def test_schedule_and_done_raise_too_and_count_the_others():
    everybody = threading.Barrier(2)

    def fail(point, worker, closure):
        if point == "before_push":
            everybody.wait()
            raise ZeroDivisionError

    strategy = make(workers=2, fault=fail)
    with Coordinator(strategy) as coordinator:
        for ask in (coordinator.done, lambda: coordinator.schedule(counter(), one(1))):
            values = [coordinator.schedule(counter(), one(1)) for _ in range(2)]
            coordinator._board.waiters.wait_until(lambda: all(v.done() for v in values))  # noqa: B023
            with pytest.raises(ZeroDivisionError) as raised:
                ask()
            assert raised.value.__notes__[1:] == ["1 more closures failed."]
        assert coordinator.stats()["closures"]["scheduled"] == 4


def test_an_error_of_the_trace_is_raised_by_schedule_and_counts_nowhere():
    def bad(x):
        raise KeyError("in the trace")

    with Coordinator(make()) as coordinator:
        with pytest.raises(KeyError):
            coordinator.schedule(bad, one(1))
        assert coordinator.stats()["closures"]["scheduled"] == 0


def test_cancel_drops_what_has_not_begun_and_runs_what_has():
    held = Held("before_push")
    strategy = make(workers=1, fault=held)
    coordinator = Coordinator(strategy)
    values = [coordinator.schedule(counter(), one(1)) for _ in range(3)]
    held.arrived.acquire()
    coordinator.cancel()
    held.let_go.set()
    coordinator.join()
    assert values[0].fetch() == strategy.value("total") == 1
    for value in values[1:]:
        with pytest.raises(CancelledError, match=r"coordinator.cancel\(\) was called"):
            value.fetch()
    assert coordinator.stats()["closures"]["cancelled"] == 2
    coordinator.close()


def test_fetch_waits_no_longer_than_it_is_told():
    held = Held()
    with Coordinator(make(fault=held)) as coordinator:
        value = coordinator.schedule(counter(), one(1))
        held.arrived.acquire()
        with pytest.raises(TimeoutError, match=r"^fetch needs closure 0 \(add\) to end within 0"):
            value.fetch(timeout=0)
        assert "running" in repr(value)
        held.let_go.set()


def test_arguments_are_those_of_the_call():
    held = Held()
    strategy = make(workers=1, fault=held)
    with Coordinator(strategy) as coordinator:
        buffer = np.zeros((), np.float32)
        for i in range(3):
            buffer[...] = 10**i
            coordinator.schedule(counter(), (buffer,))
        held.let_go.set()
    assert strategy.value("total") == 111


# -- lost workers ----------------------------------------------------------------


@pytest.mark.parametrize("max_staleness", [None, 0, 2])
def test_closures_are_applied_once_whatever_workers_are_lost(max_staleness):
    found = run_with_faults(0, num_closures=100, max_staleness=max_staleness)
    assert found["applied"] == found["expected"] and found["kept"] == 0
    assert found["sum"][0] == found["sum"][1]
    assert found["faults"] > 30
    assert found["worst"] <= (np.inf if max_staleness is None else max_staleness)


@pytest.mark.parametrize("method", ["cancel", "close"])
def test_a_closure_that_waits_for_another_worker_is_run_all_the_same(method, monkeypatch):
    """Servers may have pushes of it, so it is not dropped."""
    has_died, go_on = threading.Event(), threading.Event()

    def fault(point, worker, closure):
        if point == "after_push" and not has_died.is_set():
            has_died.set()
            raise WorkerDied

    strategy = make(workers=1, fault=fault)
    prepare = lambda *_: not has_died.is_set() or go_on.wait(60)
    monkeypatch.setattr(strategy.engine, "prepare", prepare)
    with Coordinator(strategy) as coordinator:
        board = coordinator._board
        values = [coordinator.schedule(counter(), one(1)) for _ in range(2)]
        board.waiters.wait_until(lambda: board.counts["retried"])
        dropping = threading.Thread(target=getattr(coordinator, method))
        dropping.start()
        board.waiters.wait_until(lambda: board.is_closed or values[1].done(), 60)
        go_on.set()
        dropping.join()
    assert values[0].fetch() == 1
    with pytest.raises(CancelledError, match=r"before it had run"):
        values[1].fetch()
    assert strategy.value("total") == 1


def test_a_closure_that_no_worker_is_left_to_run_is_cancelled(monkeypatch):
    has_died = threading.Event()

    def fault(point, worker, closure):
        if point == "before_push":
            has_died.set()
            raise WorkerDied

    def prepare(worker, is_wanted):
        while has_died.is_set() and is_wanted():  # as a process for which there is no room
            time.sleep(0.01)
        return not has_died.is_set()

    strategy = make(workers=1, fault=fault)
    monkeypatch.setattr(strategy.engine, "prepare", prepare)
    coordinator = Coordinator(strategy)
    value = coordinator.schedule(counter(), one(1))
    board = coordinator._board
    assert board.waiters.wait_until(lambda: board.counts["retried"], 60)
    closing = threading.Thread(target=coordinator.close, daemon=True)
    closing.start()
    closing.join(60)
    with pytest.raises(CancelledError):
        value.fetch(timeout=0)


def test_a_closure_that_kills_every_worker_is_given_up():
    def fault(point, worker, closure):
        if closure == 1 and point == "after_push":
            raise WorkerDied("out of memory")

    strategy = make(workers=1, fault=fault)
    coordinator = Coordinator(strategy)
    values = [coordinator.schedule(counter(), one(1)) for _ in range(2)]
    with pytest.raises(ClosureError, match=r"^closure 1 \(add\) needs a worker that outlives") as e:
        coordinator.join()
    assert e.value.attempts == ("worker 0 was lost (out of memory)",) * 3
    assert values[0].fetch() == 1
    assert coordinator.stats()["closures"]["retried"] == 2
    assert coordinator.stats()["workers"][0]["restarts"] == 3
    coordinator.close()


def test_nobody_waits_for_a_worker_that_hangs():
    held = Held("before_push", closures={0})
    strategy = make(workers=2, max_staleness=None, fault=held)
    coordinator = Coordinator(strategy)
    first = coordinator.schedule(counter(), one(1))
    held.arrived.acquire()
    for _ in range(5):
        assert coordinator.schedule(counter(), one(1)).fetch() > 0
    assert not first.done()
    held.let_go.set()
    coordinator.join()
    assert first.version == (6,)
    coordinator.close()


# -- servers, snapshots ----------------------------------------------------------


def make_two(**options):
    strategy = HandMade(servers=2, **options)
    for server, key in zip(strategy.engine.servers, "ab", strict=True):
        server.create(key, np.float32(0))
    return strategy


def test_a_snapshot_is_one_cut_over_all_servers():
    strategy = make_two(workers=3)
    with Coordinator(strategy, queue_size=50) as coordinator:
        for i in range(40):
            coordinator.schedule(two_counters(), one(i))
            if i % 10 == 5:
                snapshot = coordinator.snapshot()
                a, b = (server.values for server in snapshot.servers)
                assert 2 * float(a["a"]) == float(b["b"])
                assert snapshot.versions == (snapshot.closures,) * 2
        with coordinator.paused():
            assert 2 * float(strategy.value("a")) == float(strategy.value("b", 1))


def test_a_lost_server_ends_all_and_restore_goes_on_from_the_snapshot():
    is_fatal = threading.Event()

    def fault(point, worker, closure):
        if point == "server" and is_fatal.is_set():
            raise ServerDied

    strategy = make_two(workers=2, fault=fault)
    coordinator = Coordinator(strategy)
    with pytest.raises(RuntimeError, match=r"^restore needs a snapshot"):
        coordinator.restore()
    for i in range(10):
        coordinator.schedule(two_counters(), one(i))
    coordinator.join()
    snapshot = coordinator.snapshot()
    assert repr(snapshot) == "Snapshot(closures=10, versions=(10, 10))"
    before = coordinator.schedule(two_counters(), one(100))
    before.get()
    is_fatal.set()
    lost = coordinator.schedule(two_counters(), one(100))
    with pytest.raises(ServerLostError, match="a server that is lost"):
        lost.fetch()
    with pytest.raises(ServerLostError):
        coordinator.join()
    is_fatal.clear()
    assert coordinator.restore() == 10
    for ask in (before.fetch, lambda: before.version):
        with pytest.raises(ServerLostError, match="snapshot of the first 10 closures"):
            ask()
    coordinator.join()
    coordinator.schedule(two_counters(), one(5)).get()
    assert (float(strategy.value("a")), float(strategy.value("b", 1))) == (50, 100)
    assert coordinator.snapshot().closures == 11
    coordinator.close()


def test_a_snapshot_of_another_strategy_is_refused_before_anything_is_undone():
    strategy = make_two()
    with Coordinator(strategy) as coordinator, Coordinator(make()) as another:
        value = coordinator.schedule(two_counters(), one(1))
        foreign = another.snapshot()
        for error, wrong in ((ValueError, foreign), (TypeError, foreign.servers), (TypeError, 0)):
            text = "^restore needs a snapshot of the servers of"
            with pytest.raises(error, match=text) as raised:
                coordinator.restore(wrong)
            assert is_explained(raised.value)
        assert value.fetch() is None and value.version == (1, 1)


def test_a_restore_undoes_nothing_of_a_coordinator_before():
    strategy = make_two()
    with Coordinator(strategy) as coordinator:
        value = coordinator.schedule(two_counters(), one(1))
    with Coordinator(strategy) as coordinator:
        coordinator.snapshot()
        coordinator.restore()
    assert value.fetch() is None and value.version == (1, 1)


def test_restore_with_closures_in_flight():
    """They end first, and are undone; the next join raises once."""
    held = Held("before_push", closures={1, 2})
    strategy = make_two(workers=2, fault=held)
    coordinator = Coordinator(strategy)
    kept = coordinator.schedule(two_counters(), one(1))
    coordinator.join()
    coordinator.snapshot()
    lost = [coordinator.schedule(two_counters(), one(10)) for _ in range(4)]
    held.arrived.acquire(), held.arrived.acquire()
    with ThreadPoolExecutor(1) as thread:
        restored = thread.submit(coordinator.restore)
        coordinator._board.waiters.wait_until(lambda: coordinator._board.pauses)
        held.let_go.set()
        assert restored.result() == 1
    assert kept.get() is None
    for value in lost:
        with pytest.raises(ServerLostError, match="^fetch needs a closure that the servers have"):
            value.fetch()
    with pytest.raises(ServerLostError):
        coordinator.join()
    coordinator.join()
    coordinator.schedule(two_counters(), one(2)).get()
    coordinator.close()
    assert (float(strategy.value("a")), float(strategy.value("b", 1))) == (3, 6)
    assert [server.report().num_kept for server in strategy.engine.servers] == [0, 0]


def test_a_restore_waits_for_what_other_threads_read_in_a_pause():
    strategy = make_two()
    with Coordinator(strategy) as coordinator:
        coordinator.snapshot()
        coordinator.schedule(two_counters(), one(1)).get()
        restoring = threading.Thread(target=coordinator.restore)
        with coordinator.paused():
            restoring.start()
            restoring.join(0.1)
            assert float(strategy.value("a")) == 1
        restoring.join()
        assert float(strategy.value("a")) == 0


def test_what_is_cancelled_while_servers_are_restored_is_not_waited_for(monkeypatch):
    """Servers wait for every number to be over, and are told of each once."""
    strategy = make_two()
    first, second = strategy.engine.servers
    restore = first.restore

    def restore_late(*args):
        coordinator.schedule(two_counters(), one(1))
        coordinator.cancel()
        restore(*args)

    with Coordinator(strategy) as coordinator:
        coordinator.snapshot()
        coordinator.schedule(two_counters(), one(1)).get()
        monkeypatch.setattr(first, "restore", restore_late)
        coordinator.restore()
        coordinator.schedule(two_counters(), one(1)).get()
    assert [first.report().num_kept, second.report().num_kept] == [0, 0]
    assert [float(strategy.value("a")), float(strategy.value("b", 1))] == [1, 2]


# -- data ------------------------------------------------------------------------


def test_each_element_is_used_once_whatever_workers_are_lost():
    rng = np.random.default_rng(0)

    def fault(point, worker, closure):
        if point in ("pull", "after_push") and rng.random() < 0.2:
            raise WorkerDied

    strategy = make(workers=3, fault=fault)
    strategy.engine.max_failures = 50
    shards = lambda context: map(
        np.float32, range(context.input_pipeline_id, 30, context.num_input_pipelines)
    )
    with Coordinator(strategy, queue_size=50) as coordinator:
        for source in (shards, [np.float32(i) for i in range(30)]):
            for at in ("worker", "coordinator"):
                iterator = iter(coordinator.create_per_worker_dataset(source, at=at))
                values = [coordinator.schedule(counter(), (iterator,)) for _ in range(35)]
                coordinator.join()
                ended = 0
                for value in values:
                    try:
                        value.fetch()
                    except EndOfDataError as error:
                        assert "needs an element of per-worker data" in str(error)
                        ended += 1
                assert ended == 5
    assert strategy.value("total") == 4 * sum(range(30))


def test_a_worker_whose_data_ended_takes_what_needs_none():
    strategy = make(workers=2)
    length = lambda context: [np.float32(1)] * (3 if context.input_pipeline_id else 0)
    with Coordinator(strategy, queue_size=50) as coordinator:
        iterator = iter(coordinator.create_per_worker_dataset(length))
        for _ in range(3):
            coordinator.schedule(counter(), (iterator,))
            coordinator.schedule(counter(), one(10))
        coordinator.join()
        assert strategy.value("total") == 33


def test_per_worker_values_and_next():
    strategy = make(workers=2)
    with Coordinator(strategy) as coordinator:
        dataset = coordinator.create_per_worker_dataset([1.0, 2.0, 3.0])
        found = [values.values for values in dataset]
        assert found == [(1, 2)]  # one worker has none of the last
        values = PerWorkerValues([np.float32(5), np.float32(5)])
        coordinator.schedule(counter(), (values,)).get()
        assert coordinator.schedule(counter(), (next(iter(dataset)),)).fetch() in (6, 7)


def test_a_snapshot_knows_where_iterators_are():
    strategy = make(workers=2)
    with Coordinator(strategy) as coordinator:
        dataset = coordinator.create_per_worker_dataset([np.float32(2**i) for i in range(8)])
        iterator = iter(dataset)
        for _ in range(3):
            coordinator.schedule(counter(), (iterator,))
        coordinator.join()
        coordinator.snapshot()
        for _ in range(2):
            coordinator.schedule(counter(), (iterator,))
        coordinator.join()
        assert strategy.value("total") == 31
        assert coordinator.restore() == 3
        for _ in range(5):
            coordinator.schedule(counter(), (iterator,))
        coordinator.join()
        assert strategy.value("total") == 255

        once = iter(coordinator.create_per_worker_dataset(iter([np.float32(1)] * 4)))
        coordinator.schedule(counter(), (once,)).get()
        coordinator.snapshot()
        coordinator.schedule(counter(), (once,)).get()
        coordinator.restore()
        with pytest.raises(ValueError, match="^a restore needs per-worker data that can be read"):
            coordinator.schedule(counter(), (once,))


def test_a_snapshot_keeps_no_iterator_alive(collect_garbage):
    with Coordinator(make(workers=1)) as coordinator:
        dataset = coordinator.create_per_worker_dataset([np.float32(1)])
        iterator = iter(dataset)
        snapshot = coordinator.snapshot()
        assert len(snapshot.positions) == len(coordinator._cursors) == 1
        del iterator
        collect_garbage()
        assert not snapshot.positions and not coordinator._cursors
        coordinator.restore(snapshot)


def test_data_that_had_ended_is_there_again_after_a_restore():
    strategy = make(workers=2)
    elements = lambda context: [np.float32(2**i) for i in range(4 * context.input_pipeline_id, 4)]
    with Coordinator(strategy, queue_size=50) as coordinator:
        iterator = iter(coordinator.create_per_worker_dataset(elements))
        coordinator.snapshot()
        for _ in range(2):
            values = [coordinator.schedule(counter(), (iterator,)) for _ in range(6)]
            coordinator.join()
            assert sum(isinstance(error_of(value), EndOfDataError) for value in values) == 2
            assert strategy.value("total") == 15
            coordinator.restore()
        assert strategy.value("total") == 0


def error_of(value):
    try:
        value.fetch()
    except EndOfDataError as error:
        return error


def test_a_restore_waits_for_who_draws_meanwhile(monkeypatch):
    """An element that was drawn after it, for a closure that is undone, would be lost."""
    is_drawing, go_on = threading.Event(), threading.Event()  # that: restored, or waiting
    strategy, step = make(workers=1), counter()
    with Coordinator(strategy) as coordinator:
        iterator = iter(coordinator.create_per_worker_dataset([np.float32(2**i) for i in range(3)]))
        draw = iterator.draw

        def draw_late(worker):
            is_drawing.set()
            assert go_on.wait(60)
            return draw(worker)

        coordinator.schedule(step, (iterator,)).get()
        coordinator.snapshot()
        waiters = coordinator._board.waiters
        cursor = iterator._cursors[0]
        wait_until, put_back = waiters.wait_until, cursor.restore

        def wait_as_seen(is_so, timeout=None):
            if threading.current_thread().name == "restoring" and not is_so():
                go_on.set()
            return wait_until(is_so, timeout)

        monkeypatch.setattr(waiters, "wait_until", wait_as_seen)
        monkeypatch.setattr(cursor, "restore", lambda p: (put_back(p), go_on.set()))
        monkeypatch.setattr(iterator, "draw", draw_late)
        lost = coordinator.schedule(step, (iterator,))
        assert is_drawing.wait(60)
        restoring = threading.Thread(target=coordinator.restore, name="restoring")
        restoring.start()
        restoring.join()
        assert lost.done()
        with pytest.raises(ServerLostError):
            coordinator.join()
        coordinator.schedule(step, (iterator,)).get()
        assert strategy.value("total") == 3


def test_a_restore_needs_data_as_long_as_before():
    lengths = [1, 3]
    step = counter()
    with Coordinator(make(workers=1)) as coordinator:
        shrinking = lambda context: [np.float32(1)] * lengths.pop()
        iterator = iter(coordinator.create_per_worker_dataset(shrinking))
        for _ in range(2):
            coordinator.schedule(step, (iterator,)).get()
        coordinator.snapshot()
        coordinator.schedule(step, (iterator,)).get()
        coordinator.restore()
        coordinator.schedule(step, (iterator,))
        with pytest.raises(ValueError, match="^per-worker data needs a dataset of at least 2"):
            coordinator.join()


# -- workers ---------------------------------------------------------------------


@pytest.mark.usefixtures("switch_often")
def test_two_threads_that_remove_workers_leave_one():
    for _ in range(10):
        with Coordinator(make(workers=2)) as coordinator, ThreadPoolExecutor(2) as threads:
            together = threading.Barrier(2)

            def remove(together=together, coordinator=coordinator):
                together.wait()
                coordinator.remove_workers(1)

            errors = [future.exception() for future in [threads.submit(remove) for _ in range(2)]]
            (refused,) = filter(None, errors)
            assert str(refused).startswith("remove_workers needs the ids of existing workers")
            assert len(coordinator.stats()["workers"]) == 1


def test_workers_come_and_go():
    with Coordinator(make(workers=1)) as coordinator:
        assert coordinator.add_workers(2) == [1, 2]
        coordinator.remove_workers([0])
        assert coordinator.add_workers() == [3]
        coordinator.remove_workers(2)
        assert [worker["id"] for worker in coordinator.stats()["workers"]] == [1]
        assert coordinator.schedule(counter(), one(1)).fetch() == 1
        for bad in ([1], [7], 5):
            with pytest.raises(ValueError, match="^remove_workers needs the ids of existing"):
                coordinator.remove_workers(bad)

        def chosen():  # the user's code may ask the coordinator
            yield from [worker["id"] for worker in coordinator.stats()["workers"]]

        with pytest.raises(ValueError, match=r"Got: \[1\], of the workers \[1\]"):
            coordinator.remove_workers(chosen())
        for call in (coordinator.add_workers, coordinator.remove_workers):
            with pytest.raises(ValueError, match="needs an int of 1 or more"):
                call(0)


@pytest.mark.usefixtures("collect_garbage")
def test_a_worker_runs_until_its_closure_is_over(monkeypatch):
    """Also where it has begun it, and has nothing to take next."""
    strategy, go_on = make(workers=1), threading.Event()
    run = strategy.engine.run

    def run_late(worker, task):
        ran = run(worker, task)
        return types.SimpleNamespace(wait=lambda: (taken.set(), go_on.wait(60), ran.wait())[-1])

    taken = threading.Event()
    monkeypatch.setattr(strategy.engine, "run", run_late)
    with Coordinator(strategy) as coordinator:
        state = lambda: coordinator.stats()["workers"][0]["state"]
        assert state() == "idle"
        coordinator.schedule(counter(), one(1))
        assert taken.wait(60)
        assert state() == "running"
        go_on.set()
        coordinator.join()
        assert state() == "idle"


def test_a_worker_that_cannot_be_prepared_fails_the_closures_that_it_takes(monkeypatch):
    def fail(*_):
        raise OSError("no process")

    strategy = make(workers=2)
    with Coordinator(strategy) as coordinator:
        for method in ("prepare", "run"):
            monkeypatch.setattr(strategy.engine, method, fail)
        for _ in range(3):  # more than there are workers
            value = coordinator.schedule(counter(), one(1))
            with pytest.raises(OSError, match="no process"):
                value.fetch(timeout=60)
            with pytest.raises(OSError, match="no process"):
                coordinator.join(timeout=60)


def test_a_worker_without_data_hides_no_error(monkeypatch):
    monkeypatch.setattr(coordinator_module, "_SECONDS_IF_RAISED", 0.01)
    is_drawing, has_raised = threading.Event(), threading.Event()
    before = {*threading.enumerate()}

    def elements(context):
        yield 1.0
        is_drawing.set()
        has_raised.wait()
        yield 1.0

    with pytest.raises(KeyError, match="mine"):
        with Coordinator(make(workers=1)) as coordinator:
            iterator = iter(coordinator.create_per_worker_dataset(elements))
            values = [coordinator.schedule(counter(), (iterator,)) for _ in range(2)]
            is_drawing.wait()
            (worker,) = [t for t in {*threading.enumerate()} - before if "worker" in t.name]
            raise KeyError("mine")
    has_raised.set()
    worker.join()
    assert [value.fetch() for value in values] == [1, 2]  # what has begun is run


def test_a_dropped_coordinator_ends_its_threads():
    strategy = make()
    coordinator = Coordinator(strategy)
    coordinator.schedule(counter(), one(1)).get()
    threads = [w.thread for w in coordinator._board.workers.values()]
    gone = weakref.ref(coordinator)
    del coordinator
    gc.collect()
    assert gone() is None
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    with Coordinator(strategy) as another:
        assert another.schedule(counter(), one(1)).fetch() == 2


@pytest.mark.usefixtures("collect_garbage")
def test_what_waits_when_a_coordinator_is_dropped_is_cancelled():
    held = Held()
    coordinator = Coordinator(make(workers=1, fault=held))
    values = [coordinator.schedule(counter(), one(1)) for _ in range(3)]
    held.arrived.acquire()
    del coordinator
    gc.collect()
    held.let_go.set()
    for value in values[1:]:
        with pytest.raises(CancelledError, match="its coordinator was closed, or dropped"):
            value.fetch()


def test_what_would_wait_for_ever_in_a_pause_is_refused():
    strategy = make()
    with Coordinator(strategy, queue_size=1) as coordinator:
        before = coordinator.schedule(counter(), one(1))
        before.get()
        empty = coordinator.snapshot()
        with coordinator.paused():
            value = coordinator.schedule(counter(), one(1))
            calls = {
                "join": coordinator.join,
                "run": lambda: run_step(strategy, counter(), one(1), None),
                "get": value.get,
                "fetch": lambda: coordinator.fetch([value]),
                "version": lambda: value.version,
                "restore": lambda: coordinator.restore(empty),
                "schedule with a full queue": lambda: coordinator.schedule(counter(), one(1)),
            }
            for name, call in calls.items():
                with pytest.raises(dj.errors.ContextError, match=f"^{name} needs closures to run"):
                    call()
            assert before.fetch() == 1 and not value.done()
        assert value.fetch() == 2


@pytest.mark.usefixtures("collect_garbage")
def test_results_live_no_longer_than_somebody_asks_for_them():
    strategy = make(workers=1)
    with Coordinator(strategy) as coordinator:
        value = coordinator.schedule(counter(), one(1))
        value.get()
        coordinator.schedule(counter(), one(1)).get()
        closure = weakref.ref(value._closure)
        del value
        gc.collect()
        assert closure() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_cannot_be_released_has_ended_all_the_same(monkeypatch):
    def fail(worker):
        raise OSError("no connection to the cluster")

    strategy = make(workers=2)
    monkeypatch.setattr(strategy.engine, "end_worker", fail)
    coordinator = Coordinator(strategy)
    coordinator.schedule(counter(), (np.float32(1),))
    coordinator.join(timeout=60)
    closing = threading.Thread(target=coordinator.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    for worker in coordinator._board.workers.values():
        worker.thread.join()  # its exception is of this test


def test_one_coordinator_a_strategy_and_none_after_close():
    strategy = make()
    coordinator = Coordinator(strategy)
    with pytest.raises(ValueError, match="^Coordinator needs a strategy that has no other"):
        Coordinator(strategy)
    coordinator.close()
    coordinator.close()
    calls = {
        "schedule": lambda: coordinator.schedule(counter(), one(1)),
        "join": coordinator.join,
        "done": coordinator.done,
        "cancel": coordinator.cancel,
        "create_per_worker_dataset": lambda: coordinator.create_per_worker_dataset([]),
        "add_workers": coordinator.add_workers,
        "remove_workers": lambda: coordinator.remove_workers(1),
        "snapshot": coordinator.snapshot,
        "restore": coordinator.restore,
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=f"^{name} needs an open coordinator"):
            call()
    assert coordinator.stats()["closures"]["done"] == 0
    Coordinator(strategy).close()


def test_refusals():
    with pytest.raises(TypeError, match="^Coordinator needs a ParameterServerStrategy"):
        Coordinator(dj.OneDeviceStrategy())
    with pytest.raises(ValueError, match="^Coordinator: queue_size needs an int of 1 or more"):
        Coordinator(make(), queue_size=0)
    with Coordinator(make()) as coordinator:
        value = coordinator.schedule(counter(), one(1))
        with pytest.raises(ValueError, match="^a step needs arguments that are there"):
            coordinator.schedule(counter(), (value,))
        with pytest.raises(TypeError, match="^create_per_worker_dataset needs a function"):
            coordinator.create_per_worker_dataset(3)
        with pytest.raises(ValueError, match='^create_per_worker_dataset needs at="worker"'):
            coordinator.create_per_worker_dataset([], at="server")
        outside = dj.OneDeviceStrategy()
        with pytest.raises(dj.errors.ContextError, match="^schedule needs to be called outside"):
            outside.run(lambda: coordinator.schedule(counter(), one(1)))
    engine = make().engine
    with pytest.raises(ValueError, match="^ParameterServerStrategy needs an engine of its own"):
        dj.ParameterServerStrategy(engine=engine)


# -- strategy.run ----------------------------------------------------------------


def test_run_is_a_closure_with_and_without_a_coordinator():
    failures = [WorkerDied("once")]

    def fault(point, worker, closure):
        if point == "after_push" and failures:
            raise failures.pop()

    strategy = make(fault=fault)
    assert run_step(strategy, counter(), one(1), None) == 1
    with Coordinator(strategy) as coordinator:
        assert run_step(strategy, counter(), one(1), None) == 2
        failures.append(ZeroDivisionError())
        with pytest.raises(ZeroDivisionError):
            run_step(strategy, counter(), one(1), None)
        coordinator.join()  # the error was raised
        assert coordinator.stats()["closures"]["scheduled"] == 2
    assert run_step(strategy, counter(), one(1), None) == 4
    assert strategy.engine.servers[0].report().num_kept == 0
    assert isinstance(run_step(strategy, read_total(), (), None), jnp.ndarray)


def test_run_without_a_coordinator_has_no_workers_to_draw_from():
    strategy = make()
    with Coordinator(strategy) as coordinator:
        iterator = iter(coordinator.create_per_worker_dataset([np.float32(1)]))
        assert run_step(strategy, counter(), (iterator,), None) == 1
    for source in (iterator, PerWorkerValues([np.float32(1)])):
        with pytest.raises(
            RuntimeError, match="^run needs an open coordinator for per-w"
        ) as caught:
            run_step(strategy, counter(), (source,), None)
        assert is_explained(caught.value)
