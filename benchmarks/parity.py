"""Is the compiled program the same as the hand-written one?"""

from typing import Any

import jax

from benchmarks import model_axes, models
from benchmarks.forms import OURS, lower_handwritten
from benchmarks.program import ProgramCost, program_cost, ratio
from benchmarks.report import Benchmark

BATCH_SIZE = 16
FLOPS_TOLERANCE = 0.01
TEMP_TOLERANCE = 0.05


def compare(model: models.Model) -> list[dict[str, Any]]:
    """One row with the hand-written costs, one row of ratios for each form."""
    devices = jax.devices()
    baseline = program_cost(lower_handwritten(model, devices, BATCH_SIZE)().compile())
    rows = [
        {"model": model.name, "state": "hand-written"}
        | _totals(baseline)
        | {"by kind": _by_kind(baseline)}
    ]
    for form, lower in OURS.items():
        cost = program_cost(lower(model, devices, BATCH_SIZE)().compile())
        rows.append({"model": model.name, "state": form} | _ratios(cost, baseline))
    return rows


def _totals(cost: ProgramCost) -> dict[str, int]:
    reduces = cost.collectives.get("all-reduce", (0, 0))
    others = [c for kind, c in cost.collectives.items() if kind != "all-reduce"]
    return {
        "all-reduce": reduces[0],
        "all-reduce bytes": reduces[1],
        "others": sum(num_ops for num_ops, _ in others),
        "others bytes": sum(result_bytes for _, result_bytes in others),
        "flops": int(cost.flops),
        "temp bytes": cost.temp_bytes,
        "donated bytes": cost.donated_bytes,
    }


def _ratios(cost: ProgramCost, baseline: ProgramCost) -> dict[str, Any]:
    totals, expected = _totals(cost), _totals(baseline)
    ratios = {name: ratio(totals[name], expected[name]) for name in totals}
    within = (
        cost.collectives == baseline.collectives
        and abs(ratios["flops"] - 1) <= FLOPS_TOLERANCE
        and abs(ratios["temp bytes"] - 1) <= TEMP_TOLERANCE
    )
    absolute = {"by kind": _by_kind(cost), "absolute": totals}
    return {**ratios, "within bars": within, **absolute}


def _by_kind(cost: ProgramCost) -> dict[str, dict[str, int]]:
    return {kind: count._asdict() for kind, count in sorted(cost.collectives.items())}


def run(quick: bool) -> list[dict[str, Any]]:
    """Three rows for each of three models, then those of `model_axes`; quick leaves some out."""
    makers = [models.mlp, models.cnn, models.transformer][: 2 if quick else 3]
    return [row for make in makers for row in compare(make())] + [*model_axes.rows(quick)]


BENCHMARK = Benchmark(
    name="parity",
    title="Compiled program, ratio to hand-written (whose rows are absolute)",
    columns=(
        "model",
        "state",
        "all-reduce",
        "all-reduce bytes",
        "others",
        "others bytes",
        "flops",
        "temp bytes",
        "donated bytes",
        "state bytes",
        "by axis",
        "within bars",
    ),
    run=run,
)
