"""Kills trainings at random moments, and prints a table: python -m tests.drills [options]."""

import argparse
import pathlib
import sys
import tempfile

from tests.drills.kills import KILLS_OF_A_RUN, Failure, drill


def main() -> None:
    """Runs drills until there were enough kills; ends with 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.drills", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first training (0)")
    parser.add_argument("--kills", type=int, default=50, help="at least so many in all (50)")
    options = parser.parse_args()
    print(f"{'seed':>6}  {'shape':5}  {'result':10}  moment", flush=True)
    failures, trainings = 0, -(-options.kills // KILLS_OF_A_RUN)
    with tempfile.TemporaryDirectory(prefix="distjax-drills-") as folder:
        for seed in range(options.seed, options.seed + trainings):
            try:
                for row in drill(seed, pathlib.Path(folder)):
                    print(f"{seed:6}  {row.shape:5}  {row.result:10}  {row.moment}", flush=True)
            except Failure as failure:
                failures += 1
                print(f"{seed:6}  {'':5}  {'FAILED':10}  {failure}", flush=True)
    kills = trainings * KILLS_OF_A_RUN
    print(f"{kills} kills in {trainings} trainings, {failures} of which failed")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
