"""Per-worker data that the processes of workers draw themselves."""

import contextlib
import pickle
import random
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax._src.servers.engine import WorkerDied
from distjax._src.servers.on_ray.actors import WorkerActor
from distjax._src.servers.on_ray.engine import RemoteElements
from distjax.errors import EndOfDataError
from tests.servers.ray.kills import kill_a_worker

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("cluster")]
NUM_ELEMENTS = 24


def elements(context):
    """Numbers of this worker's share, with leaves of other kinds; a buffer that is filled again."""
    buffer = np.zeros(3, np.float64)
    for i in range(context.input_pipeline_id, NUM_ELEMENTS, context.num_input_pipelines):
        buffer[:] = i
        yield {"x": buffer, "parity": i % 2, "key": jax.random.key(i), "half": jnp.bfloat16(i)}


@pytest.fixture(scope="module")
def total(served):
    with served.scope():
        return dj.Variable(jnp.zeros(()), aggregation=dj.VariableAggregation.SUM)


@pytest.fixture
def step(total):
    def step(element):
        total.assign_add(element["x"].mean())
        return element

    total.assign(jnp.zeros(()))
    return step


def was_there(value):
    """Whether a closure got an element, which is as it was drawn."""
    try:
        element = value.fetch()
    except EndOfDataError:
        return False
    number = int(element["x"][0])
    assert element["x"].dtype == np.float32 and (element["x"] == number).all()
    assert element["half"] == number and element["half"].dtype == jnp.bfloat16
    assert element["parity"] == number % 2
    assert (element["key"] == jax.random.key(number)).all()
    return True


@pytest.mark.drill
def test_each_element_is_used_once_whatever_processes_are_killed(coordinator, step, total):
    rng, killed = random.Random(0), []
    iterator = iter(coordinator.create_per_worker_dataset(elements))
    coordinator.snapshot()
    for _ in range(2):
        values = []
        for i in range(NUM_ELEMENTS + 2):
            values.append(coordinator.schedule(step, (iterator,)))
            if i == 12:
                kill_a_worker(coordinator, rng, killed)
        coordinator.join()
        assert [was_there(value) for value in values].count(False) == 2
        assert float(total.value) == sum(range(NUM_ELEMENTS))
        coordinator.restore()
        assert float(total.value) == 0
    assert killed


def test_an_element_taken_by_hand(coordinator, step, total):
    values = next(iter(coordinator.create_per_worker_dataset(elements)))
    assert [float(np.asarray(e["x"]).mean()) for e in values.values] == [0, 1]
    assert "RemoteArray(shape=(3,), dtype=float64)" in repr(values)
    for _ in range(2):  # the values of an element may be used again, and by any worker
        coordinator.schedule(step, (values.values[1],)).get()
    assert float(total.value) == 2


def test_errors_of_the_function_come_out(coordinator):
    def fails(context):
        yield np.float32(1)
        raise KeyError("mine")

    iterator = iter(coordinator.create_per_worker_dataset(fails))
    with pytest.raises(KeyError, match="mine"):
        for _ in range(4):
            coordinator.schedule(lambda x: x, (iterator,))
        coordinator.join()
    with contextlib.suppress(KeyError):  # the first may have come from the cut, at once
        coordinator.join()


class ShardError(Exception):
    """An ordinary exception, which Python cannot unpickle."""

    def __init__(self, path, line):
        super().__init__(f"{path}:{line} is corrupt")


class LockedError(Exception):
    """One that cannot be pickled."""

    def __init__(self, path, line):
        super().__init__(f"{path}:{line} is locked")
        self.lock = threading.Lock()


RAISED = {
    "an error": (lambda path, line: KeyError(line), KeyError, "17"),
    "unreadable": (ShardError, Exception, "ShardError: a:17 is corrupt"),
    "unpicklable": (LockedError, Exception, "LockedError: a:17 is locked"),
    "an exit": (lambda path, line: SystemExit(line), RuntimeError, r"raised SystemExit\(17\)"),
}


