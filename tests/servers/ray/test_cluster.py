"""What is started, what it listens at, what it leaves; and what is refused."""

import ipaddress
import os
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import psutil
import pytest
from jax import export

import distjax as dj
from distjax._src.context import ProgramModes
from distjax._src.servers.on_ray import actors
from distjax._src.servers.on_ray import engine as processes
from distjax._src.servers.on_ray.actors import Order, StableFunction, WorkerActor
from distjax.errors import ClusterError, ServerLostError, UnsupportedError
from tests.faults.four_parts import is_explained
from tests.processes.jobs import run_job
from tests.servers.ray.conftest import make_engine

pytestmark = pytest.mark.xdist_group("ray")


def test_everything_is_at_loopback(served):
    """Sockets that listen, and those that are connected, of all processes of the cluster."""
    assert served.run(lambda: jnp.float32(1)) == 1
    addresses = set()
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        for connection in process.net_connections("inet"):
            addresses.update(a.ip for a in (connection.laddr, connection.raddr) if a)
    assert addresses
    for address in map(ipaddress.ip_address, addresses):
        address = getattr(address, "ipv4_mapped", None) or address
        assert address.is_loopback, addresses


def test_nothing_is_changed_by_starting(cluster):
    home, before, after = cluster
    assert list(home.iterdir()) == []
    assert after == before


def test_a_token_is_asked_for(cluster):
    children = psutil.Process().children(recursive=True)
    (raylet,) = (process for process in children if process.name() == "raylet")
    environment = raylet.environ()
    assert environment["RAY_AUTH_MODE"] == "token"
    token = pathlib.Path(environment["RAY_AUTH_TOKEN_PATH"])
    assert len(token.read_text()) == 64 and token.stat().st_mode & 0o077 == 0


def test_processes_are_no_background(cluster):
    """Ray's own default is 15 more than this process, which any other program would go before."""
    for process in psutil.Process().children(recursive=True):
        assert process.nice() == psutil.Process().nice(), process


def test_other_versions_are_refused(served, monkeypatch):
    monkeypatch.setattr(processes, "own_versions", lambda: {"jax": "0.0.1", "distjax": "0"})
    text = r"^server 0 needs the versions of the coordinator: jax 0.0.1, distjax 0"
    actor = served.servers[0].actor
    with pytest.raises(ClusterError, match=text):
        processes.RayProcess("server 0", actor).require_start()
    workers = engine_of(lambda: served.servers[0].actor)
    for _ in range(2):  # a process that is of no use is tried anew
        with pytest.raises(ClusterError, match="^worker 7 needs the versions of the coordinator"):
            find_without_killing(workers, monkeypatch)


def engine_of(make_worker, num_devices=1, **options):
    """An engine whose workers are made by a function."""
    engine = make_engine(**options)
    engine._make_worker, engine._replicas = make_worker, (num_devices, "replica")
    return engine


def find_without_killing(workers, monkeypatch):
    monkeypatch.setattr("ray.kill", lambda actor: None)
    workers.find(7)


def test_a_process_without_the_devices_of_its_replicas_is_refused(served, monkeypatch):
    workers = engine_of(lambda: served.servers[0].actor, num_devices=99)
    text = r"(?s)^worker 7 needs 99 devices, one for each of its replicas.*on cpu.*num_gpus"
    with pytest.raises(ClusterError, match=text) as caught:
        find_without_killing(workers, monkeypatch)
    assert is_explained(caught.value)


def test_processes_that_do_not_start_are_given_up(cluster, monkeypatch):
    import ray

    class Broken:
        def __init__(self):
            raise ModuleNotFoundError("No module named 'distjax'")

        def describe_process(self):
            pass

    make = ray.remote(num_cpus=0)(Broken).remote
    text = r"(?s)^worker 0 needs a process that starts.*No module named 'distjax'"
    with pytest.raises(ClusterError, match=text):
        engine_of(make, max_failures=2).find(0)
    with pytest.raises(ClusterError, match="^a server needs a process that starts"):
        processes.RayProcess("a server", make()).require_start()
    monkeypatch.setattr(processes, "START_SECONDS", 0.5)
    engine = make_engine(server_resources={"resources": {"nowhere": 1}})
    with pytest.raises(ClusterError, match="^server 0 needs a process within 0.5 s"):
        dj.ParameterServerStrategy(workers=1, engine=engine)


