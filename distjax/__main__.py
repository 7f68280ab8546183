"""`python -m distjax COMMAND`: each command is a module with ``main(argv) -> exit code``."""

import importlib
import sys

COMMANDS = {"plan": "distjax._src.plan.command"}


def main() -> int:
    """Runs the command that the arguments name."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name not in COMMANDS:
        print(f"usage: python -m distjax {{{','.join(COMMANDS)}}} ...", file=sys.stderr)
        return 0 if name in ("-h", "--help") else 2
    return importlib.import_module(COMMANDS[name]).main(rest)


if __name__ == "__main__":
    sys.exit(main())
