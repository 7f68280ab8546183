"""How long a meeting waits for whom; processes are threads that share a store."""

import dataclasses
import threading

import jax
import pytest

from distjax._src.cluster import meeting
from distjax._src.cluster.ledger import Ledger, Phase, as_text, mark_of, phase, tell
from distjax.errors import PeerLostError, StuckError
from tests.cluster.test_ending import Store, fail_for_good, make_job

PLACE = "distjax/meeting/7"


@pytest.fixture
def jobs():
    store = Store()
    return [dataclasses.replace(make_job(), process_id=i, client=store) for i in range(3)]


def come(job):
    job.client.key_value_set(f"{PLACE}/came/{job.process_id}", f"said {job.process_id}")


def meet(job, seconds=30.0):
    return meeting.come_and_hear(job, PLACE, f"said {job.process_id}", seconds)


def test_all_hear_all_in_whatever_order_they_come(jobs):
    heard = {}
    hear = lambda job: heard.update({job.process_id: meet(job)})
    threads = [threading.Thread(target=hear, args=(job,)) for job in jobs[::-1]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == dict.fromkeys(range(3), ["said 0", "said 1", "said 2"])


class Late(Store):
    """A store in which every wait that would last is over at once; then something happens."""

    def __init__(self, *happens):
        super().__init__()
        self.happens = list(happens)

    def blocking_key_value_get(self, key, timeout_in_ms):
        try:
            return super().blocking_key_value_get(key, 0)
        except jax.errors.JaxRuntimeError:
            if self.happens:
                self.happens.pop(0)()
            raise


def tell_phase(job, *phases):
    tell(job, as_text(mark_of(Ledger(), phases)))


@pytest.mark.parametrize("who", [0, 1])
def test_who_compiles_is_awaited(jobs, who):
    """Process 2 compiles, then comes; process 0 hands on what all have said."""
    compiling = Phase("compiling step", 0.0, is_work=True)

    def come_at_last():
        come(jobs[2])
        if who != 0:
            jobs[0].client.key_value_set(f"{PLACE}/said", '["all of it"]')

    store = Late(lambda: tell_phase(jobs[2], compiling), lambda: None, come_at_last)
    jobs[:] = [dataclasses.replace(job, client=store) for job in jobs]
    come(jobs[1 - who])
    heard = meet(jobs[who], 1.0)
    assert heard == (["said 0", "said 1", "said 2"] if who == 0 else ["all of it"])


@pytest.mark.parametrize("who", [0, 1])
def test_the_wait_is_for_one_that_is_at_no_work(jobs, who):
    """It starts again at each look that shows work, even a short phase between two looks."""

    def short_phase():
        with phase("waiting for data"):
            pass
        tell_phase(jobs[2])

    waits = []

    class Counted(Late):
        def blocking_key_value_get(self, key, timeout_in_ms):
            waits.append(timeout_in_ms)
            return super().blocking_key_value_get(key, timeout_in_ms)

    work = lambda: tell_phase(jobs[2], Phase("waiting for data", 0.0, is_work=True))
    store = Counted(work, work, lambda: tell_phase(jobs[2]), lambda: None, short_phase)
    jobs[:] = [dataclasses.replace(job, client=store) for job in jobs]
    come(jobs[1 - who])
    with pytest.raises(jax.errors.JaxRuntimeError, match="DEADLINE_EXCEEDED"):
        meet(jobs[who], 1.0)
    assert waits[who == 0 :] == [250] * (5 + 4)  # process 0 hears process 1 first


class Asked(Store):
    """Keeps how long each wait may last."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def blocking_key_value_get(self, key, timeout_in_ms):
        self.waits.append(timeout_in_ms)
        return super().blocking_key_value_get(key, timeout_in_ms // 10)


@pytest.mark.parametrize("who", [0, 1])
def test_no_call_of_the_service_outlasts_a_signal_by_more_than_a_second(jobs, who):
    """Python raises KeyboardInterrupt between two calls; others may be awaited for an hour."""
    store = Asked()
    jobs[:] = [dataclasses.replace(job, client=store) for job in jobs]
    with pytest.raises(jax.errors.JaxRuntimeError):
        meet(jobs[who], 5.2)
    assert max(store.waits) == 1000
    assert sum(store.waits) // 100 == 52


@pytest.mark.parametrize("who", [0, 1])
def test_who_is_at_nothing_is_named_with_where_it_is(jobs, who, monkeypatch):
    store = Late()
    jobs[:] = [dataclasses.replace(job, client=store) for job in jobs]
    monkeypatch.setattr(meeting, "_count", 6)
    monkeypatch.setattr(meeting, "ledger", Ledger())
    tell_phase(jobs[2], Phase("waiting for the others (the creation of 'w')", 0.0, is_work=False))
    come(jobs[1 - who])
    with pytest.raises(StuckError, match="the first call of step needs all 3 processes") as caught:
        meeting.exchange(jobs[who], "the first call of step", "", 3.0)
    assert (
        "Got: process 2 on c (pid 3) (0 calls, waiting for the others (the creation of 'w')) did "
        f"not come within 3 s, while process {who} on "
    ) in str(caught.value)


def test_a_coordinator_that_is_gone(jobs, monkeypatch):
    monkeypatch.setattr(meeting, "ledger", Ledger())
    monkeypatch.setattr(jobs[0].client, "key_value_set", fail_for_good)
    monkeypatch.setattr(jobs[0].client, "key_value_dir_get", fail_for_good)
    with pytest.raises(PeerLostError, match="Got: process 0 on a \\(pid 1\\) has ended"):
        meeting.exchange(jobs[1], "the first call of step", "")
