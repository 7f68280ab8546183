"""The benchmarks can be started: they are timed by hand, so nothing else would tell."""

import subprocess
import sys

from tests.processes.warm import ROOT


def test_the_command_line_knows_every_benchmark():
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    for name in ("dispatch", "servers", "ray_servers", "servers_tensorflow", "over_processes"):
        assert name in ended.stdout
