"""The digits example as a job: the file that trains in one process trains in several."""

import json
import pathlib

import numpy as np
import pytest

from tests.processes.jobs import ROOT, run_job

pytestmark = pytest.mark.multiprocess

FOLDER = ROOT / "examples" / "digits"

SCRIPTS = ("train.py", "modules.py", "functional.py")

#: All of them in one process: what starts a process costs more than eight steps.
RUN = """
import pathlib, runpy
sys.path.insert(0, {folder!r})
if P > 1:
    os.environ.update(DISTJAX_COORDINATOR=ADDRESS, DISTJAX_NUM_PROCESSES=str(P))
    os.environ.update(DISTJAX_PROCESS_ID=str(I))
for script in {scripts}:
    out = pathlib.Path({out!r}) / script
    sys.argv = [script, "--strategy", {strategy!r}, "--replicas", "4", "--steps", "8",
                "--out", str(out), "--dump-losses", str(out / "losses.json")]
    runpy.run_path(os.path.join({folder!r}, script), run_name="__main__")
"""


def losses_of(strategy, ids, out: pathlib.Path, devices):
    for script in SCRIPTS:
        (out / script).mkdir(parents=True)
    text = RUN.format(folder=str(FOLDER), scripts=SCRIPTS, strategy=strategy, out=str(out))
    for ended in run_job(text, ids, devices=devices, seconds=240):
        assert ended.code == 0, ended.said
    return [np.array(json.loads((out / script / "losses.json").read_text())) for script in SCRIPTS]


def test_the_curves_are_those_of_one_process(tmp_path):
    in_one = losses_of("mirrored", (0,), tmp_path / "one", devices=4)
    in_several = losses_of("multi_worker", (0, 1), tmp_path / "several", devices=2)
    for one, several in zip(in_one, in_several, strict=True):
        assert len(one) == 8
        np.testing.assert_allclose(several, one, atol=1e-6)
