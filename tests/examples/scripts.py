"""Runs an example as its README does: in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def last_line(script: str, *flags: str) -> str:
    """Runs a script below `examples/` and returns the last line that it prints."""
    return lines_of(script, *flags)[-1]


def lines_of(script: str, *flags: str) -> list[str]:
    """Runs a script below `examples/` and returns what it prints.

    Raises:
      AssertionError: it failed; the text is what it wrote to standard error.
    """
    environment = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / script, *flags],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()
