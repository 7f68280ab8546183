"""`python -m distjax` and the command `distjax`: which of its subcommands is called."""

from __future__ import annotations

import importlib
import os
import sys

from distjax._src.launch.launcher import refuse
from distjax._src.launch.processes import be_init

#: Subcommands, by their modules: each has ``main(argv) -> exit code``.
_COMMANDS = {
    "launch": "launch.launcher",
    "plan": "plan.command",
    "info": "launch.info",
    "doctor": "launch.doctor",
}


def main() -> None:
    """Runs the subcommand that the command line names, and ends with its exit code."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in _COMMANDS:
        refuse(
            f"distjax needs one of its commands: {', '.join(_COMMANDS)}",
            got=name or "none",
            why="launch starts a job, plan compiles a step for devices that are not there, info "
            "describes an installation, doctor says what is wrong",
            fix="distjax launch --processes 2 train.py; distjax launch --help",
        )
    if os.getpid() == 1 and name == "launch":  # of a container: somebody has to reap
        sys.exit(be_init(sys.argv[1:]))
    module = importlib.import_module(f"distjax._src.{_COMMANDS[name]}")
    sys.exit(module.main(sys.argv[2:]))


if __name__ == "__main__":
    main()
