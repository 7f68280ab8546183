"""A training is killed at random moments, goes on each time, and ends as if nothing had been."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tests.drills import training
from tests.drills.training import NUM_EXAMPLES, NUM_STEPS
from tests.processes.jobs import free_address, kill_all
from tests.processes.warm import Forked, outside_of_jobs, starter

#: Processes and devices of each: of the runs that are killed, and where they may go on.
KILLED = ((2, 2), (4, 1))
ALONE = (1, 4)
ANYWHERE = (*KILLED, ALONE, (2, 1), (1, 2))
KILLS_OF_A_RUN = 5
#: How long a run may take to its end, and its other processes after one was killed.
RUN_SECONDS, LEAVE_SECONDS = 300.0, 60.0
#: How far weights may be from those of other numbers of processes, beside the greatest of them:
#: numbers of 32 bits, and of 64.
TOLERANCES = {False: 1e-6, True: 1e-12}


_undisturbed = threading.Lock()


class Failure(Exception):
    """A run is not as it should be: what was seen."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the launches of a training are.

    Attributes:
      checkpoints: their directory.
      shared: a folder of compiled programs and undisturbed runs, which drills share.
      is_wide: whether numbers have 64 bits.
    """

    checkpoints: pathlib.Path
    shared: pathlib.Path
    is_wide: bool


@dataclasses.dataclass(frozen=True)
class Row:
    """One kill: a line of the table."""

    seed: int
    shape: str
    moment: str
    result: str = "killed"


class Run:
    """The processes of one launch, and what process 0 has said so far.

    Args:
      shape: processes, and devices of each.
      place: of checkpoints and compiled programs.
    """

    def __init__(self, shape: tuple[int, int], place: Place):
        num_processes, devices = shape
        self._shape = shape
        settings = {
            "jax_num_cpu_devices": devices,
            "jax_enable_x64": place.is_wide,
            "jax_compilation_cache_dir": str(place.shared / "programs"),
            "jax_persistent_cache_min_compile_time_secs": 0.0,
        }
        environment = {}
        if num_processes > 1:
            environment["DISTJAX_COORDINATOR"] = free_address()
            environment["DISTJAX_NUM_PROCESSES"] = str(num_processes)
        self.said: list[dict[str, Any]] = []
        self._errors = [tempfile.TemporaryFile() for _ in range(num_processes)]
        self.processes: list[Forked] = []
        self._stdout, theirs = os.pipe()
        with open(theirs, "wb") as stdout, open(os.devnull, "wb") as nowhere:
            for i, errors in enumerate(self._errors):
                files = [(nowhere if i else stdout).fileno(), errors.fileno()]
                own = environment | {"DISTJAX_PROCESS_ID": str(i)} if environment else {}
                self.processes.append(
                    starter().start(
                        training.__file__,
                        [str(place.checkpoints)],
                        environment=outside_of_jobs() | own,
                        settings=settings,
                        files=files,
                    )
                )
        self._deadline = time.monotonic() + RUN_SECONDS
        self._rest = b""

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        kill_all(self.processes)
        os.close(self._stdout)
        for file in self._errors:
            file.close()

    def listen(self, until: float | None = None) -> Iterator[dict[str, Any]]:
        """Yields what process 0 says, up to its end or a moment of `time.monotonic`."""
        until = self._deadline if until is None else until
        while (seconds := until - time.monotonic()) > 0:
            if not select.select([self._stdout], [], [], seconds)[0]:
                continue
            read = os.read(self._stdout, 1 << 16)
            if not read:
                return
            *lines, self._rest = (self._rest + read).split(b"\n")
            for line in filter(_is_ours, lines):
                self.said.append(json.loads(line))
                yield self.said[-1]

    def end(self, seconds: float) -> list[int]:
        """Waits for every process, and returns their exit codes.

        Raises:
          Failure: one runs on.
        """
        for _ in self.listen(time.monotonic() + seconds):
            pass
        deadline = time.monotonic() + seconds
        for i, process in enumerate(self.processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.01))
            if process.poll() is None:
                raise Failure(f"process {i} runs on\n{self.errors()}")
        return [process.returncode for process in self.processes]

    def errors(self) -> str:
        """What the processes wrote on stderr, the end of it."""
        texts = []
        for i, file in enumerate(self._errors):
            file.seek(0)
            texts.append(f"-- process {i}:\n" + file.read().decode(errors="replace")[-3000:])
        return "\n".join(texts)

    def latest(self, name: str, default: int = 0) -> int:
        """The latest of what process 0 said under a name."""
        return max((said[name] for said in self.said if name in said), default=default)


def drill(
    seed: int,
    shared: pathlib.Path,
    shapes: Sequence[tuple[int, int]] = (),
    is_wide: bool | None = None,
) -> Iterator[Row]:
    """Yields a row for each kill of one training, and one for its end.

    Args:
      seed: of all that is drawn.
      shared: a folder of compiled programs and undisturbed runs, which drills share.
      shapes: of its launches, all but the last of which are killed; none: drawn.
      is_wide: whether numbers have 64 bits; None: drawn.

    Raises:
      Failure: a step is lost or done twice, or the numbers are others.
    """
    draw = random.Random(seed)
    first, *others = shapes = shapes or _draw_shapes(draw)
    is_wide = draw.random() < 0.5 if is_wide is None else is_wide
    is_exact = all(shape == first for shape in others)
    with tempfile.TemporaryDirectory(prefix="distjax-drill-") as directory:
        place = Place(pathlib.Path(directory), shared, is_wide)
        for shape in shapes[:-1]:
            yield Row(seed, _name(shape), kill_once(draw, shape, place))
        result = run_to_the_end(shapes[-1], place)
    expected = undisturbed(first if is_exact else ALONE, place)
    tolerance = 0.0 if is_exact else TOLERANCES[is_wide]
    require_equal(result, expected, tolerance)
    verdict = "to the bit" if is_exact else f"to {tolerance:.0e}"
    yield Row(seed, _name(shapes[-1]), f"to the end, {64 if is_wide else 32} bits", verdict)


def _draw_shapes(draw: random.Random) -> list[tuple[int, int]]:
    """Shapes of the launches: all the same, or each another one; the last is not killed."""
    shapes = [draw.choice(KILLED)]
    changes = draw.random() < 0.5
    for left in reversed(range(KILLS_OF_A_RUN)):
        others = [shape for shape in (KILLED if left else ANYWHERE) if shape != shapes[-1]]
        shapes.append(draw.choice(others) if changes else shapes[-1])
    return shapes


def undisturbed(shape: tuple[int, int], place: Place) -> dict[str, Any]:
    """What comes out of a run that nobody kills; it runs once for all drills."""
    found = place.shared / f"undisturbed-{_name(shape)}-{place.is_wide}.json"
    with _undisturbed:
        if not found.exists():
            with tempfile.TemporaryDirectory(prefix="distjax-drill-") as directory:
                elsewhere = dataclasses.replace(place, checkpoints=pathlib.Path(directory))
                found.write_text(json.dumps(run_to_the_end(shape, elsewhere)))
        return json.loads(found.read_text())


def _is_ours(line: bytes) -> bool:
    return line.startswith(b"{")  # gloo talks on stdout too


def _name(shape: tuple[int, int]) -> str:
    return "x".join(map(str, shape))


def kill_once(draw: random.Random, shape: tuple[int, int], place: Place) -> str:
    """Launches the training, kills one of its processes, and returns when that was.

    Raises:
      Failure: it did not go on where the last complete step was, or a survivor ended well.
    """
    complete = complete_steps(place.checkpoints)
    victim = draw.randrange(shape[0])
    # Two lines a step: up to the middle of what is left, so that there is more to kill.
    num_lines = draw.randint(0, NUM_STEPS - max(complete, default=0))
    delay = draw.uniform(0, 0.1)
    with Run(shape, place) as run:
        for _ in run.listen():
            if len(run.said) > num_lines:
                break
        for _ in run.listen(time.monotonic() + delay):
            pass
        process = run.processes[victim]
        was_running = process.poll() is None
        process.send_signal(signal.SIGKILL)
        codes = run.end(LEAVE_SECONDS)
        require_resumed(run, complete)
        is_killed = was_running and codes[victim] == -signal.SIGKILL
        others = codes[:victim] + codes[victim + 1 :]
        if is_killed and 0 in others and run.latest("committed") < NUM_STEPS:
            raise Failure(f"a process ended with 0, the codes are {codes}\n{run.errors()}")
        committed, steps = run.latest("committed"), complete_steps(place.checkpoints)
        if committed > max(steps, default=0):
            raise Failure(f"step {committed} was complete, there are {steps}")
        moment = f"process {victim}, {delay * 1000:.0f} ms after step {run.latest('step')}"
        return f"{moment}, codes {codes}"


def run_to_the_end(shape: tuple[int, int], place: Place) -> dict[str, Any]:
    """Launches the training, and returns what came out.

    Raises:
      Failure: it did not end well, or has lost a step or an example, or done one twice.
    """
    complete = complete_steps(place.checkpoints)
    with Run(shape, place) as run:
        for _ in run.listen():
            pass
        codes = run.end(LEAVE_SECONDS)
        if any(codes):
            raise Failure(f"the codes are {codes}\n{run.errors()}")
        require_resumed(run, complete)
        result = run.said[-1]
    counts = {"applied": NUM_STEPS, "seen": NUM_EXAMPLES, "used": [1]}
    found = {name: result[name] for name in counts}
    if found != counts:
        raise Failure(f"{found} instead of {counts}")
    return result


def require_resumed(run: Run, complete: list[int]) -> None:
    """Raises a Failure unless the run began after the latest complete step."""
    for said in run.said:
        if "restored" in said:
            latest = max(complete, default=0)
            if {said["restored"], said["applied"]} != {latest}:
                raise Failure(f"complete steps {complete}, and it began with {said}")


def require_equal(result: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """Raises a Failure unless the weights are those of the undisturbed run."""
    found, wanted = (np.array([*map(float.fromhex, x["weights"])]) for x in (result, expected))
    difference = np.abs(found - wanted).max() / np.abs(wanted).max()
    if not difference <= tolerance:
        raise Failure(f"the weights are {difference} away from those of an undisturbed run")


def complete_steps(directory: pathlib.Path) -> list[int]:
    """The steps in a directory of checkpoints."""
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())
