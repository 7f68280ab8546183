"""`distjax launch`: processes without JAX, in the hands of a launcher in this process."""

import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from distjax._src.launch import launcher
from distjax._src.launch.launcher import (
    Failure,
    Launcher,
    Options,
    find_cause,
    last_words,
)
from distjax._src.launch.processes import Ended, signals_to

#: What `dj.initialize` leaves, for scripts that do without JAX.
JOINED = """
import json, os, signal, sys, time
def tell(event, **facts):
    line = {"time": time.time(), "attempt": int(os.environ["DISTJAX_ATTEMPT"]), "event": event,
            "process": int(os.environ["DISTJAX_PROCESS_ID"]), "step": None, **facts}
    with open(os.environ["DISTJAX_RESULT_DIR"] + "/events.jsonl", "a") as file:
        file.write(json.dumps(line) + "\\n")
I, A = int(os.environ["DISTJAX_PROCESS_ID"]), int(os.environ["DISTJAX_ATTEMPT"])
tell("joined")
"""


@pytest.fixture
def launch(tmp_path, capfd):
    """Runs a script; returns the exit code, what was printed, and the result directory."""

    def run(script, *options, arguments=(), preamble=JOINED):
        path, results = tmp_path / "script.py", tmp_path / "results"
        path.write_text(preamble + script)
        argv = ["--result-dir", str(results), *map(str, options), str(path), *arguments]
        code = launcher.main(argv)
        out, err = capfd.readouterr()
        return code, out, err, results

    return run


def events_of(results, name=None):
    lines = map(json.loads, (results / "events.jsonl").read_text().splitlines())
    return [event for event in lines if name in (None, event["event"])]


def test_no_line_is_broken_or_lost(tmp_path, capfdbinary):
    script = JOINED + (
        "for n in range(10_000): print('line', n, 'of', I)\n"
        "sys.stdout.buffer.write(b'\\xff\\xfe no text\\nthe last one')\n"
    )
    (tmp_path / "script.py").write_text(script)
    argv = ["--processes", "3", "--result-dir", str(tmp_path / "r"), str(tmp_path / "script.py")]
    assert launcher.main(argv) == 0
    lines = capfdbinary.readouterr().out.split(b"\n")
    for i in range(3):
        own = [line[4:] for line in lines if line.startswith(b"[%d] " % i)]
        wanted = [b"line %d of %d" % (n, i) for n in range(10_000)]
        assert own == [*wanted, b"\xff\xfe no text", b"the last one"]
        log = (tmp_path / "r" / "attempt-0" / f"process-{i}.log").read_bytes()
        assert log.split(b"\n") == own
    assert len(lines) == 3 * 10_002 + 1


def test_half_a_line_is_in_the_log(launch):
    """What a process that hangs was about to do."""
    script = (
        "print('loading', end='', flush=True)\n"
        "log = os.environ['DISTJAX_RESULT_DIR'] + f'/attempt-0/process-{I}.log'\n"
        "while open(log).read() != 'loading': time.sleep(0.01)\n"
    )
    code, out, _, _ = launch(script, "--processes", 1)
    assert (code, out) == (0, "[0] loading\n")


def test_a_long_line_is_shown_in_parts(launch):
    """A process that never ends a line must not fill the launcher's memory."""
    _, out, _, results = launch("sys.stdout.write('x' * 3_000_000)", "--processes", 1)
    lines = out.splitlines()
    assert "".join(line.removeprefix("[0] ") for line in lines) == "x" * 3_000_000
    assert 1 < len(lines) < 5
    assert (results / "attempt-0/process-0.log").stat().st_size == 3_000_000


def test_a_reader_that_has_gone_stops_nothing(tmp_path):
    (tmp_path / "script.py").write_text("for n in range(30_000): print(n)")
    command = f"{sys.executable} -m distjax launch --processes 1 --result-dir {tmp_path / 'r'} "
    command += f"{tmp_path / 'script.py'} | head -1; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "[0] 0\n"), ended.stderr
    assert (tmp_path / "r/attempt-0/process-0.log").read_text().endswith("29999\n")


