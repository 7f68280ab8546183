"""Which steps there are: the latest, those kept, the best; the directory and its processes."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import distjax as dj
from distjax._src.checkpoint import storage
from distjax.errors import CheckpointError
from tests.cluster.test_ending import make_job
from tests.processes.jobs import run_job

ROOT = pathlib.Path(dj.__file__).parent.parent


def save_all(checkpointer, losses):
    for step, loss in losses.items():
        checkpointer.save(step, {"loss": jnp.float32(loss)}, metrics={"loss": loss})
    checkpointer.wait()


def test_the_latest_step(checkpointer):
    assert (checkpointer.latest_step(), checkpointer.best_step()) == (None, None)
    assert not os.path.exists(checkpointer.directory), "made by the first save"
    save_all(checkpointer, {0: 1.0, 10: 2.0})
    assert checkpointer.latest_step() == 10
    assert checkpointer.all_steps() == [0, 10]
    assert float(checkpointer.restore({"loss": jnp.float32(0)}, 0)["loss"]) == 1.0


def test_a_step_under_way_is_awaited(checkpointer):
    checkpointer.save(1, {"x": jnp.ones(1 << 16)})
    assert checkpointer.latest_step() == 1


@pytest.mark.parametrize("phase_timeout", [None, 1800.5])
def test_how_long_a_save_may_take(phase_timeout, checkpointer, monkeypatch):
    """Nobody waits for that of one process; orbax would give up after twenty minutes."""
    asked = []
    options = ocp.AsyncOptions
    with monkeypatch.context() as patch:
        patch.setattr(ocp, "AsyncOptions", lambda **kw: asked.append(kw) or options(**kw))
        if phase_timeout is not None:
            timeouts = dataclasses.replace(make_job().timeouts, phase_timeout=phase_timeout)
            joined = dataclasses.replace(make_job(), timeouts=timeouts)
            patch.setattr(checkpointer._storage, "job", joined)
        checkpointer._storage._make_writer(None, {}).close()
    assert [kw["timeout_secs"] for kw in asked] == [86400 if phase_timeout is None else 1801]


def test_max_to_keep(tmp_path):
    with dj.checkpoint.Checkpointer(tmp_path, max_to_keep=2) as checkpointer:
        save_all(checkpointer, {1: 1.0, 2: 2.0, 3: 3.0})
        assert checkpointer.all_steps() == [2, 3]
        assert sorted(os.listdir(tmp_path)) == ["2", "3"], "no files of step 1 are left"
        assert checkpointer.best_step() is None, "no best_metric was named"


@pytest.mark.parametrize(
    ("mode", "expected", "best"), [("min", [2, 3, 5], 2), ("max", [1, 4, 5], 4)]
)
def test_the_best_are_kept_and_the_latest(mode, expected, best, tmp_path):
    options = dict(max_to_keep=2, best_metric="loss", best_mode=mode)
    with dj.checkpoint.Checkpointer(tmp_path, **options) as checkpointer:
        save_all(checkpointer, {1: 3.0, 2: 0.5, 3: 1.0, 4: 4.0, 5: 2.0})
        assert checkpointer.all_steps() == expected
        assert checkpointer.best_step() == best


@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_is_never_the_best(mode, tmp_path):
    options = dict(max_to_keep=1, best_metric="loss", best_mode=mode)
    with dj.checkpoint.Checkpointer(tmp_path, **options) as checkpointer:
        save_all(checkpointer, {1: 3.0, 2: float("nan"), 3: float("nan")})
        assert checkpointer.best_step() == 1
        assert checkpointer.all_steps() == [1, 3]


def test_steps_can_be_deleted_to_go_back(checkpointer):
    save_all(checkpointer, {1: 1.0, 2: 2.0})
    checkpointer.delete(2)
    save_all(checkpointer, {2: 5.0})
    assert float(checkpointer.restore({"loss": jnp.float32(0)})["loss"]) == 5.0


def test_two_checkpointers_see_each_other(checkpointer):
    reader = dj.checkpoint.Checkpointer(checkpointer.directory)
    save_all(checkpointer, {1: 1.0})
    assert reader.latest_step() == 1
    save_all(checkpointer, {2: 1.0})
    assert reader.latest_step() == 2


def test_a_relative_path_means_the_directory_of_that_moment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with dj.checkpoint.Checkpointer("run") as checkpointer:
        monkeypatch.chdir("/")
        checkpointer.save(1, {"x": 1})
    assert (tmp_path / "run" / "1").is_dir()


LAST_LINE_IS_A_SAVE = """
import jax.numpy as jnp
import distjax as dj
dj.checkpoint.Checkpointer(os.environ["TEST_DIRECTORY"]).save(1, {"x": jnp.ones(1 << 20)})
"""


def test_a_program_may_end_with_a_save(checkpointer):
    environment = {"TEST_DIRECTORY": str(checkpointer.directory)}
    (ended,) = run_job(LAST_LINE_IS_A_SAVE, ids=(0,), environment=environment)
    assert ended.code == 0, ended.said
    assert checkpointer.latest_step() == 1
    assert checkpointer.restore({"x": jnp.zeros(1 << 20)})["x"].min() == 1.0


def test_at_the_end_every_save_is_waited_for_though_one_fails(monkeypatch):
    waited = []

    class Save:
        def __init__(self, number):
            self.number = number

        def wait(self):
            waited.append(self.number)
            if self.number < 2:
                raise CheckpointError(f"save {self.number}")

    monkeypatch.setattr(storage, "saves_under_way", [Save(0), Save(1), Save(2)])
    with pytest.raises(CheckpointError, match="save 0"):
        storage.wait_for_all()
    assert waited == [0, 1, 2]


FORKED = """
import multiprocessing, warnings
warnings.simplefilter("ignore")
import numpy as np
import distjax as dj
from distjax._src.checkpoint import storage

