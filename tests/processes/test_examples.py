"""The examples as a job: the file that trains in one process trains in several."""

import json
import pathlib

import numpy as np
import pytest

from tests.drills.example_runs import LANGUAGE_MODEL, run_example
from tests.processes import groups
from tests.processes.jobs import run_job
from tests.processes.warm import ROOT

pytestmark = pytest.mark.multiprocess

FOLDER = ROOT / "examples" / "digits"

SCRIPTS = ("modules.py", "functional.py")

#: One after the other in one process.
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


#: Of those of `tests/drills/curves.py`; what makes them short, and how near curves have to be.
#: Modules under a mirrored strategy are among the scripts above.
FORMS = {
    ("digits/train.py", "mirrored"): ("--steps 8", dict(atol=1e-6)),
    (LANGUAGE_MODEL, "zero3"): (
        "--steps 4 --width 16 --context 16 --layers 1",
        dict(rtol=1e-6),
    ),
}


def test_the_curves_of_a_group_are_those_of_one_process():
    def curves(*shape):
        run = groups.group(*shape).call
        return [run(run_example, *form, *FORMS[form][0].split())[0].losses for form in FORMS]

    one, several = curves(1, 4), curves(2, 2)
    assert [len(curve) for curve in one] == [8, 4]
    for i, (_, tolerance) in enumerate(FORMS.values()):
        np.testing.assert_allclose(several[i], one[i], **tolerance)
