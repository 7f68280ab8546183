"""What ends a job whose processes differ, or of which one does not come."""

import concurrent.futures
import re

import pytest

from tests.processes.jobs import run_job

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("uncaught")]

START = """
import numpy as np
import distjax as dj
dj.initialize(ADDRESS, P, I, meeting_timeout=3)
strategy = dj.MultiWorkerMirroredStrategy()
"""

OTHER_VALUES = """
with strategy.scope():
    dj.Variable(np.full(3, I, np.float32), name="w")
"""

ON_ONE_PROCESS = """
if I == 0:
    strategy.run(lambda x: dj.get_replica_context().all_reduce("sum", x), args=(1.0,))
"""

OTHER_LAUNCHES = """
def train(x): return dj.get_replica_context().all_reduce("sum", x)
def evaluate(x): return dj.get_replica_context().all_reduce("sum", 2 * x)
for fn in (train, evaluate):
    strategy.run(fn, args=(np.float32(1),))
checkpointer = dj.checkpoint.Checkpointer(os.environ["TEST_DIRECTORY"])
checkpointer.save(1, {"x": strategy.extended.broadcast_to(np.ones(2))})
checkpointer.wait()
strategy.run((train, evaluate)[I], args=(np.float32(1),))  # they pair up, in silence
"""

SAVE_AGAIN = """
checkpointer.save(2, {"x": strategy.extended.broadcast_to(np.ones(2))})
checkpointer.wait()
"""

UNRELATED_RUNTIME = """
import jax
jax.distributed.initialize(ADDRESS, P, I)
import distjax as dj
dj.MirroredStrategy()
try:
    dj.MultiWorkerMirroredStrategy(jax.devices())
except dj.errors.ClusterError as error:
    print(error, flush=True)
"""

SCRIPTS = {
    "on one process": START + ON_ONE_PROCESS,
    "other values": START + OTHER_VALUES,
    "other launches": START + OTHER_LAUNCHES + SAVE_AGAIN,
    "unrelated runtime": UNRELATED_RUNTIME,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("uncaught") / "checkpoints"


@pytest.fixture(scope="module")
def jobs(directory):
    """All of them side by side: what they mostly do is wait."""
    environment = {"TEST_DIRECTORY": str(directory)}
    with concurrent.futures.ThreadPoolExecutor(len(SCRIPTS)) as pool:
        run = lambda script: pool.submit(run_job, script, environment=environment)
        yield {name: run(script) for name, script in SCRIPTS.items()}


def test_processes_that_differ_end_with_77(jobs):
    for ended in jobs["other values"].result():
        assert ended.code == 77
        assert "differs from process 0 in the initial value of 'w'" in ended.said


def test_who_comes_to_its_end_where_another_goes_on_differs(jobs):
    """At once: the end is a meeting, too."""
    for ended in jobs["on one process"].result():
        assert ended.code == 77
        assert "Got: 'the end of the program' on process 1; 'the first call of " in ended.said


def test_no_checkpoint_is_written_after_a_difference(jobs, directory):
    """A save is a meeting; the watch may find it before."""
    for ended in jobs["other launches"].result():
        assert ended.code == 77
        assert "differs from process 0 in what they have launched" in ended.said
        assert re.search(
            r"evaluate of arguments .* on process 1; .*train of arguments .* on process 0",
            ended.said,
        )
    assert [p.name for p in directory.iterdir() if p.name.isdigit()] == ["1"]


def test_a_job_that_was_joined_without_distjax_is_refused(jobs):
    for ended in jobs["unrelated runtime"].result():
        assert ended.code == 0
        text = "MultiWorkerMirroredStrategy needs a job that dj.initialize has joined."
        assert text in ended.said
        assert ended.said.count("MirroredStrategy() takes the devices of this process only") == 1
