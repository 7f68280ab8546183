"""Kills trainings at random moments, and prints a table: python -m tests.drills [options]."""

import argparse
import concurrent.futures
import functools
import pathlib
import sys
import tempfile
import time

from tests.drills.kills import KILLS_OF_A_RUN, Failure, Row, drill

#: Trainings at a time: the others of one that was killed mostly wait for a heartbeat.
NUM_AT_A_TIME = 2


def run(seed: int, folder: pathlib.Path) -> tuple[list[Row], Failure | None]:
    """The kills of one training and how it ended, and what was wrong if it failed."""
    rows: list[Row] = []
    try:
        rows += drill(seed, folder)
    except Failure as failure:
        return rows, failure
    return rows, None


def main() -> None:
    """Runs drills until there were enough kills; ends with 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.drills", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first training (0)")
    parser.add_argument("--kills", type=int, default=50, help="at least so many in all (50)")
    options = parser.parse_args()
    print(f"{'seed':>6}  {'shape':5}  {'result':10}  moment", flush=True)
    began, failures, kills = time.monotonic(), 0, 0
    seeds = range(options.seed, options.seed + -(-options.kills // KILLS_OF_A_RUN))
    with (
        tempfile.TemporaryDirectory(prefix="distjax-drills-") as folder,
        concurrent.futures.ThreadPoolExecutor(NUM_AT_A_TIME) as pool,
    ):
        found = pool.map(functools.partial(run, folder=pathlib.Path(folder)), seeds)
        for seed, (rows, failure) in zip(seeds, found, strict=True):
            for row in rows:
                print(f"{seed:6}  {row.shape:5}  {row.result:10}  {row.moment}", flush=True)
            kills += sum(row.result == "killed" for row in rows)
            if failure is not None:
                failures += 1
                print(f"{seed:6}  {'':5}  {'FAILED':10}  {failure}", flush=True)
    minutes = (time.monotonic() - began) / 60
    print(f"{kills} kills in {len(seeds)} trainings, {failures} of which failed; {minutes:.1f} min")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