checkpointer = dj.checkpoint.Checkpointer(os.environ["TEST_DIRECTORY"])

checkpointer.save(1, {"x": np.random.default_rng(0).normal(size=1 << 22)})
assert checkpointer._storage in storage.saves_under_way
child = multiprocessing.get_context("fork").Process(target=lambda: None)
child.start()
child.join(60)
print(child.exitcode, checkpointer.all_steps(), flush=True)
child.kill()
"""


def test_a_process_that_is_forked_during_a_save_ends(checkpointer):
    """At its end Python calls what waits for saves, whose threads it does not have."""
    environment = {"TEST_DIRECTORY": str(checkpointer.directory)}
    (ended,) = run_job(FORKED, ids=(0,), environment=environment)
    assert (ended.code, ended.said.splitlines()) == (0, ["0 [1]"])


WITHOUT_ORBAX = """
import sys
sys.modules["orbax"] = sys.modules["orbax.checkpoint"] = None
import distjax as dj
try:
    dj.checkpoint
except ImportError as error:
    print(error)
"""


def test_without_orbax_the_error_says_what_to_install():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WITHOUT_ORBAX]
    said = subprocess.run(command, check=True, env=environment, capture_output=True, timeout=120)
    lines = said.stdout.decode().splitlines()
    assert lines[0] == "dj.checkpoint needs the package orbax-checkpoint."
    assert lines[-1] == "  Fix: pip install 'distjax[checkpoint]'"


def test_a_step_that_another_process_removes_while_steps_are_compared(tmp_path):
    """And one that another program wrote, which has no description."""
    with dj.checkpoint.Checkpointer(tmp_path, best_metric="loss") as checkpointer:
        save_all(checkpointer, {1: 2.0, 2: 1.0})
        (tmp_path / "1" / "description" / "metadata").unlink()
        (tmp_path / "7").mkdir()
        assert checkpointer.best_step() == 2
