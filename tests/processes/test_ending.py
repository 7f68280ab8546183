"""How the processes of a job end: each with a code that says why, none long after the others."""

import pytest

from tests.processes.jobs import run_job

pytestmark = pytest.mark.multiprocess

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


def test_processes_that_end_early():
    """Each of five in its own way, and the one that waits for them in a collective.

    Process 0 holds the coordinator, so it ends last: after the wait for the others' ends.
    """
    script = (
        JOINED
        + """
dj.initialize(ADDRESS, P, I, shutdown_timeout=6)
assert meet() == P
if I == 0:
    sys.exit(3)
if I == 1:
    meet().block_until_ready()
if I == 2:
    raise ValueError("mine")
if I == 3:
    threading.Thread(target=int, args=("a",)).start()
    threading.Event().wait()
os.kill(os.getpid(), signal.SIGKILL if I == 4 else signal.SIGTERM)
signal.pause()
"""
    )
    ended = run_job(script, ids=range(6))
    said = "\n".join(process.said for process in ended)
    assert [process.code for process in ended] == [3, 71, 70, 70, -9, -15], said
    assert "no end of process 1 on " in ended[0].said
    assert "Gloo all-reduce failed" in ended[1].said
    assert "ValueError: mine" in ended[2].said
    assert "ValueError: invalid literal" in ended[3].said


def test_the_end_of_the_program_is_a_meeting():
    """Process 1 ends without it; process 0, which has nothing more to do, does not end with 0."""
    script = (
        JOINED
        + """
dj.initialize(ADDRESS, P, I, shutdown_timeout=2)
if I == 1:
    os._exit(0)
"""
    )
    first, second = run_job(script)
    assert (first.code, second.code) == (71, 0)
    assert "the end of process 0 on " in first.said
    assert "Got: no end of process 1 on " in first.said