def test_what_processes_are_told(launch, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "mine")
    script = "print(json.dumps({k: v for k, v in os.environ.items()}))"
    options = ("--processes", 2, "--devices-per-process", 2, "--step-deadline", 90)
    code, out, _, results = launch(script, *options)
    assert code == 0
    told = {line[:3]: json.loads(line[4:]) for line in out.splitlines()}
    for i in range(2):
        own = told[f"[{i}]"]
        assert own["DISTJAX_PROCESS_ID"] == str(i) and own["DISTJAX_NUM_PROCESSES"] == "2"
        assert own["DISTJAX_RESULT_DIR"] == str(results) and own["DISTJAX_ATTEMPT"] == "0"
        assert own["JAX_NUM_CPU_DEVICES"] == "2" and own["PYTHONHASHSEED"] == "0"
        assert own["JAX_LOCAL_DEVICE_IDS"] == ("0,1", "2,3")[i]
        assert own["JAX_COMPILATION_CACHE_DIR"] == "mine"
        assert own["DISTJAX_STEP_DEADLINE"] == "90"
    assert told["[0]"]["DISTJAX_COORDINATOR"] == told["[1]"]["DISTJAX_COORDINATOR"]


WAIT = "time.sleep(60)\n"  # is killed

#: What process 1 does, and the code of the job.
ENDS = {
    "raise ValueError('mine')": 70,
    "sys.exit(3)": 3,
    "os._exit(77)": 77,
    "os.kill(os.getpid(), signal.SIGKILL)": 137,
    "os.kill(os.getpid(), signal.SIGSEGV)": 139,
    "sys.exit(0)": 0,
}


@pytest.mark.parametrize("how", ENDS)
def test_the_code_is_that_of_the_first_cause(how, launch):
    code = ENDS[how]
    script = f"if I == 1:\n    {how}\n" + (WAIT if code else "")
    preamble = JOINED if code != 70 else JOINED.replace('tell("joined")', "")
    got, _, err, results = launch(script, "--processes", 2, preamble=preamble)
    assert got == code, err
    if code:
        failure = json.loads((results / "failure.json").read_text())
        assert (failure["code"], failure["process"], failure["attempt"]) == (code, 1, 0)
        assert failure["host"] == socket.gethostname()
        assert "[launch] attempt 0 failed: process 1 on " in err and f"exit code {code}" in err
        assert "[launch] then process 0 was killed" in err
        assert f"[launch] logs: {results}/attempt-0/process-1.log" in err
    if code == 70:
        assert failure["error"] == "ValueError: mine" and "Traceback" in failure["traceback"]
        assert err.index("ValueError: mine") < err.index("then process 0")


def test_a_failure_that_is_told_comes_before_those_that_follow(launch, monkeypatch):
    """Process 0 leaves last, and is killed here on its way: what it has recorded is the cause."""
    script = (
        "if I == 0:\n"
        "    tell('failed', code=70, error='ValueError: mine', traceback='T: mine', step=7)\n"
        "    time.sleep(60)\n"
        "while not any('mine' in x for x in open(os.environ['DISTJAX_RESULT_DIR'] + "
        "'/events.jsonl')): pass\n"
        "tell('failed', code=71, error='PeerLostError: process 0', traceback='')\n"
        "sys.exit(71)\n"
    )
    monkeypatch.setattr(launcher, "_FOLLOW_SECONDS", 0.1)
    code, _, err, results = launch(script, "--processes", 2)
    assert code == 70
    assert "process 0 on " in err and "in step 7: exit code 70" in err
    assert json.loads((results / "failure.json").read_text())["step"] == 7


def test_it_starts_again_and_keeps_all_logs(launch):
    script = "print('attempt', A)\nif A < 2 and I == 1: raise ValueError(A)\nif A < 2: " + WAIT
    preamble = JOINED.replace('tell("joined")', 'tell("joined") if A == 2 else None')
    code, out, err, results = launch(
        script, "--processes", 2, "--max-restarts", 2, preamble=preamble
    )
    assert code == 0, err
    assert "restart 1 of 2" in err and "restart 2 of 2" in err
    for attempt in range(3):
        for i in range(2):
            log = results / f"attempt-{attempt}" / f"process-{i}.log"
            assert log.read_text().startswith(f"attempt {attempt}") or attempt < 2
    names = [event["event"] for event in events_of(results)]
    assert names.count("started") == 6 and names.count("restarted") == 2
    assert events_of(results, "ended")[-1]["code"] == 0
    assert {"time", "attempt", "event", "process", "code", "step"} <= set(events_of(results)[0])