def test_a_process_that_died_is_replaced_once(cluster, monkeypatch):
    """Also where two threads find it: the second would drop the one that replaces it."""
    made = []

    def make():
        describe = types.SimpleNamespace(remote=object)
        made.append(types.SimpleNamespace(describe_process=describe))
        return made[-1]

    workers = engine_of(make)
    process = workers.begin(0)
    monkeypatch.setattr("ray.kill", lambda actor: None)
    for _ in range(2):
        workers.replace_dead(0, process)
        assert workers.begin(0).actor is made[1]
    assert [process.blame(), process.blame()] == [True, False]  # its oldest attempt, no other


def test_a_lost_server_ends_the_attempt(monkeypatch):
    import ray

    def get(call, timeout):
        raise ray.exceptions.RayActorError

    def stages():
        yield actors._get_all({2: "a call"})

    actor = WorkerActor(1, "replica")
    monkeypatch.setattr(ray, "get", get)
    order = Order(3, 7, [], ProgramModes.of_this_thread())
    actor._attempts[7] = None, stages()
    with pytest.raises(ServerLostError, match="server 2"):
        actor.push(order)
    assert not actor._attempts


def test_ray_is_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"(?s)^RayEngine needs the package ray.*distjax\[ray\]"):
        dj.servers.RayEngine()


def test_wrong_options_are_refused(cluster):
    with pytest.raises(ValueError, match="^RayEngine: max_failures needs an int of 1 or more"):
        dj.servers.RayEngine(max_failures=0)
    engine = make_engine(worker_resources={"gpus": 1})
    with pytest.raises(ValueError, match="gpus"):  # by Ray
        dj.ParameterServerStrategy(workers=1, engine=engine)


def test_a_callback_is_refused_where_a_program_is_read_too():
    name = "xla_ffi_python_cpu_callback"
    call = lambda x: jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((), x.dtype))(x)
    allowed = [export.DisabledSafetyCheck.custom_call(name)]
    exported = export.export(jax.jit(call), disabled_checks=allowed)(jnp.float32(1))
    with pytest.raises(UnsupportedError, match="(?s)^a program that is shipped.*python_cpu_callb"):
        StableFunction(bytes(exported.serialize()))(jnp.float32(1))


def test_nobody_calls_ray_when_its_cluster_ends(cluster, monkeypatch, tmp_path):
    import ray

    from distjax._src.servers.on_ray import engine as module

    ended = []
    monkeypatch.setattr(module, "_started", True)
    monkeypatch.setattr(module, "_folder", tmp_path)
    monkeypatch.setattr(module, "end_all", lambda pid: ended.append("threads"))
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append("cluster"))
    module._end_cluster(os.getpid() + 1)  # as in a process that was forked
    assert not ended and tmp_path.exists() and module._started
    module._end_cluster(os.getpid())
    assert ended == ["threads", "cluster"] and not tmp_path.exists()


IMPORTED = """
import ray
import distjax as dj

try:
    dj.servers.RayEngine()
except dj.errors.ClusterError as error:
    print(error)
"""

TOO_EARLY = """\
RayEngine needs to import Ray itself, to start a cluster of its own.
  Got: a Ray that was imported before.
  Why: on import Ray reads that it is to listen at this machine only, and ask for a token.
  Fix: engine = dj.servers.RayEngine() before `import ray`; or ray.init() for a cluster with \
Ray's own settings, which RayEngine() then uses
"""


def test_a_ray_that_was_imported_before_starts_no_cluster():
    """It would listen at all addresses, and ask nobody for a token."""
    (ended,) = run_job(IMPORTED, ids=(0,))
    assert (ended.code, ended.said) == (0, TOO_EARLY)
