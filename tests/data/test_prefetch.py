"""The background thread: how far ahead it is, its context, its errors. No test sleeps."""

import gc
import threading
import traceback
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax._src.context import frames
from tests.data.prefetching import (
    SECONDS,
    endless,
    no_thread_is_left,  # noqa: F401  (a fixture)
    prefetchers,
    started,
)
from tests.replicas import local


@pytest.fixture(params=[0, 1, 2, 5])
def options(request):
    return dj.InputOptions(prefetch=request.param)


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


@pytest.mark.parametrize(
    "setting",
    [
        lambda: jax.default_prng_impl("rbg"),
        lambda: jax.threefry_partitionable(False),
        lambda: jax.default_matmul_precision("float32"),
        lambda: jax.numpy_dtype_promotion("strict"),
    ],
    ids=["prng", "threefry", "precision", "promotion"],
)
def test_law_a_source_computes_under_the_settings_of_the_loop(pair, options, setting):
    def numbers():
        config, key = jax.config, jax.random.key(0)
        marks = [config.jax_numpy_dtype_promotion == "strict", config.jax_default_matmul_precision]
        drawn = np.asarray(jax.random.normal(key, (6,)))
        return np.asarray([*drawn, *(mark in (True, "float32") for mark in marks)], np.float32)

    def source():
        yield numbers()

    outside = numbers()
    with setting():
        inside = numbers()
        (batch,) = pair.distribute_dataset(source(), options)
    assert inside.tolist() != outside.tolist()
    assert batch.stacked.ravel().tolist() == inside.tolist()


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
    monkeypatch.setattr(jax, "make_array_from_callback", broken)  # for arrays on a mesh
    with pytest.raises(SourceError, match="out of memory"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