#: What one process does at each attempt, the number of attempts, and why there is no other.
RESTARTS = {
    "the same error": (
        "raise ValueError('mine')",
        2,
        "the same error twice, without a new checkpoint",
    ),
    "another error": ("raise ValueError(A)", 4, "--max-restarts is 3"),
    "differs": ("os._exit(77)", 1, "no restart helps after 77"),
    "cannot start": ("os._exit(78)", 1, "no restart helps after 78"),
    "usage": ("os._exit(2)", 1, "no restart helps after 2"),
    "killed": ("os.kill(os.getpid(), 9)", 4, "--max-restarts is 3"),
    "preempted": ("os._exit(75 if A < 6 else 0)", 7, None),
    "progress": (
        "tell('committed', step=A)\nif A < 8: os.kill(os.getpid(), 9)",
        9,
        None,
    ),
    "the same error with progress": (
        "tell('committed', step=A)\nif A < 8: raise ValueError('mine')",
        9,
        None,
    ),
}


@pytest.mark.parametrize("name", RESTARTS)
def test_restarts_are_bounded_and_only_where_they_help(name, launch):
    how, attempts, why = RESTARTS[name]
    code, _, err, results = launch(how, "--processes", 1, "--max-restarts", 3)
    assert len(events_of(results, "started")) == attempts, err
    assert (code == 0) == (why is None)
    assert why is None or f"[launch] not restarted: {why}; exit code {code}" in err
    if name == "progress":
        assert "[launch]   killed by SIGKILL, as happens when memory runs out" in err
        assert "[launch] restart 1 of 3; the last checkpoint reported is step 1\n" in err
    if name == "preempted":
        assert "[launch] another attempt, not counted as a restart" in err


def test_what_it_said_last_is_told(launch, tmp_path, capfd):
    """Where it has ended without a Python error, as with `sys.exit("text")`."""
    *_, err, _ = launch("sys.exit('no such data')", "--processes", 1)
    assert "[launch]   exit code 1, without an error; its last line: no such data\n" in err
    argv = ["--processes", "1", "--result-dir", str(tmp_path / "r"), "-m", "no_such_module"]
    assert launcher.main(argv) == 1
    assert "without an error; its last line: " in (err := capfd.readouterr().err)
    assert "No module named no_such_module\n" in err


def test_a_script_that_does_not_join_is_an_error_of_the_job(launch):
    script = "import os, time\nif os.environ['DISTJAX_PROCESS_ID'] == '1': time.sleep(60)"
    code, _, err, _ = launch("print(1)", "--processes", 2, preamble="")
    assert code == 78
    assert "[launch]   each process of a job of 2 needs to join it." in err
    assert "without a call of dj.initialize" in err
    assert "Why: each would train a model of its own" in err and "Fix: dj.initialize()" in err
    assert launch(script, "--processes", 2, preamble="")[0] == 78
    assert launch(script, "--processes", 1, preamble="")[0] == 0


def test_an_earlier_launch_is_put_aside(launch):
    launch("print('first'); sys.exit(3)", "--processes", 1)
    *_, results = launch("print('second')", "--processes", 1)
    assert (results / "before-0/attempt-0/process-0.log").read_text() == "first\n"
    assert (results / "before-0/failure.json").exists()
    assert (results / "attempt-0/process-0.log").read_text() == "second\n"
    assert not (results / "failure.json").exists()
    assert [e["code"] for e in events_of(results, "ended")] == [0]
    assert [e["code"] for e in events_of(results / "before-0", "ended")] == [3]


