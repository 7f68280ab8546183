"""Times steps in one process of a job; process 0 prints one JSON list of rows."""

import argparse
import json
import statistics
from typing import Any

import jax

import distjax as dj
from benchmarks import handwritten, models, ours
from benchmarks.timing import Call, carry, interleave, loop_seconds

WIDTH, BATCH_SIZE = 768, 64
STEPS, AWAIT_EVERY = 6, 3
BAR = 0.97


def _handwritten(model: models.Model) -> Call:
    mesh = handwritten.make_mesh(jax.devices())
    state = handwritten.replicate(models.initial_state(model), mesh)
    batch = handwritten.split(model.batch(BATCH_SIZE * mesh.size), mesh)
    return carry(handwritten.make_step(model, mesh), state, batch)


def _functional(model: models.Model) -> Call:
    strategy = dj.MultiWorkerMirroredStrategy()
    state = handwritten.replicate(models.initial_state(model), strategy.mesh)
    batch = ours.per_replica(strategy, model.batch(BATCH_SIZE * strategy.num_replicas_in_sync))
    step = dj.jit(ours.make_functional_step(model, strategy), donate_argnums=(0,))
    return carry(step, state, batch)


def _variables(model: models.Model) -> Call:
    strategy = dj.MultiWorkerMirroredStrategy()
    variables = ours.make_variables(strategy, models.initial_state(model))
    batch = ours.per_replica(strategy, model.batch(BATCH_SIZE * strategy.num_replicas_in_sync))
    step = dj.jit(ours.make_variable_step(model, strategy, variables))
    return lambda: step(batch)


_FORMS = {"hand-written": _handwritten, "functional": _functional, "variables": _variables}


def measure(form: str, num_pairs: int, spread: float | None) -> dict[str, Any]:
    """One row; `spread` is how far hand-written steps are from themselves, None in their row."""
    model = models.mlp(WIDTH)
    call, baseline = _FORMS[form](model), _handwritten(model)
    timed = lambda call: loop_seconds(call, STEPS, AWAIT_EVERY)
    for warm_up in (call, baseline):
        timed(warm_up)
    pairs = interleave(lambda: timed(call), lambda: timed(baseline), num_pairs)
    ratios = [theirs / own for own, theirs in pairs]
    ratio = statistics.median(ratios)
    first, _, third = statistics.quantiles(ratios)
    return {
        "processes": jax.process_count(),
        "devices": jax.local_device_count(),
        "state": form,
        "step ms": 1e3 * statistics.median(own for own, _ in pairs),
        "hand-written ms": 1e3 * statistics.median(theirs for _, theirs in pairs),
        "ratio": ratio,
        "spread": third - first,
        "bar": None if spread is None else BAR - spread,
        "within bar": None if spread is None else ratio >= BAR - spread,
    }


def main() -> None:
    """Joins the job, and prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=30)
    num_pairs = parser.parse_args().pairs
    dj.initialize()
    rows = [measure("hand-written", num_pairs, None)]
    spread = abs(1 - rows[0]["ratio"])
    rows += [measure(form, num_pairs, spread) for form in _FORMS if form != "hand-written"]
    if jax.process_index() == 0:
        print(json.dumps(rows), flush=True)


if __name__ == "__main__":
    main()
