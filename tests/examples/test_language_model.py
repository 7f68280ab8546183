"""The language model: killed, resumed elsewhere, and still the same."""

import os
import signal

import pytest

from tests.examples.scripts import last_line, lines_of, start
from tests.processes.jobs import kill_all

#: In one worker, which makes the run that nobody kills once.
pytestmark = pytest.mark.xdist_group("examples language model")

SCRIPT = "language_model/train.py"
SMALL = [
    *("--steps", "12", "--global-batch", "8", "--context", "16", "--width", "16"),
    *("--layers", "1", "--dropout", "0", "--log-every", "1", "--sample", "8"),
]


def loss_in(line: str) -> float:
    """The number in the last line of a run."""
    _, _, rest = line.partition("test loss ")
    return float(rest.split()[0])


@pytest.fixture(scope="module")
def uninterrupted() -> float:
    """The test loss of a run that nobody kills."""
    return loss_in(last_line(SCRIPT, *SMALL, "--strategy", "one_device"))


@pytest.mark.drill
def test_killed_and_resumed_under_another_strategy(tmp_path, uninterrupted):
    """Two replicas with a copy each are killed; four with a quarter each go on."""
    saving = ["--checkpoints", str(tmp_path), "--save-every", "4"]
    read, write = os.pipe()
    with open(read) as said, open(write, "wb") as output:
        run = start(SCRIPT, *SMALL, *saving, output=output, errors=output)
        output.close()
        try:
            for line in said:
                if line.startswith("step 10:"):  # step 4 is on disk: the save of 8 waited for it
                    break
        finally:
            kill_all([run])
    assert run.returncode == -signal.SIGKILL
    lines = lines_of(SCRIPT, *SMALL, *saving, "--strategy", "sharded", "--replicas", "4")
    assert lines[0] in ("resumed after step 4", "resumed after step 8")
    assert lines[-1].startswith("sharded: ")
    assert loss_in(lines[-1]) == pytest.approx(uninterrupted, abs=1e-4)


def test_parts_of_a_batch_add_up(uninterrupted):
    """Gradients of two micro-batches on each of two replicas are those of the whole batch."""
    line = last_line(SCRIPT, *SMALL, "--micro-batches", "2", "--strategy", "virtual")
    assert loss_in(line) == pytest.approx(uninterrupted, abs=1e-4)


@pytest.mark.drill
def test_devices_that_share_a_replica(uninterrupted):
    """Two replicas of two devices, which hold half of the heads and columns each: under ZeRO-3."""
    line = last_line(SCRIPT, *SMALL, "--strategy", "sharded", "--model-axes", "2")
    assert loss_in(line) == pytest.approx(uninterrupted, abs=1e-5)
