"""`dj.launch.Job`: resumes, saves, and stops with all others at one step."""

import json
import os
import signal
import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax._src.cluster import ending
from distjax.errors import PreemptedError
from tests.processes.jobs import run_job


@pytest.fixture(autouse=True)
def hooks_are_put_back(monkeypatch):
    monkeypatch.setattr(ending, "_endings", [])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)


class Training:
    """A variable that adds up the steps, and the position in the data."""

    def __init__(self, directory):
        self.strategy = dj.VirtualStrategy(2)
        with self.strategy.scope():
            self.total = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)
        batches = [np.full(2, i, np.float32) for i in range(20)]
        self.data = iter(self.strategy.distribute_dataset(batches))
        self.checkpointer = dj.checkpoint.Checkpointer(directory)
        self.steps = []

    def job(self, **options):
        return dj.launch.Job(self.checkpointer, {"t": self.total, "d": self.data}, **options)

    def do(self, step):
        self.steps.append(step)
        self.strategy.run(self.add, args=(next(self.data),))

    def add(self, x):
        self.total.assign_add(x.sum())


def test_it_goes_on_where_the_last_save_was(tmp_path):
    first = Training(tmp_path)
    with pytest.raises(KeyError), first.job(save_every=3) as job:
        for step in job.steps(10):
            if step == 8:
                raise KeyError
            first.do(step)
    assert job.restored_step is None and first.checkpointer.all_steps() == [3, 6]
    second = Training(tmp_path)
    with second.job(save_every=3) as job:
        for step in job.steps(10):
            assert job.step == step
            second.do(step)
        assert (job.restored_step, job.step, job.attempt) == (6, 10, 0)
        assert list(job.steps(10)) == []
        for step in job.steps(12):
            second.do(step)
    assert second.steps == [6, 7, 8, 9, 10, 11]
    assert float(second.total.value) == 2 * sum(range(12))
    assert second.checkpointer.all_steps() == [3, 6, 9, 10, 12]


def test_arrays_are_in_its_state(tmp_path):
    def train(num_steps):
        with dj.checkpoint.Checkpointer(tmp_path) as checkpointer:
            with dj.launch.Job(checkpointer, {"w": jnp.zeros(2)}, save_every=2) as job:
                for _ in job.steps(num_steps):
                    job.state = {"w": job.state["w"] + 1}
            return np.asarray(job.state["w"]).tolist()

    assert train(3) == [3, 3] and train(3) == [3, 3] and train(5) == [5, 5]


def test_sigterm_saves_and_raises(tmp_path, monkeypatch):
    monkeypatch.setenv("DISTJAX_RESULT_DIR", str(tmp_path))
    monkeypatch.setenv("DISTJAX_ATTEMPT", "4")
    former = signal.getsignal(signal.SIGTERM)
    training = Training(tmp_path / "steps")
    with pytest.raises(PreemptedError) as raised, training.job() as job:
        assert job.attempt == 4
        for step in job.steps(10):
            if step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            training.do(step)
    assert signal.getsignal(signal.SIGTERM) == former
    text = str(raised.value)
    assert text.startswith("a job needs to be left alone up to its last step.\n  Got: SIGTERM")
    assert "before step 5" in text and "Why: the system takes its machines" in text
    assert "Fix: start it again" in text
    assert training.checkpointer.all_steps() == [5]
    events = [json.loads(x) for x in (tmp_path / "events.jsonl").read_text().splitlines()]
    told = [(e["event"], e["step"], e["attempt"], e["process"]) for e in events]
    assert told == [("committed", 5, 4, 0)]


def test_sigterm_at_once_saves_nothing_new(tmp_path):
    training = Training(tmp_path)
    with pytest.raises(PreemptedError), training.job() as job:
        os.kill(os.getpid(), signal.SIGTERM)
        list(job.steps(10))
    assert training.checkpointer.all_steps() == []


