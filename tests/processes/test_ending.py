"""How the processes of a job end: each with a code that says why, none long after the others."""

import concurrent.futures
import os

import pytest

from tests.processes.jobs import run_job

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("ends of processes")]

JOINED = """
import signal, threading
import distjax as dj
import jax, jax.numpy as jnp
def meet():
    mesh = jax.make_mesh((P,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.P("d"))
    ones = jax.make_array_from_callback((P,), split, lambda _: jnp.ones(1))
    return jax.jit(jnp.sum, out_shardings=jax.sharding.NamedSharding(mesh, jax.P()))(ones)
"""


#: Process 0 holds the coordinator, without which JAX aborts; one of the others computes.
RAISED = """
dj.initialize(ADDRESS, P, I)
assert meet() == P
if I == 0:
    raise ValueError("mine")
if I == 1:
    meet().block_until_ready()
threading.Event().wait()
"""

#: The other is in a collective.
ONE_ENDS = """
dj.initialize(ADDRESS, P, I, shutdown_timeout=4)
assert meet() == P
if I == 1:
    {how}
else:
    print(meet())
"""

#: Process 1 dies before the end; process 0, which has nothing more to do, does not end with 0.
DIES = """
dj.initialize(ADDRESS, P, I, shutdown_timeout=2)
if I == 1:
    os.kill(os.getpid(), signal.SIGTERM)  # JAX's preemption service does not catch it
    signal.pause()
"""

#: Process 1 is gone between two steps; process 0 finds out in the next, which writes a variable.
VANISHES = """
dj.initialize(ADDRESS, P, I, shutdown_timeout=2)
strategy = dj.MultiWorkerMirroredStrategy()
with strategy.scope():
    w = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)
def step():
    w.assign_add(jnp.ones(()))
strategy.run(step)
meet().block_until_ready()
if I == 1:
    os._exit(0)
for _ in range(1000):
    strategy.run(step)
print(w.value)
"""

#: What one process does, how the two end, and what it says.
EARLY_ENDS = {
    "thread": (
        "threading.Thread(target=int, args=('a',)).start(); meet()",
        (71, 70),
        "invalid literal",
    ),
    "exit": ("sys.exit(3)", (71, 3), "the end of the program needs all 2 processes"),
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)", (71, -9), ""),
}


@pytest.fixture(scope="module")
def jobs():
    """All of them side by side: what they mostly do is wait."""
    scripts = {name: ONE_ENDS.format(how=how) for name, (how, *_) in EARLY_ENDS.items()}
    scripts |= {"raised": RAISED, "dies": DIES, "vanishes": VANISHES}
    with concurrent.futures.ThreadPoolExecutor(len(scripts)) as pool:
        ids = lambda name: range(3 if name == "raised" else 2)
        start = lambda name: pool.submit(run_job, JOINED + scripts[name], ids(name))
        yield {name: start(name) for name in scripts}


def test_an_exception_in_process_0_reaches_all(jobs):
    ended = jobs["raised"].result()
    assert [process.code for process in ended] == [70, 71, 71], "\n".join(p.said for p in ended)
    assert "ValueError: mine" in ended[0].said
    for other in ended[1:]:
        assert "Got: the end of process 0 on " in other.said and "ValueError: mine." in other.said


@pytest.mark.parametrize("how", EARLY_ENDS)
def test_one_process_ends_early(how, jobs):
    first, second = jobs[how].result()
    _, codes, said = EARLY_ENDS[how]
    assert (first.code, second.code) == codes, first.said + second.said
    assert said in second.said


def test_the_end_of_the_program_is_a_meeting(jobs):
    first, second = jobs["dies"].result()
    assert (first.code, second.code) == (71, -15)
    assert "the end of the program needs all 2 processes.\n  Got: process 1 on " in first.said


def test_a_step_without_a_process_ends_as_its_loss(jobs):
    """Not as that of the variable, which the step that failed had taken."""
    first, second = jobs["vanishes"].result()
    assert (first.code, second.code) == (71, 0), first.said
    assert "Gloo" in first.said and "variable 'Variable' needs a value" in first.said


#: Process 0 is in a phase until process 1 has waited for it once; then process 1 writes a
#: checkpoint of its own until process 0 has waited for it at the end of the program.
SLOW_WORK_OF_ONE = """
import time
import numpy as np
import orbax.checkpoint as ocp
from distjax._src.cluster import ending, meeting
dj.initialize(ADDRESS, P, I, meeting_timeout=1)
ending._SHARE = 0.3
BEGUN, WAITED = (os.path.join(os.environ["TEST_DIRECTORY"], name) for name in ("begun", "waited"))
def hold():
    ending.watch_the_end()._watch.look(time.monotonic())  # as its thread does by time
    open(BEGUN, "w").close()
    open(WAITED).close()
def let_go_when_it_has_waited():
    open(BEGUN).close()
    hear = meeting.hear
    def hear_and_let_go(joined):
        meeting.hear = hear
        marks = hear(joined)
        assert any(mark.is_busy for mark in marks.values())
        open(WAITED, "w").close()
        return marks
    meeting.hear = hear_and_let_go
if I == 0:
    with dj.phase("an evaluation"):
        hold()
else:
    let_go_when_it_has_waited()
strategy = dj.MultiWorkerMirroredStrategy()
strategy.run(lambda x: dj.get_replica_context().all_reduce("sum", x), args=(1.0,))
if I == 1:
    finish = ocp.AsyncCheckpointer.wait_until_finished
    def finish_slowly(writer):
        ocp.AsyncCheckpointer.wait_until_finished = finish
        hold()
        finish(writer)
    checkpointer = dj.checkpoint.Checkpointer(os.environ["TEST_DIRECTORY"] + "/c", local=True)
    checkpointer.save(1, {"x": np.ones(3)})
    ocp.AsyncCheckpointer.wait_until_finished = finish_slowly
else:
    let_go_when_it_has_waited()
"""


def test_slow_work_of_one_process_is_awaited(tmp_path):
    for pipe in ("begun", "waited"):  # who opens one waits for the other
        os.mkfifo(tmp_path / pipe)
    environment = {"TEST_DIRECTORY": str(tmp_path)}
    for ended in run_job(JOINED + SLOW_WORK_OF_ONE, environment=environment):
        assert ended.code == 0, ended.said
    assert (tmp_path / "c" / "1").is_dir()
