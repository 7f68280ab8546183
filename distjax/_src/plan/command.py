"""`python -m distjax plan`: the command, in a process that uses no device."""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from collections.abc import Sequence

import jax

from distjax._src.plan import page
from distjax._src.plan.planning import STRATEGIES, plan
from distjax.errors import message

_EXAMPLE = "example: python -m distjax plan train.py:plan --topology v5e:16x16 --html plan.html"


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Returns:
      0: a strategy fits; 1: none does; 2: a usage error; 70: the target raised.
    """
    chosen = _parser().parse_args(argv)
    _use_no_device(chosen.topology, chosen.chips)
    try:
        for file in filter(None, (chosen.json, chosen.html)):  # before minutes of work
            _save(file, "", "a")
        report = plan(
            chosen.target,
            chosen.topology.split(","),
            slices=chosen.slices,
            strategies=chosen.strategies.split(","),
            chips=chosen.chips,
            model_axes=chosen.model_axes,
            batch=chosen.batch,
            options=dict(chosen.option),
        )
        print(report)
        if chosen.json:
            _save(chosen.json, report.to_json(indent=1))
        if chosen.html:
            _save(chosen.html, page.as_page(report))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1].filename
        if os.path.dirname(where) != os.path.dirname(__file__):  # the target's own
            traceback.print_exc()
            return 70
        print(error, file=sys.stderr)
        return 2
    return 0 if report.fits else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m distjax plan",
        description="Says what a training step needs and does on devices that need not be there.",
        epilog=_EXAMPLE,
    )
    add = parser.add_argument
    add("target", metavar="TARGET", help="module:function or file.py:function")
    add("--topology", required=True, metavar="NAME[,NAME]", help="v5e:16x16, v5p:8x8x16, cpu:8")
    add("--slices", type=int, default=1, metavar="N", help="TPU slices of that shape (1)")
    add("--strategies", default=",".join(STRATEGIES), metavar="NAMES", help="default: all")
    add("--chips", default=[], type=numbers, metavar="N,N", help="each the squarest slice")
    add("--model-axes", type=axis_sizes, metavar="NAME=M", help="axes inside of a replica")
    add("--batch", action="store_true", help="find the largest batch per replica that fits")
    add("--option", default=[], action="append", type=option, metavar="KEY=VALUE")
    add("--json", metavar="FILE", help="write the numbers")
    add("--html", metavar="FILE", help="write a page with pictures")
    return parser


# What the parser calls a value that is not one: "argument --chips: invalid numbers value: 'x'".


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def axis_sizes(text: str) -> dict[str, int]:
    pairs = (pair.split("=") for pair in text.split(","))
    return {name: int(size) for name, size in pairs}


def option(text: str) -> tuple[str, str]:
    key, value = text.split("=", 1)
    return key, value


def _use_no_device(topology: str, chips: Sequence[int]) -> None:
    """Lets JAX start on as many virtual CPUs as are planned for, and on nothing else."""
    counts = [int(n) for n in re.findall(r"cpu:(\d+)", topology)]
    counts += chips if topology.startswith("cpu") else []
    with_gpu = any(name.startswith(("gpu", "cuda")) for name in topology.split(","))
    jax.config.update("jax_platforms", "cuda,cpu" if with_gpu else "cpu")
    jax.config.update("jax_num_cpu_devices", max([1, *counts]))


def _save(file: str, text: str, mode: str = "w") -> None:
    try:
        with open(file, mode, encoding="utf-8") as opened:
            opened.write(text)
    except OSError as error:
        raise ValueError(
            message(
                f"{file} needs to be a file that can be written, and room for it",
                got=str(error),
                why="the report is written at the end; if it was made, it is printed above",
                fix="free some space, or --json and --html with another place",
            )
        ) from error
