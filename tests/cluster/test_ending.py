"""With which code a process ends, and when Python's own end stays as it is."""

import sys
import threading
import types

import jax
import pytest

from distjax import errors
from distjax.cluster import ending
from distjax.cluster.job import Job
from distjax.cluster.settings import make_timeouts

LOST = "Gloo all-reduce failed: [pair.cc:547] Connection closed by peer [127.0.0.1]:21893"


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error, code",
    [
        (ValueError("mine"), 70),
        (errors.AgreementError(), 77),
        (errors.PeerLostError(), 71),
        (errors.PreemptedError(), 75),
        (errors.StuckError(), 76),
        (errors.ClusterError(), 78),
        (KeyboardInterrupt(), 130),
        (jax.errors.JaxRuntimeError(f"INTERNAL: Error dispatching computation: {LOST}"), 71),
        (ValueError(f"UNKNOWN: {LOST}"), 71),
        (caused(RuntimeError("a step failed"), ValueError(f"UNKNOWN: {LOST}")), 71),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), 70),
        (ValueError("my proxy: connection refused"), 70),
        (ConnectionResetError("Connection reset by peer"), 70),
    ],
    ids=lambda x: str(x)[:30],
)
def test_codes(error, code):
    assert ending.exit_code(error) == code


class Ended(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def hooks(monkeypatch):
    """The hooks of a process of a job, a note of each call; `os._exit` raises."""

    def end(code):
        raise Ended(code)

    seen = []
    monkeypatch.setattr(ending.os, "_exit", end)
    monkeypatch.setattr(ending.logging, "shutdown", lambda: None)
    monkeypatch.setattr(ending, "job", lambda: make_job())
    monkeypatch.setattr(ending, "_endings", [])
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.setattr(ending.atexit, "register", seen.append)
    monkeypatch.setattr(sys, "excepthook", lambda *args: seen.append(args))
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args))
    assert ending.watch_the_end() is ending.watch_the_end()
    return seen


def make_job(wait_at_barrier=None, keys=()):
    client = types.SimpleNamespace(
        wait_at_barrier=wait_at_barrier,
        key_value_set=lambda *args, **kwargs: None,
        key_value_dir_get=lambda key: [(f"{key}/{i}", "") for i in keys],
    )
    timeouts = make_timeouts(60, 10, 10, 600.0, None, 3600.0)
    return Job(0, 3, client, timeouts, ("a (pid 1)", "b (pid 2)", "c (pid 3)"), 0)


def raise_uncaught(error):
    sys.excepthook(type(error), error, None)


def test_the_former_hook_comes_first(hooks):
    error = ValueError("mine")
    with pytest.raises(Ended, match="70"):
        raise_uncaught(error)
    assert hooks == [(ValueError, error, None)]


def test_a_former_hook_that_fails_changes_no_code(hooks, monkeypatch):
    def fail(*args):
        raise OSError

    monkeypatch.setattr(ending.watch_the_end(), "_former_hook", fail)
    with pytest.raises(Ended, match="77"):
        raise_uncaught(errors.AgreementError())


def test_exceptions_of_threads(hooks):
    args = types.SimpleNamespace(exc_type=ValueError, exc_value=None)
    with pytest.raises(Ended, match="70"):
        threading.excepthook(args)
    assert hooks == [args]
    threading.excepthook(types.SimpleNamespace(exc_type=SystemExit, exc_value=SystemExit(3)))


def test_a_closed_output_changes_no_code(hooks, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(Ended, match="70"):
        raise_uncaught(ValueError())


def test_without_a_job_only_its_own_error_ends_the_process(hooks, monkeypatch):
    monkeypatch.setattr(ending, "job", lambda: None)
    raise_uncaught(ValueError())
    with pytest.raises(Ended, match="78"):
        raise_uncaught(errors.ClusterError())


def test_a_forked_child_ends_as_it_likes(hooks, monkeypatch):
    monkeypatch.setattr(ending.watch_the_end(), "pid", -1)
    raise_uncaught(ValueError())
    assert len(hooks) == 1


def test_nothing_ends_where_somebody_sits_at_a_prompt(hooks, monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    raise_uncaught(ValueError())
    monkeypatch.delattr(sys, "ps1")
    ipython = types.SimpleNamespace(get_ipython=object)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    raise_uncaught(errors.AgreementError())
    ending.watch_the_end()._meet()
    ipython.get_ipython = lambda: None  # imported, and not running
    with pytest.raises(Ended, match="77"):
        raise_uncaught(errors.AgreementError())


def fail_to_meet(*args):
    raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: barrier timed out")


@pytest.mark.parametrize("status, code", [(None, 71), (0, 71), (3, 3), ("a message", 1)], ids=str)
def test_a_meeting_at_the_end_that_fails(hooks, monkeypatch, capsys, status, code):
    """`sys.exit(n)` keeps its code; what would be 0 is none where a process is lost."""
    job = make_job(fail_to_meet, keys=(0, 2))
    monkeypatch.setattr(ending, "job", lambda: job)
    monkeypatch.setattr(ending.jax_compat, "coordination_client", lambda: job.client)
    ending.watch_the_end().meet_at_exit()
    (meet,) = hooks
    with pytest.raises(SystemExit) as asked:
        sys.exit(status)
    assert asked.value.code == status
    with pytest.raises(Ended, match=str(code)):
        meet()
    said = capsys.readouterr().err
    assert said.startswith("the end of process 0 on a (pid 1) needs to be that of all processes.\n")
    assert "Got: no end of process 1 on b (pid 2) within 8 s." in said


def test_a_meeting_at_the_end_without_the_coordinator(hooks, monkeypatch, capsys):
    job = make_job(fail_to_meet)
    monkeypatch.setattr(ending, "job", lambda: job)
    monkeypatch.setattr(ending.jax_compat, "coordination_client", lambda: job.client)
    monkeypatch.setattr(job.client, "key_value_dir_get", fail_to_meet)
    with pytest.raises(Ended, match="71"):
        ending.watch_the_end()._meet()
    assert "Got: no end of process 0 on a (pid 1) within 8 s." in capsys.readouterr().err


def test_a_meeting_at_the_end(hooks, monkeypatch):
    met = []
    job = make_job(lambda *args: met.append(args))
    monkeypatch.setattr(ending, "job", lambda: job)
    monkeypatch.setattr(ending.jax_compat, "coordination_client", lambda: job.client)
    ending.watch_the_end()._meet()
    assert met == [("distjax/end", 8000)]
    monkeypatch.setattr(ending.jax_compat, "coordination_client", lambda: None)
    ending.watch_the_end()._meet()  # the user has left by jax.distributed.shutdown()
    assert len(met) == 1
