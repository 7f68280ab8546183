"""The background thread: its context, its errors, its end. No test sleeps."""

import contextlib
import gc
import itertools
import subprocess
import sys
import threading
import traceback
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from replicas import local

import distjax as dj
from distjax.context import frames
from distjax.data.prefetch import THREAD_NAME, Prefetcher

SECONDS = 60


def prefetchers():
    return {t for t in threading.enumerate() if t.name.startswith(THREAD_NAME)}


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = prefetchers()
    yield
    if prefetchers() - before:
        gc.collect()
    for thread in prefetchers() - before:
        thread.join(SECONDS)
        assert not thread.is_alive(), "the test leaked a thread"


@pytest.fixture(params=[0, 1, 2, 5])
def options(request):
    return dj.InputOptions(prefetch=request.param)


def endless():
    for i in itertools.count():
        yield np.array([i, i + 1], np.int32)


def started(strategy, source=None, prefetch=2):
    """Returns an iterator that has given one element, and its thread."""
    before = prefetchers()
    source = endless() if source is None else source
    iterator = iter(strategy.distribute_dataset(source, dj.InputOptions(prefetch=prefetch)))
    next(iterator)
    (thread,) = prefetchers() - before
    return iterator, thread


def assert_ends(thread):
    thread.join(SECONDS)
    assert not thread.is_alive()


# -- how far ahead -------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [1, 2, 4])
def test_as_many_elements_as_asked_are_read_ahead(pair, prefetch):
    read, changed = [], threading.Condition()

    def source():
        for batch in endless():
            with changed:
                read.append(batch)
                changed.notify_all()
            yield batch

    def wait_for(count):
        with changed:
            assert changed.wait_for(lambda: len(read) >= count, SECONDS)

    iterator, _ = started(pair, source(), prefetch)
    for delivered in range(1, 6):
        wait_for(delivered + prefetch)
        assert len(read) == delivered + prefetch
        next(iterator)


def test_without_prefetch_there_is_no_thread(pair):
    before = prefetchers()
    read = []
    source = (read.append(batch) or batch for batch in endless())
    iterator = iter(pair.distribute_dataset(source, dj.InputOptions(prefetch=0)))
    for i in range(3):
        assert local(pair, next(iterator)) == [[i], [i + 1]]
        assert len(read) == i + 1
    assert prefetchers() == before


def test_nothing_is_read_before_the_first_element_is_asked_for(pair):
    before = prefetchers()
    read = []
    iter(pair.distribute_dataset(read.append(batch) or batch for batch in endless()))
    assert read == [] and prefetchers() == before


# -- context -------------------------------------------------------------------


def test_the_source_sees_the_context_of_the_loop(pair, options):
    seen = []

    def source():
        for batch in [np.zeros(2)] * 3:
            seen.append((frames.stack(), dj.get_strategy(), dj.in_cross_replica_context()))
            yield batch

    with pair.scope():
        stack = frames.stack()
        list(pair.distribute_dataset(source(), options))
    assert seen == [(stack, pair, True)] * 3
    seen.clear()
    list(pair.distribute_dataset(source(), options))
    assert [s for _, s, _ in seen] == [dj.get_strategy()] * 3


def test_thread_local_settings_of_jax_go_along(options):
    """64-bit mode and the default device belong to a thread in JAX."""
    dataset = dj.get_strategy().distribute_dataset(
        [np.zeros(2)], dj.InputOptions("drop", options.prefetch)
    )
    strategy = dj.VirtualStrategy(2)
    with jax.enable_x64(True), jax.default_device(jax.devices()[5]):
        (wide,) = strategy.distribute_dataset([np.zeros(2)], options)
        (elsewhere,) = dataset
    assert wide.dtype == np.float64
    assert elsewhere.devices() == {jax.devices()[5]}
    (narrow,) = strategy.distribute_dataset([np.zeros(2)], options)
    assert narrow.dtype == np.float32


def test_sources_may_compute_with_jax(mirrored, options):
    """Programs of the source and of the loop run at the same time."""
    double = jax.jit(lambda x: 2 * x)
    batches = (double(jnp.full(2, i)) for i in range(20))
    totals = [
        int(mirrored.reduce("sum", x, axis=0))
        for x in mirrored.distribute_dataset(batches, options)
    ]
    assert totals == [4 * i for i in range(20)]


# -- errors --------------------------------------------------------------------


class SourceError(Exception):
    pass


def failing():
    yield np.zeros(2)
    yield np.ones(2)
    open_the_file()


def open_the_file():
    raise SourceError("no such file")


def test_errors_of_the_source_are_raised_in_the_loop(pair, options):
    iterator = iter(pair.distribute_dataset(failing(), options))
    assert len([next(iterator), next(iterator)]) == 2
    with pytest.raises(SourceError, match="^no such file$") as e:
        next(iterator)
    names = [frame.name for frame in traceback.extract_tb(e.value.__traceback__)]
    assert names[-2:] == ["failing", "open_the_file"]
    assert names[0] == "test_errors_of_the_source_are_raised_in_the_loop"
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)


def test_errors_that_are_no_exceptions_are_raised_too(pair):
    def source():
        yield np.zeros(2)
        raise SystemExit(3)

    iterator = iter(pair.distribute_dataset(source()))
    next(iterator)
    with pytest.raises(SystemExit):
        next(iterator)


def test_errors_of_iter_are_raised_at_once(pair):
    class Broken:
        def __iter__(self):
            raise SourceError

    with pytest.raises(SourceError):
        iter(pair.distribute_dataset(Broken()))


def test_an_error_keeps_nothing_alive(pair):
    """Neither the source nor the iterator, with no garbage collection."""

    class Source:
        def __iter__(self):
            return failing()

    gc.disable()
    try:
        source = Source()
        iterator = iter(pair.distribute_dataset(source))
        alive = [weakref.ref(source), weakref.ref(iterator)]
        try:
            while True:
                next(iterator)
        except SourceError:
            pass
        del source, iterator
        assert [ref() for ref in alive] == [None, None]
    finally:
        gc.enable()


def test_errors_of_the_transfer_are_raised_in_the_loop(pair, options, monkeypatch):
    def broken(*args, **kwargs):
        raise SourceError("out of memory")

    iterator = iter(pair.distribute_dataset([np.zeros(2)] * 3, options))
    monkeypatch.setattr(jax, "device_put", broken)
    with pytest.raises(SourceError, match="out of memory"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


# -- the end of the thread -----------------------------------------------------


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


@pytest.mark.parametrize("method", ["join", "drain"])
def test_an_interrupt_while_the_thread_is_ended_loses_no_element(pair, method, monkeypatch):
    iterator, _ = started(pair)

    def interrupted(*_):
        raise Alarm

    with monkeypatch.context() as patch, pytest.raises(Alarm):
        patch.setattr(Prefetcher, method, interrupted)
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
from distjax.data import prefetch

prefetch._EXIT_SECONDS = 0.1
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
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert done.stderr == ""


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


def test_each_element_goes_to_one_of_two_threads(options):
    strategy = dj.VirtualStrategy(2)
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
