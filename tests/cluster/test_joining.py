"""What `initialize` refuses before anything is done, in one process."""

import signal
import sys
import threading

import jax
import pytest

import distjax as dj
from distjax._src import jax_compat
from distjax._src.cluster import ending, joining
from distjax._src.cluster.job import Settings, job
from distjax._src.cluster.joining import make_timeouts
from distjax.errors import ClusterError
from tests.processes.sockets import addresses_that_listen


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """A process that has not called `initialize`, and whose hooks are put back."""
    monkeypatch.setattr(joining, "_joined_with", [])
    monkeypatch.setattr(ending, "_endings", [])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    for name in ("DISTJAX_COORDINATOR", "DISTJAX_NUM_PROCESSES", "DISTJAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)


def test_one_process_may_call_it_late_and_again():
    jax.devices()
    before, hook = addresses_that_listen(), sys.excepthook
    dj.initialize()
    dj.initialize()
    assert job() is None
    assert addresses_that_listen() == before
    assert sys.excepthook is hook
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_other_arguments_later():
    dj.initialize()
    with pytest.raises(ClusterError, match="needs equal arguments when it is called") as caught:
        dj.initialize("127.0.0.1:1", 2, 1)
    assert "num_processes=2, which was 1; process_id=1, which was 0" in str(caught.value)


def test_after_a_backend_was_used():
    jax.devices()
    with pytest.raises(ClusterError, match="initialize of process 1 needs to come before JAX") as e:
        dj.initialize("127.0.0.1:1", 2, 1)
    assert f"Got: a backend that is in use since {jax_compat.first_use_of_a_backend()}" in str(
        e.value
    )
    assert "call dj.initialize first" in str(e.value)


def test_after_jax_has_joined(monkeypatch):
    monkeypatch.setattr(jax_compat, "coordination_client", object)
    with pytest.raises(ClusterError, match="needs to come before JAX is used") as caught:
        dj.initialize("127.0.0.1:1", 2, 1)
    assert "Got: jax.distributed.initialize has been called" in str(caught.value)
    assert "call dj.initialize in place of jax.distributed.initialize" in str(caught.value)


def test_an_option_that_jax_has_not():
    """As JAX itself refuses it, but also where there is one process, which JAX is not asked for."""
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'num_proceses'"):
        dj.initialize(num_proceses=2)


def test_what_is_wrong_leaves_the_hooks_in_place():
    hook = sys.excepthook
    with pytest.raises(ClusterError, match="needs coordinator_address, num_processes and pro"):
        dj.initialize(num_processes=2)
    assert sys.excepthook is not hook  # uncaught, it ends the process with 78


def test_who_needs_a_job_joins_it_unless_the_program_has():
    dj.initialize(step_deadline=30.0)
    joining.join_if_nobody_did()
    assert joining._joined_with[0].timeouts.step_deadline == 30
    joining._joined_with.clear()
    joining.join_if_nobody_did()
    assert joining._joined_with[0].timeouts.step_deadline == 600


@pytest.mark.parametrize(
    "coordinator, bind, bound, gloo",
    [
        ("localhost:1", None, "127.0.0.1:1", "127.0.0.1"),
        ("[::1]:1", None, "[::1]:1", "::1"),
        ("localhost:1", "0.0.0.0:2", "0.0.0.0:2", "127.0.0.1"),
        ("localhost:1", "127.0.0.2:2", "127.0.0.2:2", "127.0.0.2"),
    ],
)
def test_what_jax_is_told(monkeypatch, coordinator, bind, bound, gloo):
    """Where it binds (of itself, every interface), how long it waits, options of mTLS."""
    told, hosts = {}, []

    def rendezvous(*place, **options):
        assert not jax.config.jax_enable_preemption_service  # else SIGTERM would end nothing
        told.update(options, place=place)

    monkeypatch.setattr(jax_compat._distributed.global_state, "preemption_sync_manager", None)
    monkeypatch.setattr(jax.distributed, "initialize", rendezvous)
    monkeypatch.setattr(jax_compat, "make_gloo_listen_at", hosts.append)
    timeouts = make_timeouts(60, 9.5, 11, 600.0, None, 3600.0)
    mtls = (("mtls_ca_file", "ca"),)
    joining._join_jax(Settings(coordinator, 2, 0, (3,), bind, timeouts, 0, mtls))
    assert hosts == [gloo]
    assert jax.config.jax_enable_preemption_service
    assert isinstance(jax_compat.preemption_sync_manager(), ending.Notice)
    assert told == {
        "place": (coordinator, 2, 0),
        "local_device_ids": (3,),
        "coordinator_bind_address": bound,
        "cluster_detection_method": "deactivate",
        "initialization_timeout": 60,
        "heartbeat_timeout_seconds": 10,
        "shutdown_timeout_seconds": 11,
        "mtls_ca_file": "ca",
    }
