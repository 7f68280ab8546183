"""The examples as a job: the file that trains in one process trains in several."""

import json
import pathlib

import numpy as np
import pytest

from tests.drills.example_runs import LANGUAGE_MODEL, run_example
from tests.processes import groups
from tests.processes.jobs import ROOT, run_job

pytestmark = pytest.mark.multiprocess

FOLDER = ROOT / "examples" / "digits"

RUN = """
import runpy
sys.path.insert(0, {folder!r})
if P > 1:
    os.environ.update(DISTJAX_COORDINATOR=ADDRESS, DISTJAX_NUM_PROCESSES=str(P))
    os.environ.update(DISTJAX_PROCESS_ID=str(I))
sys.argv = [{script!r}, "--strategy", {strategy!r}, "--replicas", "4", "--steps", "8",
            "--out", {out!r}, "--dump-losses", {losses!r}]
runpy.run_path(os.path.join({folder!r}, {script!r}), run_name="__main__")
"""


def losses_of(script, strategy, ids, out: pathlib.Path, devices):
    losses = out / f"{strategy}.json"
    text = RUN.format(
        folder=str(FOLDER), script=script, strategy=strategy, out=str(out), losses=str(losses)
    )
    for ended in run_job(text, ids, devices=devices, seconds=240):
        assert ended.code == 0, ended.said
    return np.array(json.loads(losses.read_text()))


def test_the_curve_is_that_of_one_process(tmp_path):
    one = losses_of("train.py", "mirrored", (0,), tmp_path, devices=4)
    several = losses_of("train.py", "multi_worker", (0, 1), tmp_path, devices=2)
    assert len(one) == 8
    np.testing.assert_allclose(several, one, atol=1e-6)


#: A part of what `python -m tests.drills.curves` runs.
FORMS = (
    ("digits/modules.py", "mirrored"),
    ("digits/functional.py", "mirrored"),
    (LANGUAGE_MODEL, "mirrored"),
    (LANGUAGE_MODEL, "zero3"),
)


def test_curves_of_other_forms():
    """In one group of processes, and in one process."""
    options = ("--steps", "4", "--width", "16", "--context", "16", "--layers", "1")
    curves = []
    for shape in ((1, 4), (2, 2)):
        group = groups.group(*shape)
        found = {}
        for script, strategy in FORMS:
            own = options if script == LANGUAGE_MODEL else options[:2]
            found[script, strategy] = group.call(run_example, script, strategy, *own)[0].losses
        curves.append(found)
    for form in FORMS:
        one, several = (found[form] for found in curves)
        assert len(one) == 4
        np.testing.assert_allclose(several, one, rtol=1e-6, err_msg=str(form))
