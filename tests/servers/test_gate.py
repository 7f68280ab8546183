"""Staleness is a deadline: no push is staler than the bound, and nobody waits for ever."""

import random
import threading

import pytest

from distjax._src.servers.engine import Deadlines, Gate
from tests.servers.hand_made import counter
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
    monkeypatch.setattr(Deadlines, "may_push", lambda self, closure: True)
    outcomes = [run_random_schedule(random.Random(seed)) for seed in range(50)]
    assert any(max(staleness, default=0) > bound for bound, staleness in outcomes)


def test_the_simulation_sees_who_is_stuck(monkeypatch):
    monkeypatch.setattr(Deadlines, "forget", lambda self, closure: None)
    with pytest.raises(AssertionError, match="stuck"):
        for seed in range(200):
            run_random_schedule(random.Random(seed))


def test_the_latest_to_pull_waits_for_the_one_whose_deadline_is_near():
    deadlines = Deadlines(1)
    deadlines.pull(0, 1)
    deadlines.pull(1, 1)
    assert not deadlines.may_pull(1)  # one of three would be two pushes late
    deadlines.push(1)
    deadlines.pull(2, 1)
    assert not deadlines.may_push(2) and deadlines.may_push(0)


def test_own_pushes_make_nobody_stale():
    deadlines = Deadlines(0)
    deadlines.pull(0, 3)
    assert not deadlines.may_pull(1)
    for _ in range(3):
        assert deadlines.may_push(0)
        deadlines.push(0)
    assert deadlines.may_pull(1)


def test_a_gate_wakes_who_waits_when_another_has_pushed_or_is_forgotten():
    gate, order = Gate(0), []
    stage = counter().plan.stages[0]

    def second():
        with gate.admitted(1, 1):
            order.append("pulled")  # and is lost, before it has pushed

    thread = threading.Thread(target=second)
    with gate.admitted(0, 1):
        thread.start()
        with gate.turn(0, stage):
            order.append("pushed")
    thread.join()
    with gate.admitted(2, 1):
        assert order == ["pushed", "pulled"]
