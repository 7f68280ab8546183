"""Random faults of launched trainings, and a table: python -m tests.drills.faults [options].

Each run is digits on 3 processes with restarts. It has one fault, and ends with the numbers of an
undisturbed run, to the bit. Where the launcher itself ends, it is started again, once.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from tests.processes.warm import outside_of_jobs

SCRIPT = pathlib.Path(__file__).with_name("survivor.py")
RUN_SECONDS = 150.0
NUM_STEPS, SAVE_EVERY = 24, 3  # of the script

#: Faults, and the moments at which they can happen.
KINDS = {
    "kill": ("start", "compilation", "step", "save"),
    "stop": ("start", "compilation", "step", "save"),
    "term": ("start", "compilation", "step", "save"),
    "exception": ("start", "compilation", "step", "save"),
    "callback": ("step",),
    "loop": ("step", "save"),
    "disk": ("step", "save"),
}


def draw_fault(draw: random.Random) -> dict[str, Any]:
    """Returns a fault: its kind, when it happens, and to which process; -1 is the launcher."""
    kind = draw.choice(list(KINDS))
    moment = draw.choice(KINDS[kind])
    step = {"step": draw.randrange(NUM_STEPS - 1), "save": SAVE_EVERY * draw.randint(1, 7)}
    process = draw.randrange(3)
    if draw.random() < 0.15:
        kind, moment, process = draw.choice(["kill", "term"]), "step", -1
    fault = {"kind": kind, "moment": moment, "process": process, "step": step.get(moment, 0)}
    return fault | {"delay": draw.choice([0, draw.uniform(0, 0.05), draw.uniform(0, 0.5)])}


class Failure(Exception):
    """A run is not as it should be: what was seen."""


def launch(folder: pathlib.Path, fault: dict[str, Any], shared: pathlib.Path) -> int:
    """Runs the launcher once; kills it if it is the one that has the fault."""
    (folder / "report").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "distjax", "launch", "--processes", "3"]
    command += ["--max-restarts", "3", "--result-dir", str(folder / "results"), str(SCRIPT)]
    command += [str(folder / "checkpoints"), str(folder / "report"), json.dumps(fault)]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(shared / "programs"), "JAX_NUM_CPU_DEVICES": "1"}
    with open(folder / "said", "ab") as said:
        started = subprocess.Popen(command, env=outside_of_jobs() | cache, stdout=said, stderr=said)
        try:
            if fault["process"] == -1 and not (folder / "report/fault").exists():
                wait_for_step(folder, fault["step"], started)
                threading.Event().wait(fault["delay"])
                (folder / "report/fault").write_text(str(time.time()))
                started.send_signal(signal.SIGKILL if fault["kind"] == "kill" else signal.SIGTERM)
            return started.wait(RUN_SECONDS)
        except subprocess.TimeoutExpired:
            started.kill()
            raise Failure(f"it runs on\n{tail(folder)}") from None


def wait_for_step(folder: pathlib.Path, step: int, started: subprocess.Popen[bytes]) -> None:
    while started.poll() is None:
        if any(line.get("step", -1) >= step for line in lines_of(folder, 0)):
            return
        threading.Event().wait(0.02)


def lines_of(folder: pathlib.Path, process: int) -> list[dict[str, Any]]:
    path = folder / "report" / f"process-{process}.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def events_of(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the events of all launches, in order."""
    paths = (folder / "results").glob("**/events.jsonl")
    events = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return sorted(events, key=lambda event: event["time"])


def tail(folder: pathlib.Path) -> str:
    return (folder / "said").read_text(errors="replace")[-5000:]


