"""What trains on wrong numbers in silence without distjax: a table of how each of it ends here.

Where the processes compare before they act it is an `AgreementError` on all, which can be caught
(`test_agreement` asks for its text); between two such meetings it ends all with 77.
"""

import concurrent.futures

import pytest

from tests.processes import test_agreement as at_meetings
from tests.processes.jobs import run_job

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("silence")]

START = """
import threading
import numpy as np
import jax, jax.numpy as jnp
import distjax as dj
dj.initialize(ADDRESS, P, I, step_deadline=STEP_DEADLINE)
strategy = dj.MultiWorkerMirroredStrategy()
with strategy.scope():
    w = dj.Variable(1.0, aggregation=dj.VariableAggregation.MEAN)
    metric = dj.metrics.Sum()
def step(x):
    w.assign_add(x)
    metric.update(x)
    return dj.get_replica_context().all_reduce("sum", x * w.value)
def evaluate(x):
    return dj.get_replica_context().all_reduce("sum", w.value - x)
for fn in (step, evaluate):
    strategy.run(fn, args=(np.float32(1.0),))
assert float(metric.result()) == 4.0
"""

ONE_MORE = "strategy.run(step, args=(np.float32(1.0),))\n"
ON_ONE = "if jax.process_index() == 0: "
GO_ON = 3 * ONE_MORE + "threading.Event().wait()\n"  # no meeting, and no end

METRIC_ON_ONE = ON_ONE + "print(metric.result())\n" + GO_ON
OTHER_FUNCTION = "strategy.run((step, evaluate)[I], args=(np.float32(1.0),))\n" + GO_ON
SKIPPED = ON_ONE + f"print({ONE_MORE.strip()})\n"  # in a collective that the other never enters
OTHER_NUMBER = "strategy.run(step, args=(np.float32(1.0 + I),))\n" + GO_ON

#: All of these have been called by all processes, so that no meeting shows the difference.
KNOWN = """
def adder(by):
    def add(x):
        w.assign_add(by * jnp.sum(x))
    return add
adders = adder(1.0), adder(2.0)
for add in adders:
    strategy.run(add, args=(np.float32(1.0),))
def batch(rows):
    return strategy.distribute_values_from_function(lambda ctx: np.ones(rows, np.float32))
for rows in (4, 8):
    strategy.run(adders[0], args=(batch(rows),))
def count(epoch, number):
    w.assign_add(100.0 * epoch + number)
strategy.run(count, args=(1, 1))
x = strategy.run(lambda: w.value)
strategy.reduce("sum", x), strategy.reduce("mean", x)
"""
OF_ONE_NAME = KNOWN + "strategy.run(adders[I], args=(np.float32(1.0),))\n" + GO_ON
OTHER_SHAPE = KNOWN + "strategy.run(adders[0], args=(batch(4 + 4 * I),))\n" + GO_ON
OTHER_DIGITS = KNOWN + "strategy.run(count, args=((1, 11), (11, 1))[I])\n" + GO_ON
OTHER_OPERATION = KNOWN + "strategy.reduce(('sum', 'mean')[I], x)\n" + GO_ON
ASSIGNED = "w.assign(1.0 + I)\n" + GO_ON
BROADCAST = "strategy.extended.broadcast_to(np.float32(I))\n" + GO_ON
MEAN_OF_OWN = "strategy.reduce('mean', {'loss': float(I), 'rows': 4})\n" + GO_ON
GATHER_OF_OWN = "strategy.gather(np.full(2, I, np.float32), axis=0)\n" + GO_ON
PUT = (
    """
from flax import nnx
model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
forward = lambda model: model(jnp.ones(2))
strategy.run(forward, args=(model,))
model.bias.set_value(jnp.full(3, I, jnp.float32))
strategy.run(forward, args=(model,))
"""
    + GO_ON
)