def test_without_a_directory_there_is_one_while_something_failed(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(launcher.tempfile, "tempdir", str(tmp_path))
    script = tmp_path / "script.py"
    script.write_text("import sys; sys.exit(int(sys.argv[1]))")
    assert launcher.main(["--processes", "1", str(script), "0"]) == 0
    assert list(tmp_path.iterdir()) == [script]
    assert launcher.main(["--processes", "1", str(script), "3"]) == 3
    (kept,) = set(tmp_path.iterdir()) - {script}
    assert (kept / "attempt-0/process-0.log").exists()
    assert f"logs: {kept}/attempt-0/process-0.log" in capfd.readouterr().err
    shutil.rmtree(kept)
    script.write_text("import os, signal; os.kill(os.getppid(), signal.SIGTERM); signal.pause()")
    assert launcher.main(["--processes", "1", str(script)]) == 143
    assert list(tmp_path.iterdir()) == [script]


# -- signals ---------------------------------------------------------------------

READY = JOINED + "print('ready')\n"


def run_and_send(tmp_path, script, numbers, num_processes=1, **options):
    """Runs a script and, once all have said "ready", sends signals to this process."""
    (tmp_path / "script.py").write_text(script)
    ready, heard, said = threading.Semaphore(0), threading.Semaphore(0), []

    def show(index, line):
        said.append(line)
        if line == b"ready":
            ready.release()

    def say(text):
        said.append(text.encode())
        heard.release()

    def send():
        for _ in range(num_processes):
            ready.acquire()
        for number in numbers:
            os.kill(os.getpid(), number)
            heard.acquire()

    one = Options((str(tmp_path / "script.py"),), num_processes, **options)
    launched = Launcher(one, str(tmp_path), show, say)
    thread = threading.Thread(target=send)
    with signals_to(launched.queue):
        thread.start()
        code = launched.run()
        heard.release(2)
        thread.join()
    return code, b"\n".join(said).decode()


def test_sigterm_lets_them_save(tmp_path):
    """75 after SIGTERM to the launcher is the end, whatever --max-restarts says."""
    script = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
    script += READY + "signal.pause()"
    code, said = run_and_send(tmp_path, script, [signal.SIGTERM], 2, max_restarts=3)
    assert code == 75 and "SIGTERM: the processes have 30 s to save and end" in said


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_process_that_does_not_save_dies_of_it(tmp_path, number, code):
    assert run_and_send(tmp_path, READY + "signal.pause()", [number], max_restarts=3)[0] == code


def test_a_process_that_ignores_sigterm_is_killed(tmp_path):
    script = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY
    script += "while True: signal.pause()"
    code, _ = run_and_send(tmp_path, script, [signal.SIGTERM], grace_seconds=0.2)
    assert code == 143
    code, _ = run_and_send(tmp_path, script, [signal.SIGINT, signal.SIGINT], grace_seconds=60)
    assert code == 130


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids, seconds=10):
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        threading.Event().wait(0.02)
    return left


CHILD = """
import subprocess
wait = "import time; print('ready', flush=True); time.sleep(99)"
child = subprocess.Popen([sys.executable, "-c", wait])
print(os.getpid(), child.pid, flush=True)
"""


def test_what_a_process_has_started_ends_with_it(launch):
    _, out, _, _ = launch(CHILD + "sys.exit(3)", "--processes", 2)
    pids = [int(x) for line in out.splitlines() if "ready" not in line for x in line[4:].split()]
    assert len(pids) >= 2 and not wait_until_gone(pids)


