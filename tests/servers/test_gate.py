"""No push is staler than the bound, and nobody waits for ever."""

import random
import threading

import pytest

from distjax._src.servers.engine import Gate
from tests.servers.staleness import run_random_schedule


def test_random_schedules_keep_the_bound_and_all_end():
    worst = {}
    for seed in range(2000):
        bound, staleness = run_random_schedule(random.Random(seed))
        assert max(staleness, default=0) <= bound, seed
        worst[bound] = max(worst.get(bound, 0), *staleness, 0)
    assert worst == {bound: bound for bound in worst}  # and no tighter than it says
    assert set(worst) == set(range(7))


def test_the_simulation_sees_a_bound_that_is_broken(monkeypatch):
    monkeypatch.setattr(Gate, "may_pull", lambda self, num_pushes: True)
    outcomes = [run_random_schedule(random.Random(seed)) for seed in range(50)]
    assert any(max(staleness, default=0) > bound for bound, staleness in outcomes)


def test_the_simulation_sees_who_is_stuck(monkeypatch):
    monkeypatch.setattr(Gate, "leave", lambda self, closure: None)
    with pytest.raises(AssertionError, match="stuck"):
        for seed in range(200):
            run_random_schedule(random.Random(seed))


def test_who_has_pulled_may_push_whenever_it_likes():
    gate = Gate(2)
    gate.pull(0, 1)
    gate.pull(1, 1)
    assert gate.may_pull(1)  # either of them may be the last of three
    gate.leave(1)
    gate.pull(2, 1)
    assert not gate.may_pull(1)  # closure 0 would be stale by three if it were the last
    gate.leave(0)
    assert gate.may_pull(1)


def test_own_pushes_make_nobody_stale():
    gate = Gate(0)
    assert gate.may_pull(3)
    gate.pull(0, 3)
    assert not gate.may_pull(1)
    gate.leave(0)
    assert gate.may_pull(1)


def test_a_gate_wakes_who_waits_when_another_has_pushed_or_is_lost():
    gate, order = Gate(0), []

    def second():
        with gate.admitted(1, 1):
            order.append("pulled")  # and is lost, before it has pushed

    thread = threading.Thread(target=second)
    with gate.admitted(0, 1):
        thread.start()
        order.append("pushed")
    thread.join()
    with gate.admitted(2, 1):
        assert order == ["pushed", "pulled"]
