"""The examples as a job: the file that trains in one process trains in several."""

import json
import pathlib

import numpy as np
import pytest

from tests.drills.example_runs import LANGUAGE_MODEL, run_example
from tests.processes import groups
from tests.processes.jobs import run_job
from tests.processes.warm import ROOT

pytestmark = [pytest.mark.multiprocess, pytest.mark.drill]

FOLDER = ROOT / "examples" / "digits"

RUN = """
import runpy
sys.path.insert(0, {folder!r})
if P > 1:
    os.environ.update(DISTJAX_COORDINATOR=ADDRESS, DISTJAX_NUM_PROCESSES=str(P))
    os.environ.update(DISTJAX_PROCESS_ID=str(I))
sys.argv = ["train.py", "--strategy", {strategy!r}, "--replicas", "4", "--steps", "8",
            "--out", {out!r}, "--dump-losses", os.path.join({out!r}, "losses.json")]
runpy.run_path(os.path.join({folder!r}, "train.py"), run_name="__main__")
"""


def losses_of(strategy, ids, out: pathlib.Path, devices):
    text = RUN.format(folder=str(FOLDER), strategy=strategy, out=str(out))
    for ended in run_job(text, ids, devices=devices, seconds=240):
        assert ended.code == 0, ended.said
    return np.array(json.loads((out / "losses.json").read_text()))


def test_the_digits_as_a_job_give_the_curve_of_one_process(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "several").mkdir()
    in_one = losses_of("mirrored", (0,), tmp_path / "one", devices=4)
    in_several = losses_of("multi_worker", (0, 1), tmp_path / "several", devices=2)
    assert len(in_one) == 8
    np.testing.assert_allclose(in_several, in_one, atol=1e-6)


def test_the_language_model_of_a_group_gives_the_curve_of_one_process():
    """Objects of Flax, split over the processes; `tests/drills/curves.py` has all examples."""
    options = "--steps 4 --width 16 --context 16 --layers 1".split()

    def curve(*shape):
        return groups.group(*shape).call(run_example, LANGUAGE_MODEL, "zero3", *options)[0].losses

    one, several = curve(1, 4), curve(2, 2)
    assert len(one) == 4
    np.testing.assert_allclose(several, one, rtol=1e-6)
