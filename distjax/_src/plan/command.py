"""`python -m distjax plan`: the command, in a process that uses no device."""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import jax

from distjax._src.plan import page, targets
from distjax._src.plan.planning import STRATEGIES, plan
from distjax._src.plan.report import Report
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
        for file in filter(None, (chosen.json, chosen.html)):
            _require_room(file)
        axes: Any = dict(_pair(text, int) for text in chosen.model_axes.split(",") if text)
        options: Any = dict(_pair(text, str) for text in chosen.option)
        chips = [int(n) for n in chosen.chips.split(",") if n]
    except (OSError, ValueError) as error:
        return _usage(error)
    try:
        target = targets.require_target(targets.load(chosen.target))
    except (ValueError, TypeError) as error:
        return _usage(error) if _is_ours(error) else _raised()
    except Exception:
        return _raised()
    try:
        report = plan(
            target,
            chosen.topology.split(","),
            slices=chosen.slices,
            strategies=chosen.strategies.split(","),
            chips=chips,
            model_axes=axes,
            batch=chosen.batch,
            options=options,
        )
    except (ValueError, TypeError, RuntimeError) as error:
        return _usage(error) if _is_ours(error) else _raised()
    except Exception:
        return _raised()
    return _write(Report(chosen.target, report.jax, report.libtpu, report.plans), chosen)


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
    add("--chips", default="", metavar="N,N", help="numbers of chips, each the squarest slice")
    add("--model-axes", default="", metavar="NAME=M", help="axes inside of a replica")
    add("--batch", action="store_true", help="find the largest batch per replica that fits")
    add("--option", action="append", default=[], metavar="KEY=VALUE", help="of the compiler")
    add("--json", metavar="FILE", help="write the numbers; -: to standard output")
    add("--html", metavar="FILE", help="write a page with pictures")
    return parser


def _use_no_device(topology: str, chips: str) -> None:
    """Lets JAX start on as many virtual CPUs as are planned for, and on nothing else."""
    counts = [int(n) for n in re.findall(r"cpu:(\d+)", topology)]
    if topology.startswith("cpu"):
        counts += [int(n) for n in chips.split(",") if n.isdigit()]
    with_gpu = any(name.startswith(("gpu", "cuda")) for name in topology.split(","))
    jax.config.update("jax_platforms", "cuda,cpu" if with_gpu else "cpu")
    jax.config.update("jax_num_cpu_devices", max([1, *counts]))


def _pair(text: str, kind: type) -> tuple[str, int | str]:
    key, equals, value = text.partition("=")
    if not equals or not key or (kind is int and not value.isdigit()):
        raise ValueError(
            message(
                "--model-axes and --option need NAME=VALUE",
                got=repr(text),
                why="each names one axis, or one option of the compiler",
                fix="--model-axes model=4 --option xla_tpu_enable_async_all_reduce=true",
            )
        )
    return key, kind(value)


def _require_room(file: str) -> None:
    """Raises before minutes of work if a file cannot be written."""
    folder = os.path.dirname(os.path.abspath(file))
    if file == "-" or (os.path.isdir(folder) and os.access(folder, os.W_OK)):
        return
    raise ValueError(
        message(
            f"{file} needs a folder that can be written to",
            got=f"{folder}, which {'cannot' if os.path.isdir(folder) else 'is not there'}",
            why="the report is written there at the end",
            fix="--json or --html with another place",
        )
    )


def _is_ours(error: Exception) -> bool:
    """Returns whether an error is one of usage, raised by the plan itself."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and os.path.dirname(frames[-1].filename) == os.path.dirname(__file__)


def _usage(error: Exception) -> int:
    print(error, file=sys.stderr)
    return 2


def _raised() -> int:
    """Prints the target's own traceback."""
    traceback.print_exc()
    return 70


def _write(report: Report, chosen: argparse.Namespace) -> int:
    try:
        if chosen.json == "-":
            print(report.to_json())
        else:
            print(report)
            if chosen.json:
                _save(chosen.json, report.to_json(indent=1))
        if chosen.html:
            _save(chosen.html, page.as_page(report))
    except OSError as error:
        text = message(
            f"{error.filename or 'the report'} needs room",
            got=str(error),
            why="the report is written at the end; it was printed above, if it was made",
            fix="free some space, or --json and --html with another place",
        )
        print(text, file=sys.stderr)
        return 2
    return 0 if report.fits else 1


def _save(file: str, text: str) -> None:
    with open(file, "w", encoding="utf-8") as opened:
        opened.write(text)
