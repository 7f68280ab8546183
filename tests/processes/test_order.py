"""Programs of all processes run in the order of their launches, also from different threads.

With one CPU device a process runs them side by side if another thread launches them: collectives of
equal size would pair up across programs, and both give wrong numbers.
"""

import pytest

from tests.processes.jobs import run_job

pytestmark = pytest.mark.multiprocess

#: In process 1 a long program comes to its collective late. Meanwhile a first call, which runs on a
#: thread of its own, and a save, in which orbax has the devices meet.
LONG_PROGRAM_IN_FLIGHT = """
import threading
import numpy as np
import jax, jax.numpy as jnp
import distjax as dj
dj.initialize(ADDRESS, P, I)
strategy = dj.MultiWorkerMirroredStrategy()
all_reduce = lambda x: dj.get_replica_context().all_reduce("sum", x)
def long(x, n):
    y = jax.lax.fori_loop(0, n, lambda i, y: jnp.tanh(y @ x), x)
    return all_reduce(0 * y[0, :2] + 1.0)
own = strategy.distribute_values_from_function
x = own(lambda context: np.eye(400, dtype=np.float32))
n = own(lambda context: np.int32(300 * context.replica_id_in_sync_group))
hundred = own(lambda context: np.full(2, 100.0, np.float32))
with strategy.scope():
    w = dj.Variable(np.zeros(2, np.float32), aggregation=dj.VariableAggregation.MEAN)
def assign(x):
    w.assign(all_reduce(x))
def assign_more(x):
    w.assign_add(all_reduce(x))
def in_another_thread():
    thread = threading.Thread(target=strategy.run, args=(assign_more, (hundred,)))
    thread.start()
    thread.join()
def save():
    with dj.checkpoint.Checkpointer(os.environ["TEST_DIRECTORY"]) as checkpointer:
        checkpointer.save(1, {"w": w})
first_call = lambda: strategy.run(assign, args=(hundred,))
another = lambda: strategy.run(assign_more, args=(hundred,))
for do in (first_call, another, in_another_thread, save):
    ones = strategy.run(long, args=(x, n))
    do()
    assert np.asarray(ones).tolist() == [2.0, 2.0], ones
    print("w", np.asarray(w).tolist(), flush=True)
"""


def test_programs_from_different_threads_keep_their_order(tmp_path):
    environment = {"TEST_DIRECTORY": str(tmp_path / "checkpoints")}
    for ended in run_job(LONG_PROGRAM_IN_FLIGHT, environment=environment):
        assert ended.code == 0, ended.said
        said = [line for line in ended.said.splitlines() if line.startswith("w ")]
        assert said == [f"w [{x}, {x}]" for x in (200.0, 400.0, 600.0, 600.0)]