#: What the user writes, and how it ends: at a meeting, or (program, what all of them say).
TABLE = {
    "an initial value of another seed": at_meetings.another_seed,
    "dj.flax.create with another seed": at_meetings.another_seed_of_a_module,
    "a number of its own as an argument": at_meetings.another_number,
    "an array of its own as an argument": at_meetings.another_array,
    "a number of its own in a later call": (OTHER_NUMBER, "step of arguments "),
    "another constant": at_meetings.another_constant,
    "other code": at_meetings.another_step_on_a_variable,
    "an argument of another shape": at_meetings.another_shape,
    "a metric read by one process": (METRIC_ON_ONE, ": step of arguments "),
    "evaluate where the others call step": (OTHER_FUNCTION, ": evaluate of arguments "),
    "a step more than the others": (SKIPPED, ": the end of the program"),
    "another function of the same name": (OF_ONE_NAME, ": adder.<locals>.add of arguments "),
    "another shape that is known": (OTHER_SHAPE, ": adder.<locals>.add, program "),
    "other numbers of the same digits": (OTHER_DIGITS, ": count of arguments "),
    "another operation on the replicas": (OTHER_OPERATION, ": strategy.reduce, program "),
    "a number of its own assigned": (ASSIGNED, "assign of variable 'Variable' of arguments "),
    "a module of another seed": at_meetings.another_seed_of_a_plain_module,
    "a value of its own put into a module": (PUT, "a write of Linear.bias of arguments "),
    "a number of its own broadcast": (BROADCAST, ": broadcast_to of arguments "),
    "a mean of numbers of their own": (MEAN_OF_OWN, ": reduce(MEAN) of a value of the host of "),
    "a gather of arrays of their own": (GATHER_OF_OWN, ": gather of a value of the host of "),
}
BETWEEN_MEETINGS = {row: end for row, end in TABLE.items() if isinstance(end, tuple)}


def test_the_rows_that_are_found_at_meetings_are_asked_there():
    asked = set(at_meetings.DIFFERENT)
    assert asked >= {TABLE[row] for row in TABLE.keys() - BETWEEN_MEETINGS.keys()}


#: Process 1 compiles for longer than the deadline, for which nobody is to blame; then it is stuck.
SLOW_THEN_STUCK = """
def last(x):
    return dj.get_replica_context().all_reduce("mean", x)
if I == 1:
    compile_it = jax.stages.Lowered.compile
    def compile_slowly(*args, **kwargs):
        threading.Event().wait(4.5)
        return compile_it(*args, **kwargs)
    jax.stages.Lowered.compile = compile_slowly
print("compiled", strategy.run(last, args=(np.float32(1.0),)), flush=True)
def sit_there():
    threading.Event().wait()
if I == 1:
    sit_there()
print(strategy.run(last, args=(np.float32(1.0),)))
"""


@pytest.fixture(scope="module")
def jobs():
    """All of them side by side: what they mostly do is wait."""
    scripts = {row: (program, 600.0) for row, (program, _) in BETWEEN_MEETINGS.items()}
    scripts = {"stuck": (SLOW_THEN_STUCK, 3.0), **scripts}  # the longest one first

    def run(program, deadline):
        start = START.replace("STEP_DEADLINE", str(deadline))
        return pool.submit(run_job, start + program, devices=2)

    with concurrent.futures.ThreadPoolExecutor(len(scripts)) as pool:
        yield {row: run(*script) for row, script in scripts.items()}


@pytest.mark.parametrize("row", BETWEEN_MEETINGS)
def test_what_differs_between_meetings_ends_all_with_77(row, jobs):
    _, said = BETWEEN_MEETINGS[row]
    for ended in jobs[row].result():
        assert ended.code == 77, ended.said
        assert "differs from process 0 in what they have launched" in ended.said
        assert said in ended.said


def test_a_stuck_process_is_named_and_shows_its_threads(jobs):
    first, second = jobs["stuck"].result()
    for ended in (first, second):
        assert ended.code == 76, ended.said
        assert "compiled 1.0" in ended.said
        assert "(last of arguments " in ended.said
        assert "needs to complete within step_deadline (3 s)" in ended.said
        assert "Got: process 1 on " in ended.said
    assert "in sit_there" in second.said
