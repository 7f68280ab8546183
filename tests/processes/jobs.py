"""Runs a script as the processes of a job, on loopback, and waits for them within bounds."""

import contextlib
import dataclasses
import os
import pathlib
import random
import signal
import socket
import subprocess
import tempfile
import time

from tests.processes.warm import outside_of_jobs, starter

#: What each script begins with: where the job meets, and which process it is.
PREAMBLE = """\
import os, sys
ADDRESS, P, I = os.environ["TEST_ADDRESS"], int(os.environ["TEST_P"]), int(os.environ["TEST_I"])
"""

#: Programs are compiled once for all jobs, and kept between runs.
KEPT_PROGRAMS = {
    "jax_compilation_cache_dir": os.environ.get("DISTJAX_TESTS_PROGRAMS"),
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_compilation_cache_include_metadata_in_key": False,  # scripts lie in new folders
}


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended, and what it said on stdout and stderr."""

    code: int
    said: str


#: Ports below those that a system gives to outgoing connections (from 32768 on Linux).
_PORTS = range(15_000, 32_000)
#: Ports that are taken, each by a socket that does not listen.
_taken: list[socket.socket] = []


def free_address():
    """Returns an address on loopback that is ours: nobody else listens there before we do.

    Between the choice of a port and the moment when process 0 listens, an outgoing connection may
    be given it, or other tests may choose it. So it is none of those that are given, and a socket
    is bound to it until this process ends: it does not listen, so that another socket that may
    reuse addresses (the roll call's, gRPC's) is bound beside it.
    """
    draw = random.SystemRandom()
    while True:
        held = socket.socket()
        try:
            held.bind(("127.0.0.1", draw.choice(_PORTS)))
        except OSError:  # of another program
            held.close()
            continue
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _taken.append(held)
        return f"127.0.0.1:{held.getsockname()[1]}"


def job_environment(devices):
    """Returns our variables without those of a job, for processes of so many CPU devices."""
    return outside_of_jobs() | {"JAX_NUM_CPU_DEVICES": str(devices)}


def run_job(script, ids=(0, 1), *, num_processes=None, devices=1, environment=None, seconds=60):
    """Runs `script` as one process for each of `ids`, all at once, and returns how they ended.

    Args:
      script: Python; ADDRESS, P and I are the address, the number of processes and the id.
      ids: what I is in each process.
      num_processes: what P is; None: as many as `ids`.
      devices: CPU devices of each process.
      environment: variables added to ours.
      seconds: after which every process that runs is killed.
    """
    ours = job_environment(devices)
    ours |= {"TEST_ADDRESS": free_address(), "TEST_P": str(num_processes or len(ids))}
    ours |= environment or {}
    settings = {"jax_num_cpu_devices": devices, **KEPT_PROGRAMS}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="distjax-tests-"))
        path = pathlib.Path(folder, "script.py")
        path.write_text(PREAMBLE + script)
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in ids]
        started = []
        stack.callback(kill_all, started)
        for i, output in zip(ids, outputs, strict=True):
            files = [output.fileno()] * 2
            own = {**ours, "TEST_I": str(i)}
            started.append(starter().start(path, environment=own, settings=settings, files=files))
        deadline = time.monotonic() + seconds
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):  # killed, its code is -9
                process.wait(max(deadline - time.monotonic(), 0.01))
        kill_all(started)
        for output in outputs:
            output.seek(0)
        return [
            Ended(process.returncode, output.read().decode(errors="replace"))
            for process, output in zip(started, outputs, strict=True)
        ]


def kill_all(processes):
    """Ends what still runs of `processes`."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
