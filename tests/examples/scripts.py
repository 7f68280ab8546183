"""Runs an example in a process of its own, which is a fork: `make examples` starts each anew."""

import os
import tempfile
from pathlib import Path
from typing import IO

from tests.processes.jobs import kill_all
from tests.processes.warm import Forked, outside_of_jobs, starter

EXAMPLES = Path(__file__).parents[2] / "examples"
SECONDS = 300.0


def last_line(script: str, *flags: str) -> str:
    """Runs a script below `examples/` and returns the last line that it prints."""
    return lines_of(script, *flags)[-1]


def lines_of(script: str, *flags: str) -> list[str]:
    """Runs a script below `examples/` and returns what it prints.

    Raises:
      AssertionError: it failed; the text is what it wrote to standard error.
    """
    said, _ = what_it_said(script, *flags)
    return said.strip().splitlines()


def what_it_said(script: str, *flags: str) -> tuple[str, str]:
    """Runs a script below `examples/`; returns what it wrote to standard output and error.

    Raises:
      AssertionError: it failed; the text is what it wrote to standard error.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        run = start(script, *flags, output=output, errors=errors)
        try:
            code = run.wait(SECONDS)
        finally:
            kill_all([run])
        for file in (output, errors):
            file.seek(0)
        said, complaints = (file.read().decode() for file in (output, errors))
    assert code == 0, complaints
    return said, complaints


def start(script: str, *flags: str, output: IO[bytes], errors: IO[bytes]) -> Forked:
    """Starts a script below `examples/`; programs are compiled once for all of them."""
    settings = {
        "jax_compilation_cache_dir": os.environ["DISTJAX_TESTS_PROGRAMS"],
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    return starter().start(
        EXAMPLES / script,
        flags,
        environment=outside_of_jobs(),
        settings=settings,
        files=[output.fileno(), errors.fileno()],
    )
