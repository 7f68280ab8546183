"""What a signal, a close or another thread finds in the midst of things."""

import collections
import os
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax._src.servers import board as boards
from distjax._src.servers.board import Board
from distjax._src.servers.coordinator import Coordinator
from tests.interrupts import campaign, in_codes, in_packages, interrupted
from tests.servers.hand_made import HandMade, counter


def make(**options):
    strategy = HandMade(**options)
    strategy.engine.servers[0].create("total", np.float32(0))
    return strategy


def ends(call):
    """Calls in a thread; returns whether it ended, with no error."""
    done = []
    thread = threading.Thread(target=lambda: done.append(call()), daemon=True)
    thread.start()
    thread.join(20)
    return bool(done)


@pytest.mark.parametrize("max_staleness", [None, 0])
def test_a_signal_in_run_loses_no_value_and_stops_nobody(max_staleness):
    strategy = dj.ParameterServerStrategy(workers=1, max_staleness=max_staleness)
    with strategy.scope():
        total = dj.Variable(0.0, name="total", aggregation=dj.VariableAggregation.SUM)

    def add(x):
        total.assign_add(x)
        return x

    x = jnp.float32(1)
    strategy.run(add, args=(x,))

    def case():
        return float(total.value), lambda: strategy.run(add, args=(x,))

    def check(before, outcome):
        now = float(total.value)
        assert now - before in (0, 1)
        assert ends(lambda: strategy.run(add, args=(x,))) and float(total.value) == now + 1
        with strategy.extended.pause_writers():
            pass

    campaign(case, check, in_packages("distjax._src.servers"), limit=1000)


def test_a_signal_in_schedule_leaves_no_number_of_which_nobody_knows():
    strategy = make(workers=1)
    server, step = strategy.engine.servers[0], counter()
    coordinator = Coordinator(strategy, queue_size=100_000)
    coordinator.schedule(step, (np.float32(1),))

    def check(before, outcome):
        coordinator.schedule(step, (np.float32(1),)).get()
        coordinator._board.waiters.wait_until(lambda: server.report().num_kept == 0, 20)
        assert server.report().num_kept == 0, "closures are remembered behind one that nobody has"

    call = lambda: coordinator.schedule(step, (np.float32(1),))
    campaign(lambda: (None, call), check, in_packages("distjax._src.servers"), limit=1000)
    coordinator.close()


def test_a_pause_that_a_signal_ends_pauses_nobody():
    strategy = make(workers=1)
    with Coordinator(strategy) as coordinator:
        board = coordinator._board
        code = Board.paused.__wrapped__.__code__

        def pause():
            with board.paused():
                pass

        for n in range(1, 6):  # up to the wait
            interrupted(pause, n, in_codes({code}))
            assert coordinator.schedule(counter(), (np.float32(1),)).fetch(timeout=20) == n


def test_a_close_that_a_signal_ends_can_be_called_again(monkeypatch):
    def raise_interrupt(*_):
        raise KeyboardInterrupt

    strategy = make(workers=2)
    for method in ("cancel", "close"):
        coordinator = Coordinator(strategy)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(coordinator._board, method, raise_interrupt)
            coordinator.close()
        coordinator._closing.detach()  # not to be closed by its end
        assert ends(coordinator.close)
        assert all(worker.has_ended for worker in coordinator._board.workers.values())


def test_a_schedule_that_waits_while_the_coordinator_is_closed_raises():
    strategy = make(workers=1)
    for _ in range(20):
        coordinator = Coordinator(strategy, queue_size=1)
        values, errors = [], []

        def schedule(coordinator=coordinator, values=values, errors=errors):
            try:
                while True:
                    values.append(coordinator.schedule(counter(), (np.float32(1),)))
            except RuntimeError as error:
                errors.append(str(error))

        threads = [threading.Thread(target=schedule, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        coordinator._board.waiters.wait_until(lambda values=values: len(values) > 5, 20)
        coordinator.close()
        for thread in threads:
            thread.join(20)
        assert len(errors) == 3 and all(e.startswith("schedule needs an open") for e in errors)
        assert all(value.done() for value in values)


def test_totals_can_be_read_while_pushes_are_counted():
    server = make(workers=1).engine.servers[0]
    stop, errors = threading.Event(), []

    def read():
        while not stop.is_set():
            try:
                collections.Counter(server.report().staleness)
            except RuntimeError as error:
                errors.append(error)
                return

    thread = threading.Thread(target=read)
    thread.start()
    for i in range(20_000):
        with server._lock:
            server.staleness[i] += 1
    stop.set()
    thread.join()
    assert not errors


def test_workers_have_time_to_end_when_the_process_does(monkeypatch):
    waited, coordinator = [], Coordinator(make())
    monkeypatch.setattr(coordinator._board, "wait_for_workers", waited.append)
    monkeypatch.setattr(boards, "_opened", [coordinator._board])
    boards.end_all(-1)  # in a forked child, which has none of the threads
    assert not waited
    boards.end_all(os.getpid())
    assert waited[0] >= 60  # a program that runs when the interpreter is gone aborts the process
