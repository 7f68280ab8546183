"""The code blocks of the README run, as a newcomer would run them."""

import os
import pathlib
import re
import subprocess
import sys

README = pathlib.Path(__file__).parent.parent / "README.md"


def test_the_quick_start_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        script = tmp_path / "quickstart.py"
        script.write_text(block)
        environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
        ran = subprocess.run(
            [sys.executable, str(script)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ran.returncode == 0, ran.stderr
        loss, *weights = (float(x) for x in re.findall(r"-?\d[\d.e+-]*", ran.stdout))
        assert loss < 1e-6
        assert [round(w, 2) for w in weights] == [1.0, -2.0, 0.5]