def run(seed: int, shared: pathlib.Path, expected: dict[str, Any]) -> str:
    """Returns a line of the table.

    Raises:
      Failure: the numbers are others, a step is lost, or a process is left.
    """
    fault = draw_fault(random.Random(seed))
    with tempfile.TemporaryDirectory(prefix="distjax-drill-") as name:
        folder = pathlib.Path(name)
        codes = [launch(folder, fault, shared)]
        if codes[0] != 0:
            codes.append(launch(folder, fault, shared))
        if codes[-1] != 0:
            raise Failure(f"{fault}: the codes are {codes}\n{tail(folder)}")
        result = json.loads((folder / "report/result.json").read_text())
        if result != expected:
            raise Failure(f"{fault}: {result['applied']} steps, or other weights\n{tail(folder)}")
        require_no_loss(folder)
        require_nobody(folder)
        struck = float((folder / "report/fault").read_text())
        events, steps = events_of(folder), [line["time"] for line in lines_of(folder, 0)]
        others = {line["attempt"] for line in lines_of(folder, 0)}
        again = [e["time"] for e in events if e["event"] == "started" and e["time"] > struck]
        since = min(again, default=struck)  # it may have come to its end all the same
        seconds = min([time for time in steps if time > since], default=struck) - struck
        cold = min(steps) - min(e["time"] for e in events if e["event"] == "started")
        is_cold = fault["moment"] in ("step", "save")  # the first start came as far as a step
    who = "launcher" if fault["process"] == -1 else f"process {fault['process']}"
    moment = f"{fault['moment']} {fault['step']}"
    return (
        f"{seed:6}  {fault['kind']:9}  {moment:14}  {who:9}  {since - struck:5.1f}  "
        f"{seconds:7.1f}  {f'{cold:.1f}' if is_cold else '':>5}  "
        f"{max(others) + len(codes):8}  {codes}"
    )


def require_no_loss(folder: pathlib.Path) -> None:
    """Raises a Failure if an attempt began before a step that was complete."""
    complete = 0
    for event in events_of(folder):
        if event["event"] == "committed":
            complete = max(complete, event["step"])
        elif event["event"] == "restored" and event["step"] < complete:
            raise Failure(f"step {complete} was complete, and {event['step']} was restored")


def require_nobody(folder: pathlib.Path) -> None:
    """Raises a Failure if a process of the run is left."""
    pids = {event["pid"] for event in events_of(folder) if event["event"] == "started"}
    deadline = time.monotonic() + 5
    while left := [pid for pid in pids if is_ours(pid)]:
        if time.monotonic() > deadline:
            raise Failure(f"processes {left} are left")
        threading.Event().wait(0.05)


def is_ours(pid: int) -> bool:
    try:
        return b"survivor" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def undisturbed(shared: pathlib.Path) -> tuple[dict[str, Any], float]:
    """Returns what comes out of a run without a fault, and the seconds up to its first step."""
    fault = {"kind": "none", "moment": "", "process": 9, "step": 0, "delay": 0}
    for _ in range(2):  # the first one compiles
        with tempfile.TemporaryDirectory(prefix="distjax-drill-") as name:
            folder = pathlib.Path(name)
            if launch(folder, fault, shared) != 0:
                raise Failure(tail(folder))
            result = json.loads((folder / "report/result.json").read_text())
            began = min(event["time"] for event in events_of(folder))
            seconds = lines_of(folder, 0)[0]["time"] - began
    return result, seconds


def main() -> None:
    """Runs the drills; ends with 1 if one of them failed."""
    global RUN_SECONDS
    parser = argparse.ArgumentParser(prog="python -m tests.drills.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first fault (0)")
    parser.add_argument("--faults", type=int, default=30, help="how many (30)")
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side (1)")
    parser.add_argument("--seconds", type=float, default=150, help="of a launch, at most (150)")
    options = parser.parse_args()
    RUN_SECONDS, failures = options.seconds, 0
    with tempfile.TemporaryDirectory(prefix="distjax-drills-") as name:
        shared = pathlib.Path(name)
        expected, cold = undisturbed(shared)
        print(f"a cold start takes {cold:.1f} s to its first step; faults: {', '.join(KINDS)}")
        print("seconds from the fault to the next start, to its first step; of the first start")
        print(
            f"{'seed':>6}  {'fault':9}  {'moment':14}  {'where':9}  start     step   cold  "
            "attempts  codes"
        )
        seeds = range(options.seed, options.seed + options.faults)

        def one(seed: int) -> tuple[bool, str]:
            try:
                return True, run(seed, shared, expected)
            except Failure as failure:
                return False, f"{seed:6}  FAILED  {failure}"

        with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
            for is_well, line in pool.map(one, seeds):
                failures += not is_well
                print(line, flush=True)
    print(f"{options.faults} faults, {failures} failed")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
