"""What one process alone runs into ends it with its own error and code, and the others soon after.

Also if JAX tells nobody of the error, if its `finally` blocks do not come to their end, and if the
others notice the process first.
"""

import concurrent.futures

import pytest

from tests.processes.jobs import run_job

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("errors of one")]

START = """
import threading
import numpy as np
import jax
from jax.experimental import io_callback
import distjax as dj
dj.initialize(ADDRESS, P, I, step_deadline=DEADLINE)
strategy = dj.MultiWorkerMirroredStrategy()
R = strategy.num_replicas_in_sync
with strategy.scope():
    w = dj.Variable(np.float32(0.0), aggregation=dj.VariableAggregation.MEAN)
def step(x):
    w.assign_add(x.mean())
def sit_there():
    threading.Event().wait()
def batches(num_batches):
    for _ in range(num_batches):
        yield np.ones(2 * R, np.float32)
    if I == 1:
        raise ValueError("mine")
def train(num_batches):
    for x in strategy.distribute_dataset(batches(num_batches)):
        strategy.run(step, args=(x,))
"""

#: Process 1 has two devices: with one, the program runs in the thread that launches it.
CALLBACK = """
x = strategy.distribute_values_from_function(lambda ctx: np.ones(2, np.float32))
calls = []
def called(x):
    calls.append(x)
    if I == 1 and len(calls) > 3:
        raise ValueError("mine")
    return x
def own(x):
    w.assign_add({call})
for _ in range(20):
    strategy.run(own, args=(x,))
print(w.value)
"""
SHAPE = "jax.ShapeDtypeStruct((), np.float32)"
OF_PURE = CALLBACK.format(call=f"jax.pure_callback(called, {SHAPE}, x.mean())")
OF_IO = CALLBACK.format(call=f"io_callback(called, {SHAPE}, x.mean())")
OF_DEBUG = CALLBACK.format(call="(jax.debug.callback(called, x.mean()), x.mean())[1]")

OF_DATA = """
try:
    train(2)
finally:
    if I == 1:
        sit_there()
"""

#: The others come to a meeting meanwhile, which has the deadline of a step.
BETWEEN_STEPS = """
strategy.run(step, args=(np.ones(2, np.float32),))
try:
    if I == 1:
        raise ValueError("mine")
    strategy.run(lambda x: step(x), args=(np.ones(2, np.float32),))
finally:
    if I == 1:
        sit_there()
"""

#: A hook of the user's that calls no former one has printed it; the others are in a collective.
ANOTHER_HOOK = """
if I == 1:
    sys.excepthook = lambda kind, error, trace: print("Traceback of", repr(error))
for _ in range(20):
    strategy.run(step, args=(np.ones(2, np.float32),))
    if I == 1:
        raise ValueError("mine")
"""

#: All raise it; the one that comes to its end first tells the others.
OF_ALL = """
try:
    int("mine")
finally:
    if I == 1:
        sit_there()
"""

#: What is done, whether with two devices, the deadline of a step, the code of the others.
OWN_ERRORS = {
    "jax.pure_callback": (OF_PURE, 2, 600.0, 71),
    "io_callback": (OF_IO, 2, 600.0, 71),
    "jax.debug.callback": (OF_DEBUG, 2, 600.0, 71),
    "a data source": (OF_DATA, 1, 600.0, 71),
    "between two steps": (BETWEEN_STEPS, 1, 3.0, 76),
    "with another hook": (ANOTHER_HOOK, 1, 600.0, 71),
    "of all": (OF_ALL, 1, 600.0, 70),
}

IN_A_LOOP_OVER_DATA = """
for x in strategy.distribute_dataset([np.ones(2 * R, np.float32)] * 3):
    strategy.run(step, args=(x,))
    if I == 1:
        sit_there()
"""
BEFORE_A_SAVE = """
checkpointer = dj.checkpoint.Checkpointer(os.environ["TEST_DIRECTORY"])
if I == 1:
    sit_there()
checkpointer.save(1, {"w": w})
"""
BEFORE_A_CREATION = """
if I == 1:
    sit_there()
with strategy.scope():
    dj.Variable(np.float32(0.0))
"""

#: Where process 1 is stuck, in no phase, and what the others then wait for.
STUCK = {
    "in a loop over data": (IN_A_LOOP_OVER_DATA, "the next element of a dataset"),
    "before a save": (BEFORE_A_SAVE, "the save of a checkpoint"),
    "before a creation": (BEFORE_A_CREATION, "the creation of 'Variable'"),
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """All of them side by side: what they mostly do is wait."""
    environment = {"TEST_DIRECTORY": str(tmp_path_factory.mktemp("checkpoints") / "c")}
    scripts = {row: (script, devices, s) for row, (script, devices, s, _) in OWN_ERRORS.items()}
    scripts |= {row: (script, 1, 3.0) for row, (script, _) in STUCK.items()}

    def run(script, devices, deadline):
        script = START.replace("DEADLINE", str(deadline)) + script
        return pool.submit(run_job, script, devices=devices, environment=environment)

    with concurrent.futures.ThreadPoolExecutor(len(scripts)) as pool:
        yield {row: run(*script) for row, script in scripts.items()}


@pytest.mark.parametrize("row", OWN_ERRORS)
def test_an_error_of_one_process_is_its_own_end(row, jobs):
    first, second = jobs[row].result()
    *_, code = OWN_ERRORS[row]
    assert (first.code, second.code) == (code, 70), first.said + second.said
    assert "mine" in second.said and "Traceback" in second.said
    assert "ValueError: " in first.said and "mine" in first.said


def test_what_is_said_of_a_callback(jobs):
    _, second = jobs["jax.pure_callback"].result()
    assert (
        "a callback in own needs to return.\n"
        "  Got: ValueError: mine.\n"
        "  Why: the program does not complete without it, and the other processes wait in it.\n"
        "  Fix: look at its traceback, which is printed here; what may fail is caught in the "
        "callback: def callback(x): try: ... except Exception: return x\n"
    ) in second.said
    assert "in called" in second.said


@pytest.mark.parametrize("row", STUCK)
def test_a_process_that_does_nothing_is_stuck_whatever_the_others_wait_for(row, jobs):
    first, second = jobs[row].result()
    assert (first.code, second.code) == (76, 76), first.said + second.said
    assert f"{STUCK[row][1]} needs all 2 processes" in first.said
    assert "Got: process 1 on " in first.said and "did not come within 3 s" in first.said
    assert "in sit_there" in second.said
