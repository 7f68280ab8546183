"""Threads that step one program end, however many they are.

Before JAX 0.12 a CPU process hangs where too many programs with collectives are in
flight. The bound on them holds for the process, not for each thread that waits.
"""

import os
import pathlib
import subprocess
import sys

import distjax as dj

#: XLA ends a process whose collective waits this long: what hangs is over in seconds.
PATIENCE = (
    "--xla_cpu_collective_call_terminate_timeout_seconds=4 "
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=2"
)

CHILD = """
import sys, threading
import jax, jax.numpy as jnp, distjax as dj
num_threads, num_steps = map(int, sys.argv[1:])
strategy = dj.MirroredStrategy(jax.devices())
with strategy.scope():
    v = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)
step = lambda: v.assign_add(jnp.float32(1))
strategy.run(step)
start = threading.Barrier(num_threads)
def work():
    start.wait()
    for _ in range(num_steps):
        strategy.run(step)
threads = [threading.Thread(target=work) for _ in range(num_threads)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(float(v.value))
"""


def test_four_threads_that_step_one_program_end():
    """On two devices, where the pool of threads that run collectives is at its smallest."""
    num_threads, num_steps = 4, 2000  # it hangs within the first hundred steps or so
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(num_threads), str(num_steps)],
        cwd=pathlib.Path(dj.__file__).parents[1],
        env={
            **os.environ,
            "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {PATIENCE}",
            "JAX_NUM_CPU_DEVICES": "2",
        },
        capture_output=True,
        text=True,
        timeout=90,
    )
    total = 2.0 * (1 + num_threads * num_steps)
    assert (child.returncode, child.stdout) == (0, f"{total}\n"), child.stderr[-2000:]