def test_it_saves_by_the_clock(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("distjax._src.launch.job.time.monotonic", lambda: now[0])
    training = Training(tmp_path)
    with training.job(save_seconds=10) as job:
        for step in job.steps(20):
            now[0] += 3.0
            training.do(step)
    saved = training.checkpointer.all_steps()
    assert saved == [4, 8, 12, 16, 20]


@pytest.mark.parametrize(
    "options, text",
    [
        ({"save_every": 0}, "Job: save_every needs an int of 1 or more"),
        ({"save_seconds": 0}, "Job: save_seconds needs to be a positive number.\n  Got: int (0)"),
        ({"save_seconds": "1"}, "Why: the state is saved when so many seconds have passed"),
    ],
)
def test_options_are_positive(options, text, tmp_path):
    with pytest.raises(ValueError) as raised:
        Training(tmp_path).job(**options)
    assert text in str(raised.value)


def test_steps_are_a_number_and_in_the_with(tmp_path):
    job = Training(tmp_path).job()
    with pytest.raises(ValueError, match="steps: num_steps needs an int of 0 or more"):
        job.steps(-1)
    with pytest.raises(RuntimeError, match="Job.steps needs to be called in the `with` of its job"):
        job.steps(3)


#: Process P - 1 is told to stop, at its third step; all of them save at one step, and go on there.
PREEMPTED = """
import json, signal
import distjax as dj
dj.initialize(ADDRESS, P, I)
import jax, numpy as np
strategy = dj.MultiWorkerMirroredStrategy()
with strategy.scope():
    total = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)
def add(x):
    total.assign_add(x.sum())
def train(is_told):
    data = iter(strategy.distribute_dataset([np.full(P, i, np.float32) for i in range(999)]))
    with (
        dj.checkpoint.Checkpointer(os.environ["TEST_DIRECTORY"]) as checkpointer,
        dj.launch.Job(checkpointer, {"t": total, "d": data}, save_seconds=0.5) as job,
    ):
        for step in job.steps(600 if is_told else job.step + 2):
            if is_told and (step, I) == (3, P - 1):
                os.kill(os.getpid(), signal.SIGTERM)
            strategy.run(add, args=(next(data),))
            if is_told:
                float(total.value)
try:
    train(True)
except dj.errors.PreemptedError:
    saved = max(int(x) for x in os.listdir(os.environ["TEST_DIRECTORY"]) if x.isdigit())
    print("SAVED", saved)
    assert float(total.value) == P * sum(range(saved)), (float(total.value), saved)
    raise
"""


#: As orbax, MaxText and plain JAX do it; the function is imported before the process joins.
POLLED = """
import signal
from jax.experimental.multihost_utils import reached_preemption_sync_point
import distjax as dj
dj.initialize(ADDRESS, P, I)
for step in range(1_000_000):
    if (step, I) == (10, P - 1):
        os.kill(os.getpid(), signal.SIGTERM)
    if reached_preemption_sync_point(step):
        break
print("REACHED", step)
sys.exit(75)
"""

#: Nobody polls, though a checkpoint is saved: process 1 dies of SIGTERM.
UNPOLLED = """
import signal
import distjax as dj
dj.initialize(ADDRESS, P, I, shutdown_timeout=3, heartbeat_timeout=3)
with dj.checkpoint.Checkpointer(os.environ["TEST_DIRECTORY"]) as checkpointer:
    checkpointer.save(1, {"x": 1})
if I == 1:
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
"""


@pytest.mark.multiprocess
@pytest.mark.xdist_group("preempted processes")
@pytest.mark.parametrize("num_processes", [2, 3])
def test_all_processes_stop_at_one_step(num_processes, tmp_path):
    directory = {"TEST_DIRECTORY": str(tmp_path)}
    ended = run_job(PREEMPTED, range(num_processes), environment=directory)
    assert [each.code for each in ended] == [75] * num_processes, ended[0].said
    said = {line for each in ended for line in each.said.splitlines() if "SAVED" in line}
    assert len(said) == 1


@pytest.mark.multiprocess
@pytest.mark.xdist_group("preempted processes")
@pytest.mark.parametrize("num_processes", [2, 3])
def test_a_loop_of_another_kind_polls(num_processes):
    ended = run_job(POLLED, range(num_processes))
    assert [each.code for each in ended] == [75] * num_processes, ended[0].said
    said = {line for each in ended for line in each.said.splitlines() if "REACHED" in line}
    assert len(said) == 1


@pytest.mark.multiprocess
@pytest.mark.xdist_group("preempted processes")
def test_a_program_that_does_not_poll_dies_of_sigterm(tmp_path):
    """Orbax's CheckpointManager would poll, and nothing would end the program."""
    first, second = run_job(UNPOLLED, environment={"TEST_DIRECTORY": str(tmp_path)})
    assert second.code == -signal.SIGTERM and first.code in (71, -signal.SIGABRT)
