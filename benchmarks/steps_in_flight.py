"""Does a long loop that never awaits a result complete, and how fast?"""

import functools
from typing import Any

import jax

import distjax as dj
from benchmarks import handwritten, tiny
from benchmarks.ours import per_replica
from benchmarks.report import Benchmark
from benchmarks.timing import Call, carry, interleave, loop_seconds, medians

NUM_LEAVES = 4
AWAIT_EVERY = 10
_WARM_UP_CALLS = 20


def _variables() -> Call:
    strategy = dj.MirroredStrategy(jax.devices())
    batch = per_replica(strategy, tiny.batch(strategy.num_replicas_in_sync))
    step = tiny.variable_step(strategy, NUM_LEAVES)
    return lambda: step(batch)


def _functional(donate: bool = False) -> Call:
    strategy = dj.MirroredStrategy(jax.devices())
    state = handwritten.replicate(tiny.leaves(NUM_LEAVES), strategy.mesh)
    batch = per_replica(strategy, tiny.batch(strategy.num_replicas_in_sync))
    step = tiny.functional_step(strategy)
    return carry(dj.jit(step, donate_argnums=(0,)) if donate else step, state, batch)


def _handwritten() -> Call:
    mesh = handwritten.make_mesh(jax.devices())
    state = handwritten.replicate(tiny.leaves(NUM_LEAVES), mesh)
    batch = handwritten.split(tiny.batch(mesh.size), mesh)
    return carry(tiny.handwritten_step(mesh, donate=False), state, batch)


_FORMS = {
    "variables": _variables,
    "functional": _functional,
    "functional, dj.jit": functools.partial(_functional, donate=True),
}


def measure(form: str, num_steps: int, num_pairs: int) -> dict[str, Any]:
    """One row: microseconds per step, never awaited and awaited every 10 steps."""
    call = _FORMS[form]()
    loop_seconds(call, _WARM_UP_CALLS, await_every=1)
    result = medians(
        interleave(
            lambda: loop_seconds(call, num_steps),
            lambda: loop_seconds(call, num_steps, AWAIT_EVERY),
            num_pairs,
        )
    )
    return {
        "state": form,
        "replicas": len(jax.devices()),
        "steps": num_steps,
        "never awaited us": result.ours_seconds * 1e6,
        "awaited every 10 us": result.baseline_seconds * 1e6,
        "ratio": result.ratio,
    }


def measure_handwritten(num_steps: int) -> dict[str, Any]:
    """The hand-written loop, awaited; never awaited, it hangs on JAX 0.10 and 0.11."""
    call = _handwritten()
    loop_seconds(call, _WARM_UP_CALLS, await_every=1)
    return {
        "state": "hand-written",
        "replicas": len(jax.devices()),
        "steps": num_steps,
        "awaited every 10 us": loop_seconds(call, num_steps, AWAIT_EVERY) * 1e6,
    }


def run(quick: bool) -> list[dict[str, Any]]:
    """One row by hand and one for each form; quick takes 500 steps, not 5,000."""
    num_steps, num_pairs = (500, 2) if quick else (5000, 4)
    rows = [measure(form, num_steps, num_pairs) for form in _FORMS]
    return [measure_handwritten(num_steps), *rows]


BENCHMARK = Benchmark(
    name="steps_in_flight",
    title="A loop that never awaits, against the same loop awaited every 10 steps",
    columns=(
        "state",
        "replicas",
        "steps",
        "never awaited us",
        "awaited every 10 us",
        "ratio",
    ),
    run=run,
)
