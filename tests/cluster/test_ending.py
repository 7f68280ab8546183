"""With which code a process ends, and when Python's own end stays as it is."""

import dataclasses
import sys
import threading
import time
import types

import jax
import pytest

from distjax import errors
from distjax._src.cluster import ending, watch
from distjax._src.cluster.job import Job
from distjax._src.cluster.joining import make_timeouts
from distjax._src.cluster.ledger import CAUSE, Ledger

LOST = "Gloo all-reduce failed: [pair.cc:547] Connection closed by peer [127.0.0.1]:21893"


class BadText(ValueError):
    def __str__(self):
        raise AttributeError("no such field")


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
        pytest.param(BadText(), 70, id="a text that raises"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_codes(error, code):
    assert watch.exit_code(error) == code


class Ended(BaseException):
    """Stands for the end of the process."""


def closed_output():
    """Returns a stderr whose reader is gone."""

    def fail(*args):
        raise BrokenPipeError

    return types.SimpleNamespace(write=fail, flush=fail)


@pytest.fixture
def hooks(monkeypatch):
    """The hooks of a process of a job, a note of each call; the end of the process raises."""

    def end(code):
        raise Ended(code)

    def leave(joined, code, text, others_code=71, **options):
        raise Ended(code, text, others_code)

    seen = []
    monkeypatch.setattr(watch.os, "_exit", end)
    monkeypatch.setattr(watch.logging, "shutdown", lambda: None)
    monkeypatch.setattr(ending, "begin_to_end", lambda: None)
    monkeypatch.setattr(ending, "leave", leave)
    monkeypatch.setattr(
        ending, "Watch", lambda joined, status: types.SimpleNamespace(**watch_that(seen))
    )
    monkeypatch.setattr(ending, "job", make_job)
    monkeypatch.setattr(ending, "_endings", [])
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.setattr(ending.atexit, "register", seen.append)
    monkeypatch.setattr(sys, "excepthook", lambda *args: seen.append(args))
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args))
    assert ending.watch_the_end() is ending.watch_the_end()
    return seen


def watch_that(seen):
    """The methods of a watch that notes what it is told."""
    return {
        "start": lambda: None,
        "stop": lambda: seen.append("stop watch"),
    }


def make_job(wait=None, came=()):
    """A job whose process 0 is this one: what waiting for a key does, and who is at the end."""
    client = types.SimpleNamespace(
        blocking_key_value_get=wait,
        key_value_set=lambda *args, **kwargs: None,
        key_value_dir_get=lambda key: [
            (f"{key}/{i}", "") for i in came if key.startswith("distjax/meeting/")
        ],
    )
    timeouts = make_timeouts(60, 10, 10, 600.0, None, 3600.0)
    return Job(0, 3, client, timeouts, ("a (pid 1)", "b (pid 2)", "c (pid 3)"))


def raise_uncaught(error):
    sys.excepthook(type(error), error, None)


def test_the_former_hook_comes_first(hooks):
    error = ValueError("mine")
    with pytest.raises(Ended) as end:
        raise_uncaught(error)
    assert end.value.args == (70, "ValueError: mine", 71)  # the code, and what the others hear
    assert hooks == [(ValueError, error, None)]


def test_the_others_do_not_hear_how_jax_filters_tracebacks(hooks):
    def fail(x):
        raise ValueError("mine")

    former = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "quiet_remove_frames")
    try:
        with pytest.raises(ValueError, match="mine") as caught:
            jax.jit(fail)(1.0)
    finally:
        jax.config.update("jax_traceback_filtering", former)
    assert caught.value.__notes__
    with pytest.raises(Ended) as end:
        raise_uncaught(caught.value)
    assert end.value.args[1] == "ValueError: mine"


@pytest.mark.parametrize(("kind", "code"), [(errors.AgreementError, 77), (errors.StuckError, 76)])
def test_what_all_of_them_come_to_ends_all_with_one_code(hooks, kind, code):
    with pytest.raises(Ended) as end:
        raise_uncaught(kind())
    assert end.value.args[::2] == (code, code)


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


def test_a_thread_that_fails_while_it_ends_the_process_may_try_again(hooks, monkeypatch):
    """At its end it meets the others, which do not come: it would wait for itself."""

    def fail(error):
        raise OSError

    monkeypatch.setattr(ending, "begin_to_end", watch.begin_to_end)
    ended = []

    def end_twice():
        with monkeypatch.context() as patch, pytest.raises(OSError):
            patch.setattr(ending, "exit_code", fail)
            raise_uncaught(ValueError())
        with pytest.raises(Ended, match="71"):
            raise_uncaught(errors.PeerLostError())
        watch._end.release()
        watch._end.release()
        ended.append(True)

    thread = threading.Thread(target=end_twice, daemon=True)
    thread.start()
    thread.join(20)
    assert ended