def test_nobody_is_left_when_the_launcher_is_killed(tmp_path):
    (tmp_path / "script.py").write_text(JOINED + CHILD + "signal.pause()")
    command = [sys.executable, "-m", "distjax", "launch", "--processes", "2"]
    command += ["--result-dir", str(tmp_path / "r"), str(tmp_path / "script.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        lines = [started.stdout.readline() for _ in range(4)]
        started.kill()
    pids = [int(x) for line in lines if "ready" not in line for x in line[4:].split()]
    assert len(pids) == 4 and not wait_until_gone(pids), lines


def test_it_works_as_process_1(tmp_path):
    """Of a container: it ends with the job's code, and is told to stop."""
    inside = ["unshare", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], check=False).returncode:
        pytest.skip("no user namespaces here")
    script = "import os; print(p := os.getppid(), os.getpgid(p), flush=True); os._exit(3)"
    (tmp_path / "script.py").write_text(script)
    command = [*inside, sys.executable, "-m", "distjax", "launch", "--processes", "1"]
    command += ["--result-dir", str(tmp_path / "r"), str(tmp_path / "script.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 3, ended.stderr
    launcher_pid, group = ended.stdout.removeprefix("[0] ").split()
    assert launcher_pid == group != "1"  # a Ctrl-C at the terminal comes through process 1 alone


# -- bad input -------------------------------------------------------------------

#: Arguments, and what the error says.
BAD = {
    "no count": (["s.py"], "--processes", "are required"),
    "no number": (["--processes", "x", "s.py"], "argument --processes: invalid int value: 'x'", ""),
    "none": (["--processes", "0", "s.py"], "Got: --processes 0, which is at least 1", ""),
    "unknown": (["--processes", "1", "--restarts", "1", "s.py"], "--restarts", "its options as"),
    "negative": (
        ["--processes", "1", "--grace-seconds=-1", "s.py"],
        "Got: --grace-seconds -1.0, which is at least 0",
        "",
    ),
    "no script": (["--processes", "1"], "Got: no script, and no -m with a module behind it", ""),
    "missing": (["--processes", "1", "gone.py"], "'gone.py', which does not exist in ", "Fix: "),
    "half a module": (["--processes", "1", "-m"], "no -m with a module behind it", ""),
    "after": (
        ["--processes", "1", "s.py", "--max-restarts", "3"],
        "Got: --max-restarts after the script",
        "a script's option that the launcher has, too: train.py -- --dry-run",
    ),
    "rank": (
        ["--processes", "1", "--nodes", "2", "--node-rank", "2", "s.py"],
        "Got: --node-rank 2 of 2, counted from 0",
        "",
    ),
    "no address": (
        ["--processes", "1", "--nodes", "2", "s.py"],
        "Got: --nodes 2 without --coordinator, where process 0 listens",
        "",
    ),
    "no port": (
        ["--processes", "1", "--coordinator", "host", "s.py"],
        "Got: --coordinator 'host'.",
        "Fix: distjax launch --processes 2 train.py",
    ),
    "unresolvable": (
        ["--processes", "1", "--coordinator", "no-such-host.invalid:1", "s.py"],
        "Got: --coordinator 'no-such-host.invalid:1', which is not found: ",
        "as `hostname -I` prints it on that of rank 0",
    ),
    "no folder": (
        ["--processes", "1", "--result-dir", "s.py", "s.py"],
        "a --result-dir in which it can write",
        "Got: 's.py' (",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_an_error_of_usage(name, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").write_text("")
    argv, *texts = BAD[name]
    with pytest.raises(SystemExit) as ended:
        launcher.main(argv)
    err = capfd.readouterr().err
    assert ended.value.code == 2
    assert all(text in err for text in texts), err
    assert all(part in err for part in ("  Got: ", "  Why: ", "  Fix: "))


def test_options_of_the_script_are_its_own(launch):
    code, out, _, _ = launch(
        "print(sys.argv[1:])", "--processes", 1, arguments=["--", "--dry-run", "--", "x"]
    )
    assert (code, out) == (0, "[0] ['--dry-run', '--', 'x']\n")


def test_a_module_and_several_machines_in_a_dry_run(tmp_path, capfd):
    options = ["--processes", "2", "--nodes", "2", "--node-rank", "1", "--coordinator", "[::1]:99"]
    argv = [*options, "--dry-run", "-m", "json.tool", "--sort-keys"]
    assert launcher.main(argv) == 0
    first, second = capfd.readouterr().out.splitlines()
    assert "DISTJAX_COORDINATOR='[::1]:99' DISTJAX_NUM_PROCESSES=4 DISTJAX_PROCESS_ID=2" in first
    assert "DISTJAX_PROCESS_ID=3" in second and second.endswith(" -m json.tool --sort-keys")


@pytest.mark.parametrize("nodes", [1, 2])
def test_process_0_tells_other_machines_what_has_failed(nodes, launch):
    script = "if I == 1: sys.exit(70)\ntime.sleep(0.5)\nprint('told them')\n"
    options = ("--processes", 2, "--nodes", nodes, "--coordinator", "127.0.0.1:9")
    code, out, _, _ = launch(script, *options)
    assert code == 70 and ("[0] told them\n" in out) == (nodes == 2)


def test_each_machine_has_its_own_folder(launch):
    options = ("--processes", 1, "--nodes", 2, "--node-rank", 1, "--coordinator", "127.0.0.1:9")
    _, _, _, results = launch("", *options)
    assert (results / "node-1/attempt-0/process-1.log").exists()


# -- parts -----------------------------------------------------------------------


def test_the_last_error_of_a_log(tmp_path):
    path = tmp_path / "log"
    first = "Traceback (most recent call last):\n  File 'a'\nKeyError: 1\n\nDuring handling\n\n"
    last = "Traceback (most recent call last):\n  File 'b'\n    f()\nmine.Odd: two\n"
    path.write_text(first + last + "[Gloo] said\n")
    assert last_words(str(path)) == ("mine.Odd: two", last.rstrip())
    path.write_text('  File "s.py", line 1\n    x = \n       ^\nSyntaxError: invalid syntax\n')
    assert last_words(str(path))[0] == "SyntaxError: invalid syntax"
    path.write_text(f"all is well\n{'x' * 300}\n\n")
    assert last_words(str(path)) == ("x" * 197 + "...", "")
    assert last_words(str(tmp_path / "none")) == ("", "")


def test_a_process_that_was_frozen_is_named():
    ended = [Ended(0, 134), Ended(2, 134), Ended(1, 137, "stopped")]
    logs = {0: "a.log", 1: "b.log", 2: "c.log"}
    failure = find_cause(0, Options(("s.py",), 3), logs, [], ended)
    assert isinstance(failure, Failure) and (failure.process, failure.code) == (1, 71)
    assert failure.error.startswith("process 1 needs to answer the others.\n  Got: nothing more")
    assert "which was stopped" in failure.error and "look at its log, b.log" in failure.error


def test_who_is_lost_on_another_machine_is_named():
    """By the process that has heard of it, not by the first that met a broken connection."""
    names = "process 1 needs all processes.\n  Got: the end of process 3 on b: ValueError: mine"
    texts = enumerate(["Gloo all-reduce failed", names])
    told = [
        {"event": "failed", "process": i, "code": 71, "error": text, "time": i}
        | {"traceback": "", "step": None}
        for i, text in texts
    ]
    options, ended = Options(("s.py",), 2, nodes=2), [Ended(0, 71), Ended(1, 71)]
    failure = find_cause(0, options, {0: "a.log", 1: "b.log"}, told, ended)
    assert (failure.process, failure.code) == (1, 71) and "ValueError: mine" in failure.error


def test_who_ended_early_comes_before_what_differs():
    """`sys.exit(3)` on one process: the other finds that they differ, and says so first."""
    text = "processes need to do the same.\n  Got: the end of the program on process 1"
    told = [
        {"event": "failed", "process": i, "code": code, "error": text, "time": i}
        | {"traceback": "", "step": None}
        for i, code in enumerate([77, 3])
    ]
    ended = [Ended(0, 77), Ended(1, 3)]
    failure = find_cause(0, Options(("s.py",), 2), {0: "a.log", 1: "b.log"}, told, ended)
    assert (failure.process, failure.code) == (1, 3)


def test_who_waits_in_vain_comes_before_those_that_hear_of_it():
    texts = "the end needs all.\n  Got: process 1 did not come", "Got: the end of process 0"
    told = [
        {"event": "failed", "process": i, "code": 71, "error": text, "time": i}
        | {"traceback": "", "step": None}
        for i, text in enumerate(texts)
    ]
    ended = [Ended(1, 71), Ended(0, 71)]
    failure = find_cause(0, Options(("s.py",), 2), {0: "a.log", 1: "b.log"}, told, ended)
    assert failure.process == 0


def test_a_signal_ends_a_wait():
    events = queue.SimpleQueue()
    with signals_to(events):
        os.kill(os.getpid(), signal.SIGTERM)
        assert events.get(timeout=5) == signal.SIGTERM


def test_a_signal_that_is_ignored_stays_so():
    """As `nohup` asks."""
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_to(events := queue.SimpleQueue()):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            assert events.get(timeout=5) == signal.SIGTERM
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)


def test_a_command_that_is_unknown():
    ended = subprocess.run(
        [sys.executable, "-m", "distjax", "lunch"], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert "distjax needs one of its commands: launch, plan, info, doctor." in ended.stderr


def test_help_lists_the_commands():
    ended = subprocess.run(
        [sys.executable, "-m", "distjax", "--help"], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0 and not ended.stderr
    assert ended.stdout.startswith("usage: distjax COMMAND") and "  doctor  check" in ended.stdout
