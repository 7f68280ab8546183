"""The background thread: how it ends, and iterators that threads share. No test sleeps."""

import contextlib
import threading

import numpy as np
import pytest

import distjax as dj
from distjax._src.data.iterator import Prefetcher
from tests.data.prefetching import (
    SECONDS,
    assert_ends,
    endless,
    no_thread_is_left,  # noqa: F401  (a fixture)
    prefetchers,
    started,
)
from tests.processes.jobs import run_job
from tests.replicas import local


class SourceError(Exception):
    pass


def test_the_thread_ends_with_the_data(pair):
    iterator, thread = started(pair, [np.zeros(2)] * 3)
    assert len(list(iterator)) == 2
    assert not thread.is_alive()


def test_the_thread_ends_when_the_iterator_is_dropped(pair):
    iterator, thread = started(pair)
    del iterator
    assert_ends(thread)


def test_the_thread_ends_when_the_loop_is_left(pair):
    before = prefetchers()
    for _ in pair.distribute_dataset(endless()):
        (thread,) = prefetchers() - before
        break
    assert_ends(thread)


def test_the_thread_ends_when_the_loop_raises(pair):
    before, found = prefetchers(), []

    def train():
        for _ in pair.distribute_dataset(endless()):
            found.extend(prefetchers() - before)
            raise SourceError

    with pytest.raises(SourceError) as e:
        train()
    assert_ends(found[0])
    assert e.value.__traceback__ is not None  # not even the traceback holds it


def test_close(pair):
    closed = []

    class Source:
        def __iter__(self):
            try:
                yield from endless()
            finally:
                closed.append(threading.current_thread())

    iterator, thread = started(pair, Source())
    iterator.close()
    assert not thread.is_alive() and len(closed) == 1
    with pytest.raises(StopIteration):
        next(iterator)
    with pytest.raises(StopIteration):
        iterator.take(2)
    iterator.close()
    assert iterator.get_state()["delivered"] == 1


def test_close_leaves_the_users_own_iterator_open(pair):
    source = endless()
    iterator = iter(pair.distribute_dataset(source, dj.InputOptions(prefetch=0)))
    next(iterator)
    iterator.close()
    assert next(source).tolist() == [1, 2]


def test_close_waits_for_the_element_that_is_being_read(pair):
    reading, go_on = threading.Event(), threading.Event()

    def source():
        yield np.zeros(2)
        reading.set()
        assert go_on.wait(SECONDS)
        yield np.zeros(2)

    iterator, thread = started(pair, source())
    assert reading.wait(SECONDS)
    closer = threading.Thread(target=iterator.close)
    closer.start()
    go_on.set()
    closer.join(SECONDS)
    assert not closer.is_alive() and not thread.is_alive()


def test_close_ends_the_wait_of_another_thread(pair):
    reading, go_on = threading.Event(), threading.Event()

    def source():
        yield np.zeros(2)
        reading.set()
        assert go_on.wait(SECONDS)

    iterator, _ = started(pair, source())
    assert reading.wait(SECONDS)
    taker = threading.Thread(target=lambda: next(iterator, None), daemon=True)
    closer = threading.Thread(target=iterator.close)
    taker.start()
    closer.start()
    taker.join(SECONDS)
    assert not taker.is_alive()
    go_on.set()
    closer.join(SECONDS)


class Alarm(BaseException):
    """Raised where the program stands, as KeyboardInterrupt is."""


def test_an_interrupt_while_the_thread_is_ended_loses_no_element(pair, monkeypatch):
    iterator, _ = started(pair)

    def interrupted(*_):
        raise Alarm

    with monkeypatch.context() as patch, pytest.raises(Alarm):
        patch.setattr(Prefetcher, "join", interrupted)
        iterator.take(2)
    assert [int(local(pair, next(iterator))[0][0]) for _ in range(4)] == [1, 2, 3, 4]
    iterator.close()


def test_an_iterator_closed_by_its_own_source(pair):
    """The thread does not wait for itself."""
    made = []

    def source():
        yield np.zeros(2)
        made[0].close()

    made.append(iter(pair.distribute_dataset(source())))
    next(made[0])
    with pytest.raises(StopIteration):
        next(made[0])


def test_a_program_ends_while_threads_run():
    """One waits for room, one is inside its source for ever."""
    code = """
import threading
import numpy as np
import distjax as dj
from distjax._src.data import iterator

iterator._EXIT_SECONDS = 0.1
strategy = dj.VirtualStrategy(2)
running = iter(strategy.distribute_dataset(np.zeros(2) for _ in iter(int, 1)))
next(running)
inside = threading.Event()

def hanging():
    yield np.zeros(2)
    inside.set()
    threading.Event().wait()

stuck = iter(strategy.distribute_dataset(hanging()))
next(stuck)
inside.wait()
print("done")
"""
    (ended,) = run_job(code, ids=(0,), seconds=SECONDS)
    assert (ended.code, ended.said) == (0, "done\n")


@pytest.mark.parametrize("take", [next, lambda iterator: iterator.take(2)])
def test_one_thread_at_a_time_reads_the_source(take):
    meeting = threading.Barrier(2)
    meetings = []

    class Source:
        def __iter__(self):
            return self

        def __next__(self):
            with contextlib.suppress(threading.BrokenBarrierError):
                meetings.append(meeting.wait(0.1))
            return np.zeros(2)

    options = dj.InputOptions(prefetch=0)
    iterator = iter(dj.VirtualStrategy(2).distribute_dataset(Source(), options))
    threads = [threading.Thread(target=take, args=(iterator,), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert meetings == []


@pytest.mark.parametrize("prefetch", [0, 2])
def test_each_element_goes_to_one_of_two_threads(prefetch):
    strategy, options = dj.VirtualStrategy(2), dj.InputOptions(prefetch=prefetch)
    iterator = iter(strategy.distribute_dataset([np.full(2, i) for i in range(60)], options))
    given = []

    def singly():
        given.extend(int(x.stacked[0, 0]) for x in iterator)

    def in_steps():
        with contextlib.suppress(StopIteration):
            while True:
                given.extend(iterator.take(2).arrays[:, 0, 0].tolist())

    threads = [threading.Thread(target=f, daemon=True) for f in (singly, in_steps)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert sorted(given) == list(range(60))
