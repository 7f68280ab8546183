"""The examples over several processes give the curves of one process with as many replicas.

    python -m tests.drills.curves

Prints the greatest difference of a loss, over the first steps and to the end, and whether each
training goes on after a save as if there had been none; the end is 1 where one does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tests.drills import resumes
from tests.drills.example_runs import FORMS, Curve, compute_in_64_bits, run_example
from tests.processes import groups

Shape = tuple[int, int]
SHAPES: tuple[Shape, ...] = ((2, 2), (4, 1), (4, 2))
FIRST_STEPS = 30
#: How much losses (or, above 1, their ratio) may differ: over the first steps, and with 64 bits
#: to the end.
FLOAT32, FLOAT64 = 1e-6, 1e-10
#: How much final accuracies may, or the ratio of final losses where there are none.
FINAL = 0.002
_SECONDS = 1200.0


@contextlib.contextmanager
def group_of(shape: Shape, is_wide: bool = False) -> Iterator[groups.Group]:
    """A group of its own."""
    # Without Flax where it is to have 64 bits.
    group = groups.Group(*shape, modules=["distjax"] if is_wide else ())
    try:
        if is_wide:
            group.call(compute_in_64_bits)
        yield group
    finally:
        group.end()


def curves(shape: Shape, is_wide: bool, num_steps: int) -> dict[tuple[str, str], Curve]:
    """What each form gives over the processes of a shape."""
    options = "--steps", str(num_steps)
    with group_of(shape, is_wide) as group:
        run = lambda form: group.call(run_example, *form, *options, seconds=_SECONDS)[0]
        return {form: run(form) for form in FORMS}


def compare(curve: Curve, alone: Curve, is_wide: bool) -> tuple[str, bool]:
    """A line of the table, and whether the curves are as equal as they have to be."""
    scale = np.maximum(1.0, np.abs(alone.losses))
    differences = np.abs(np.subtract(curve.losses, alone.losses)) / scale
    first, last = differences[:FIRST_STEPS].max(), differences.max()
    is_equal = last <= FLOAT64 if is_wide else first <= FLOAT32
    ends = [end.losses[-1] if end.accuracy is None else end.accuracy for end in (curve, alone)]
    scale = ends[1] if curve.accuracy is None else 1.0
    is_equal &= abs(ends[0] - ends[1]) <= FINAL * scale
    show = "loss {:.4f}" if curve.accuracy is None else "{:.2%}"
    return f"{first:9.1e}  {last:9.1e}  {' / '.join(map(show.format, ends))}", bool(is_equal)


def compare_curves(is_wide: bool, shapes: Sequence[Shape], num_steps: int) -> bool:
    """Prints a line for each shape and form; whether all are equal."""
    alone: dict[int, dict[tuple[str, str], Curve]] = {}
    are_equal, bits = True, 64 if is_wide else 32
    for p, d in shapes:
        if p * d not in alone:
            alone[p * d] = curves((1, p * d), is_wide, num_steps)
        found = curves((p, d), is_wide, num_steps)
        for form in FORMS:
            text, is_equal = compare(found[form], alone[p * d][form], is_wide)
            are_equal &= is_equal
            _print_row(bits, (p, d), form, text, is_equal)
    return are_equal


def compare_resumed(shapes: Sequence[Shape]) -> bool:
    """Prints a line for each shape and form; whether all go on to the bit."""
    are_equal = True
    for shape in shapes:
        with tempfile.TemporaryDirectory(prefix="distjax-drills-") as folder:
            wholes = _in_a_group(shape, resumes.train_and_save, folder)
            resumed = _in_a_group(shape, resumes.resume, folder)
        for form in FORMS:
            is_equal = resumed[form] == wholes[form]
            are_equal &= is_equal
            steps = f"{resumes.STEPS_BEFORE} steps, {resumes.STEPS_AFTER} more"
            text = f"resumed after {steps} to the bit"
            _print_row(32, shape, form, text, is_equal)
    return are_equal


def _in_a_group(
    shape: Shape, train: Callable[[str, str, str], Any], folder: str
) -> dict[tuple[str, str], list[Any]]:
    """What each form ends in, on each process."""
    with group_of(shape) as group:
        directory = lambda form: os.path.join(folder, "-".join(form).replace("/", "-"))
        run = lambda form: group.call(train, *form, directory(form), seconds=_SECONDS)
        return {form: run(form) for form in FORMS}


def _print_row(bits: int, shape: Shape, form: tuple[str, str], text: str, is_equal: bool) -> None:
    name, verdict = "x".join(map(str, shape)), "" if is_equal else "  TOO FAR"
    print(f"{bits:4}  {name:5}  {form[0]:23} {form[1]:8}  {text}{verdict}", flush=True)


def _as_shape(text: str) -> Shape:
    num_processes, num_devices = map(int, text.split("x"))
    return num_processes, num_devices


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.drills.curves")
    add = parser.add_argument
    add("--steps", type=int, default=100, help="of each run (100)")
    add("--bits", type=int, nargs="*", default=(32, 64), help="32, 64 or none (both)")
    add("--shapes", type=_as_shape, nargs="*", default=SHAPES, help="as 2x2 (three)")
    add("--no-resume", action="store_true", help="only curves")
    options = parser.parse_args()
    first = f"first {FIRST_STEPS}"
    print(
        f"bits  shape  {'example':23} {'strategy':8}  {first:>9} to the end  final / in one process"
    )
    are_equal = True
    with tempfile.TemporaryDirectory(prefix="distjax-programs-") as programs:
        os.environ.setdefault("DISTJAX_TESTS_PROGRAMS", programs)
        if not options.no_resume:
            are_equal &= compare_resumed(options.shapes)
        for bits in options.bits:
            are_equal &= compare_curves(bits == 64, options.shapes, options.steps)
    sys.exit(not are_equal)


if __name__ == "__main__":
    main()