def test_a_closed_output_changes_no_code(hooks, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(Ended, match="70"):
        watch.end_at_once(70)


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
    ipython.get_ipython = lambda: None  # imported, and not running
    with pytest.raises(Ended, match="77"):
        raise_uncaught(errors.AgreementError())


def fail_to_meet(*args):
    raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: no such key")


@pytest.fixture
def meet_with(hooks, monkeypatch):
    """Watches the end of a job, and returns what runs at its end."""

    def install(job):
        monkeypatch.setattr(ending, "job", lambda: job)
        monkeypatch.setattr(ending.jax_compat, "coordination_client", lambda: job.client)
        ending.watch_the_end().watch(job)
        return hooks.pop()  # what `atexit` was given

    return install


@pytest.mark.parametrize("status, code", [(None, 71), (0, 71), (3, 3), ("a message", 1)], ids=str)
def test_a_meeting_at_the_end_that_fails(meet_with, capsys, status, code):
    """`sys.exit(n)` keeps its code; what would be 0 is none where a process is lost."""
    meet = meet_with(make_job(fail_to_meet, came=(0, 2)))
    with pytest.raises(SystemExit) as asked:
        sys.exit(status)
    assert asked.value.code == status
    with pytest.raises(Ended) as end:
        meet()
    said = capsys.readouterr().err
    assert end.value.args == (code, said.removesuffix("\n"), 71)
    assert said.startswith("the end of the program needs all 3 processes.\n")
    assert "Got: process 1 on b (pid 2) did not come within 8 s, while process 0 on" in said


def test_a_meeting_at_the_end_without_the_coordinator(meet_with, monkeypatch, capsys):
    job = make_job(fail_to_meet)
    monkeypatch.setattr(job.client, "key_value_dir_get", fail_to_meet)
    with pytest.raises(Ended, match="71"):
        meet_with(job)()
    assert "the end of the program needs all 3 processes.\n" in capsys.readouterr().err


def test_a_meeting_at_the_end_that_fails_at_a_prompt_or_in_a_child(
    hooks, meet_with, monkeypatch, capsys
):
    """At a prompt the threads end all the same: in a call when Python ends, they aborted it."""
    meet = meet_with(make_job(fail_to_meet))
    with monkeypatch.context() as patch:
        patch.setattr(ending, "is_interactive", lambda: True)
        meet()
    assert "the end of the program needs all 3 processes" in capsys.readouterr().err
    assert hooks == ["stop watch"]
    monkeypatch.setattr(ending.watch_the_end(), "pid", -1)
    meet()
    assert capsys.readouterr().err == ""


def test_a_closed_stderr_at_the_end_changes_no_code(meet_with, monkeypatch):
    meet = meet_with(make_job(fail_to_meet, came=(0, 2)))
    monkeypatch.setattr(sys, "stderr", closed_output())
    with pytest.raises(Ended, match="71"):
        meet()


@pytest.mark.parametrize("status, code", [(None, 77), (3, 3)])
def test_a_difference_at_the_end_is_what_all_of_them_say(
    meet_with, monkeypatch, capsys, status, code
):
    """Who leaves first is heard before the others have compared: they say its words."""
    meet = meet_with(make_job())
    with pytest.raises(SystemExit):
        sys.exit(status)

    def differ(*args):
        raise errors.AgreementError("processes need to do the same")

    monkeypatch.setattr(ending, "exchange", differ)
    with pytest.raises(Ended) as end:
        meet()
    assert end.value.args == (code, "processes need to do the same", 77)
    assert "processes need to do the same" in capsys.readouterr().err


def test_an_exception_that_a_later_hook_has_printed_is_the_end_all_the_same(meet_with, monkeypatch):
    """Such as that of `rich.traceback.install()`, which calls no former one."""
    meet = meet_with(make_job(fail_to_meet))
    monkeypatch.setattr(sys, "last_value", ValueError("mine"), raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "excepthook", lambda *args: None)
        with pytest.raises(Ended) as end:
            meet()
        assert end.value.args == (70, "ValueError: mine", 71)
    with pytest.raises(Ended, match="71"):
        meet()  # what ours has not ended is none of this program's


def test_a_meeting_at_the_end(hooks, meet_with, monkeypatch):
    met = []
    monkeypatch.setattr(ending, "exchange", lambda job, *args: met.append(args))
    meet = meet_with(make_job())
    meet()
    assert met == [("the end of the program", "", 8.0)]
    assert hooks == ["stop watch"]
    monkeypatch.setattr(ending.jax_compat, "coordination_client", lambda: None)
    meet()  # the user has left by jax.distributed.shutdown()
    assert len(met) == 1


class Store:
    """A coordination service of one process: keys, and who waits for one."""

    def __init__(self):
        self.keys, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.changed:
            if key in self.keys and not allow_overwrite:
                raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
            self.keys[key] = value
            self.changed.notify_all()

    def key_value_dir_get(self, key):
        return [(name, said) for name, said in self.keys.items() if name.startswith(f"{key}/")]

    def blocking_key_value_get(self, key, timeout_in_ms):
        with self.changed:
            if self.changed.wait_for(lambda: key in self.keys, timeout_in_ms / 1000):
                return self.keys[key]
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")


@pytest.fixture
def processes(monkeypatch):
    """Three processes of a job that share a store, and how each of them ended."""
    store, ended = Store(), {}

    def begin():
        """Each process is a thread here, so each may end."""

    def end(code):
        ended[threading.current_thread().name] = code

    monkeypatch.setattr(watch, "begin_to_end", begin)
    monkeypatch.setattr(watch, "end_at_once", end)
    monkeypatch.setattr(watch, "flush_outputs", lambda: None)  # it closes the handlers of logs
    monkeypatch.setattr(watch, "_LEAVE_SECONDS", 20.0)
    jobs = [dataclasses.replace(make_job(), process_id=i, client=store) for i in range(3)]

    def follow(job, status=0):
        """Starts a thread that looks, as a process, until it has ended."""
        each = watch.Watch(job, lambda: status, Ledger())

        def look():
            while threading.current_thread().name not in ended:
                each.look(0.0)
                time.sleep(0.001)

        thread = threading.Thread(target=look, name=str(job.process_id))
        thread.start()
        return thread

    return jobs, ended, follow


def test_a_process_without_stderr_follows_another(processes, monkeypatch):
    jobs, ended, follow = processes
    follower = follow(jobs[1])
    monkeypatch.setattr(sys, "stderr", closed_output())
    watch.leave(jobs[2], 70, "ValueError: mine")
    follower.join()
    assert ended["1"] == 71


def test_the_others_hear_why_a_process_left_and_process_0_leaves_last(processes, capsys):
    jobs, ended, follow = processes
    followers = [follow(jobs[0]), follow(jobs[1], status=5)]
    text = errors.message("\x1b[2Jmine", got="a", why="b", fix="c")
    watch.leave(jobs[2], 70, f"ValueError: {text}", others_code=77)
    watch.leave(jobs[2], 70, "another reason")  # the first one is the cause
    for thread in followers:
        thread.join()
    assert ended == {"MainThread": 70, "0": 77, "1": 5}
    left = [key for key in jobs[0].client.keys if key.startswith(watch._LEFT)]
    assert sorted(left) == [f"{watch._LEFT}/{i}" for i in range(3)]
    said = capsys.readouterr().err
    assert "process 0 on a (pid 1) needs all processes of its job.\n" in said
    parts = [line for line in said.splitlines() if not line.startswith("process")]
    assert parts[: len(parts) // 2] == [
        "  Got: the end of process 2 on c (pid 3): ValueError: ?[2Jmine.",
        "      Got: a.",
        "      Why: b.",
        "      Fix: c.",
        "  Why: no collective can be complete without it.",
        "  Fix: look at what that process said; start the job again",
    ]
    assert "another reason" not in said


def test_who_loses_another_says_which(processes, capsys):
    """Its watch may not have looked yet when a collective fails."""
    jobs, ended, _ = processes
    watch.leave(jobs[2], 70, "ValueError: mine")
    watch.leave(jobs[1], 71, "JaxRuntimeError: Gloo", says_who=True)
    assert ended == {"MainThread": 71}
    assert "the end of process 2 on c (pid 3): ValueError: mine" in capsys.readouterr().err


def test_at_a_prompt_the_others_end_is_said_once_and_no_more(processes, monkeypatch, capsys):
    jobs, ended, _ = processes
    monkeypatch.setattr(watch, "is_interactive", lambda: True)
    watch._tell(jobs[2], "ValueError: mine", 71, False)
    each = watch.Watch(jobs[1], int, Ledger())
    each.look(0.0)
    each.look(1.0)
    assert ended == {}
    said = capsys.readouterr().err
    assert said.count("the end of process 2 on c (pid 3): ValueError: mine") == 1


@pytest.mark.parametrize(
    "line", ["", "[]", '{"process": "2"}', '{"process": 1, "code": 1, "text": ""}']
)
def test_what_is_no_departure_of_another_ends_nothing(processes, line):
    jobs, ended, _ = processes
    jobs[0].client.key_value_set(CAUSE, line)
    watch.Watch(jobs[1], int, Ledger()).look(0.0)
    assert ended == {}


def fail_for_good(*args, **kwargs):
    raise jax.errors.JaxRuntimeError("UNAVAILABLE: Socket closed")
