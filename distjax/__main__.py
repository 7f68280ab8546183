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

_HELP = """usage: distjax COMMAND [options]; distjax COMMAND --help

  launch  start the processes of a training job, and restart them after a failure
  plan    find out whether a training step fits devices that you do not have
  info    print versions and devices, for a bug report
  doctor  check the processes, clocks, memory and network of a cluster"""


def main() -> None:
    """Runs the subcommand that the command line names, and ends with its exit code."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in ("-h", "--help"):
        print(_HELP)
        sys.exit(0)
    if name not in _COMMANDS:
        refuse(
            f"distjax needs one of its commands: {', '.join(_COMMANDS)}",
            got=name or "none",
            why="each command has options of its own",
            fix="distjax --help; distjax launch --processes 2 train.py",
        )
    if os.getpid() == 1 and name == "launch":  # of a container: somebody has to reap
        sys.exit(be_init(sys.argv[1:]))
    module = importlib.import_module(f"distjax._src.{_COMMANDS[name]}")
    sys.exit(module.main(sys.argv[2:]))


if __name__ == "__main__":
    main()