@pytest.mark.parametrize("kind", RAISED)
def test_no_exception_of_the_function_ends_its_process(coordinator, kind):
    """It comes with the traceback there, in itself or in its cause, which is Ray's."""
    make, expected, text = RAISED[kind]
    before = [(w["pid"], w["restarts"]) for w in coordinator.stats()["workers"]]

    def fails(context):
        raise make("a", 17)
        yield

    iterator = iter(coordinator.create_per_worker_dataset(fails))
    with pytest.raises(expected, match=text) as raised:
        coordinator.schedule(lambda x: x, (iterator,))
    assert "in fails" in f"{raised.value} {raised.value.__cause__}"
    assert [(w["pid"], w["restarts"]) for w in coordinator.stats()["workers"]] == before
    coordinator.schedule(lambda: 1).get()


class Unreadable:
    """An object that cannot be unpickled."""

    def __reduce__(self):
        return ShardError, ("a",)


def test_an_element_that_cannot_be_read_here_ends_no_process(coordinator):
    import ray  # not before the engine does

    before = [(w["pid"], w["restarts"]) for w in coordinator.stats()["workers"]]
    iterator = iter(coordinator.create_per_worker_dataset(lambda context: [Unreadable()]))
    with pytest.raises(ray.exceptions.RayError, match="line"):
        coordinator.schedule(lambda x: x, (iterator,))
    assert [(w["pid"], w["restarts"]) for w in coordinator.stats()["workers"]] == before


def test_a_function_that_cannot_be_pickled_is_refused(coordinator, tmp_path):
    with open(tmp_path / "log", "w") as file:
        dataset = coordinator.create_per_worker_dataset(lambda context: [file])
        with pytest.raises(TypeError, match="needs a function that can be pickled, on RayEngine"):
            iter(dataset)


class FakeEngine:
    """An engine whose processes are objects of this one: what is remote is done by `ray.get`."""

    max_failures = 3

    def __init__(self):
        self.worker, self.deaths = WorkerActor(1, "replica"), []

    def find(self, worker):
        draw = types.SimpleNamespace(options=lambda num_returns: draw, remote=self._draw)
        return types.SimpleNamespace(actor=types.SimpleNamespace(draw=draw))

    def _draw(self, *args):
        return lambda: self.worker.draw(*args)[0], lambda: self.worker.draw(*args)[1]

    def replace_dead(self, *of):
        self.deaths.append(of)


def test_a_source_that_a_process_cannot_make_raises_there(monkeypatch):
    monkeypatch.setattr("ray.get", lambda call, timeout: call())
    elements = RemoteElements(FakeEngine(), 0, 7, lambda: [])
    elements._pickled = b"a function of a module that is not installed there"
    with pytest.raises(pickle.UnpicklingError):
        elements[0]


def test_data_that_kills_its_process_fails_what_draws_it(monkeypatch):
    """Each time: a closure that would be taken to have not begun would be retried for ever."""

    import ray

    def get(call, timeout):
        raise ray.exceptions.RayActorError(None, "killed")

    monkeypatch.setattr(ray, "get", get)
    engine = FakeEngine()
    with pytest.raises(WorkerDied, match="killed") as caught:
        RemoteElements(engine, 0, 7, lambda: [])[0]
    assert caught.value.has_begun and len(engine.deaths) == 3


def test_a_worker_keeps_the_latest_datasets_open_and_makes_others_again():
    from ray import cloudpickle  # not before the engine does

    worker, made = WorkerActor(1, "replica"), []
    pickled = [cloudpickle.dumps(lambda i=i: [np.full(2, i), np.full(3, i)]) for i in range(20)]

    def draw(dataset, index):
        made.append(len(worker._datasets))
        return [x.tolist() for x in worker.draw(dataset, pickled[dataset], index)[1]]

    assert [draw(i, 0) for i in range(20)] == [[[i, i]] for i in range(20)]
    assert max(made) == 16
    assert draw(0, 1) == [[0, 0, 0]]  # it is made again, and read to where it was
    assert draw(19, 1) == [[19, 19, 19]]
