"""The digits example as a job: the file that trains in one process trains in several."""

import json
import pathlib

import numpy as np
import pytest

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


@pytest.mark.parametrize("script", ["train.py", "modules.py", "functional.py"])
def test_the_curve_is_that_of_one_process(script, tmp_path):
    one = losses_of(script, "mirrored", (0,), tmp_path, devices=4)
    several = losses_of(script, "multi_worker", (0, 1), tmp_path, devices=2)
    assert len(one) == 8
    np.testing.assert_allclose(several, one, atol=1e-6)
