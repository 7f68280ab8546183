"""The examples over several processes give the curves of one process with as many replicas.

    python -m tests.drills.curves

Prints the greatest difference of a loss, over the first steps and to the end; the end is 1 where
one is too great.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from tests.drills.example_runs import FORMS, Curve, compute_in_64_bits, run_example
from tests.processes import groups

SHAPES = ((2, 2), (4, 2), (4, 1))
FIRST_STEPS = 30
#: How much losses (or, above 1, their ratio) may differ: over the first steps, and with 64 bits
#: to the end.
FLOAT32, FLOAT64 = 1e-6, 1e-10
ACCURACY = 0.002


def curves(shape: tuple[int, int], is_wide: bool, num_steps: int) -> dict[tuple[str, str], Curve]:
    """What each form gives over the processes of a shape, in a group of their own."""
    group = groups.Group(*shape)
    try:
        if is_wide:
            group.call(compute_in_64_bits)
        return {
            form: group.call(run_example, *form, "--steps", str(num_steps), seconds=600)[0]
            for form in FORMS
        }
    finally:
        group.end()


def compare(curve: Curve, alone: Curve, is_wide: bool) -> tuple[str, bool]:
    """A line of the table, and whether the curves are as equal as they have to be."""
    scale = np.maximum(1.0, np.abs(alone.losses))
    differences = np.abs(np.subtract(curve.losses, alone.losses)) / scale
    first, last = differences[:FIRST_STEPS].max(), differences.max()
    is_equal = last <= FLOAT64 if is_wide else first <= FLOAT32
    text = f"{first:9.1e}  {last:9.1e}"
    if curve.accuracy is not None and alone.accuracy is not None:
        is_equal &= abs(curve.accuracy - alone.accuracy) <= ACCURACY
        text += f"  {curve.accuracy:8.2%}  {alone.accuracy:8.2%}"
    return text, bool(is_equal)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.drills.curves")
    parser.add_argument("--steps", type=int, default=100, help="of each run (100)")
    num_steps = parser.parse_args().steps
    print(
        f"bits  shape  {'example':23} {'strategy':8}  first {FIRST_STEPS:3}   to the end"
        "  accuracy  in one process"
    )
    are_equal = True
    for is_wide in (False, True):
        alone = {r: curves((1, r), is_wide, num_steps) for r in (4, 8)}
        for p, d in SHAPES:
            found = curves((p, d), is_wide, num_steps)
            for form in FORMS:
                text, is_equal = compare(found[form], alone[p * d][form], is_wide)
                are_equal &= is_equal
                bits = 64 if is_wide else 32
                verdict = "" if is_equal else "  TOO FAR"
                print(f"{bits:4}  {p}x{d:<4} {form[0]:23} {form[1]:8}  {text}{verdict}", flush=True)
    sys.exit(not are_equal)


if __name__ == "__main__":
    main()
