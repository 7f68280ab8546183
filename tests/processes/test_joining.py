"""Processes that join a job: by arguments and by the environment, and what listens then."""

import json

import pytest

from tests.processes.jobs import free_address, run_job
from tests.processes.sockets import outside_address

pytestmark = pytest.mark.multiprocess

REPORT = """
import json
from tests.processes.sockets import addresses_that_listen
def report(**what):
    print("report", json.dumps({"listens": sorted(addresses_that_listen()), **what}))
"""

#: In a namespace of its own the machine has a name that resolves to an address of a network.
RENAME = """
import ctypes, socket
if ctypes.CDLL(None, use_errno=True).unshare(0x04000000) == 0:  # CLONE_NEWUTS
    socket.sethostname(OUTSIDE)
"""


def reports(ended):
    """What each process reported, and the code it ended with."""
    found = []
    for process in ended:
        lines = [line for line in process.said.splitlines() if line.startswith("report ")]
        assert lines, process.said
        found.append(json.loads(lines[-1].removeprefix("report ")) | {"code": process.code})
    return found


def test_by_arguments_nothing_listens_beyond_loopback():
    """Not even where the machine's name is an address of a network: gloo would ask it."""
    outside = outside_address()
    script = f"OUTSIDE = {outside!r}\n" + (RENAME if outside else "") + REPORT
    script += """
import socket, threading
import distjax as dj
import jax
from distjax._src.cluster.job import job
from distjax.errors import ClusterError
address = ADDRESS.replace("127.0.0.1", "localhost")
dj.initialize(address, P, I, step_deadline=30.0)
dj.initialize(address, P, I, step_deadline=30.0)
try:
    dj.initialize(address, P, I, step_deadline=20.0)
except ClusterError as error:
    other = str(error)
ids = [device.process_index for device in jax.devices()]
joined = job()
client = joined.client
client.key_value_set(f"test/{I}", "x")
client.wait_at_barrier("test", 30_000)
keys = sorted(client.key_value_dir_get("test"))
assert client.blocking_key_value_get(f"test/{1 - I}", 30_000) == "x"
client.wait_at_barrier("read", 30_000)
client.key_value_delete(f"test/{I}")
client.wait_at_barrier("deleted", 30_000)
assert client.key_value_dir_get("test") == []
try:
    client.blocking_key_value_get("never", 10)
except jax.errors.JaxRuntimeError as error:
    never = str(error)
late = [dj.any_process(I == 1), dj.any_process(False)]
report(ids=ids, never=never, late=late, hosts=joined.hosts, id=joined.process_id,
       name=joined.name_process(1), count=joined.num_processes, keys=keys,
       meeting=joined.timeouts.meeting_timeout, other=other,
       renamed=socket.gethostname() == OUTSIDE)
threading.Thread(target=sys.exit, args=(5,)).start()  # ends the thread, no more
raise SystemExit(4 * I)
"""
    ended = run_job(script, devices=2)
    for process in ended:  # of two groups: both devices here with all, the first with the first
        # Gloo writes a line in pieces, from several threads at once: one of the pieces is counted.
        assert process.said.count("Expected number of connected peer ranks") == 3, process.said
    first, second = reports(ended)
    for i, process in enumerate((first, second)):
        assert process["code"] == 4 * i  # all come to the end: what each asks for
        assert process["ids"] == [0, 0, 1, 1]
        assert process["listens"] == ["127.0.0.1"]
        assert (process["id"], process["count"], process["meeting"]) == (i, 2, 30)
        assert "DEADLINE_EXCEEDED" in process["never"]
        assert process["late"] == [True, False]
        assert process["keys"] == [["test/0", "x"], ["test/1", "x"]]
        assert process["name"] == f"process 1 on {first['hosts'][1]}"
        assert process["other"].startswith(
            "initialize needs equal arguments when it is called again.\n"
            "  Got: step_deadline=20.0, which was 30.0; meeting_timeout=20.0, which was 30.0.\n"
        )
    assert first["hosts"] == second["hosts"]
    if not first["renamed"]:
        pytest.skip("no network, or no right to name the machine: the name is one of loopback")


def test_a_coordinator_on_a_network_binds_that_interface_alone():
    """Process 1 gets its place from variables."""
    outside = outside_address()
    if outside is None:
        pytest.skip("this machine has no address but loopback")
    address = f"{outside}:{free_address().rpartition(':')[2]}"
    script = (
        REPORT
        + """
import distjax as dj
if I == 0:
    dj.initialize(os.environ["DISTJAX_COORDINATOR"], P, I)
else:
    os.environ |= {"DISTJAX_NUM_PROCESSES": "2", "DISTJAX_PROCESS_ID": "1"}
    dj.initialize()
report()
"""
    )
    ended = reports(run_job(script, environment={"DISTJAX_COORDINATOR": address}))
    assert [process["code"] for process in ended] == [0, 0]
    assert [process["listens"] for process in ended] == [[outside], [outside]]


def test_one_process_alone_has_no_job_and_ends_as_python_does():
    script = (
        REPORT
        + """
import distjax as dj
import jax
from distjax._src import jax_compat
from distjax._src.cluster.job import job
dj.initialize()
dj.initialize()
def use_a_backend():
    return jax.devices()
use_a_backend()
report(job=job(), first_use=jax_compat.first_use_of_a_backend())
raise ValueError("mine")
"""
    )
    (alone,) = run_job(script, ids=(0,))
    (report,) = reports([alone])
    assert report.pop("first_use").endswith(" (use_a_backend)")
    assert report == {"listens": [], "job": None, "code": 1}
    assert "ValueError: mine" in alone.said


def test_another_version_on_one_process_is_one_error_on_all():
    script = """
import distjax as dj
if I == 1:
    dj.__version__ = "0.0.9"
dj.initialize(ADDRESS, P, I)
"""
    ended = run_job(script)
    assert [process.code for process in ended] == [78, 78]
    errors = [process.said.partition("ClusterError: ")[2] for process in ended]
    assert errors[0] == errors[1]
    assert "(pid " in errors[0] and "has distjax 0.0.9, and process 0 on " in errors[0]
