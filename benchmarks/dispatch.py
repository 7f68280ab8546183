"""What does a call cost before the device has anything to do?"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

import distjax as dj
from benchmarks import handwritten, tiny
from benchmarks.ours import per_replica
from benchmarks.report import Benchmark
from benchmarks.timing import Call, carry, dispatch_seconds, interleave, medians

BARS = {10: 1.4, 100: 1.15, 1000: 1.15}
_BATCH_SECONDS = 0.04
_MIN_CALLS = 20
_WARM_UP_CALLS = 50
# Two copies of one loop differ by some percent for as long as they live, by where
# their buffers lie in memory. So each row pools pairs of copies made anew.
_NUM_COPIES = 4


def _strategy() -> dj.MirroredStrategy:
    return dj.MirroredStrategy(jax.devices()[:1])


def variables(num_leaves: int) -> Call:
    """State in variables, whose memory is reused."""
    strategy = _strategy()
    step = tiny.variable_step(strategy, num_leaves)
    batch = per_replica(strategy, tiny.batch(1))
    return lambda: step(batch)


def functional(num_leaves: int) -> Call:
    """Mirrored state through `strategy.run`, which donates no argument."""
    strategy = _strategy()
    state = handwritten.replicate(tiny.leaves(num_leaves), strategy.mesh)
    batch = per_replica(strategy, tiny.batch(1))
    return carry(tiny.functional_step(strategy), state, batch)


def functional_donated(num_leaves: int) -> Call:
    """Mirrored state through `dj.jit`, donated."""
    strategy = _strategy()
    state = handwritten.replicate(tiny.leaves(num_leaves), strategy.mesh)
    batch = per_replica(strategy, tiny.batch(1))
    step = dj.jit(tiny.functional_step(strategy), donate_argnums=(0,))
    return carry(step, state, batch)


def all_per_replica(num_leaves: int) -> Call:
    """Every leaf `PerReplica`, the same at each call and not donated.

    It is not passed on: with one replica the results are plain arrays.
    """
    strategy = _strategy()
    state = per_replica(strategy, tiny.leaves(num_leaves, num_replicas=1))
    batch = per_replica(strategy, tiny.batch(1))
    step = tiny.functional_step(strategy)
    return lambda: step(state, batch)


def by_hand(num_leaves: int, donate: bool = True) -> Call:
    """The hand-written call."""
    mesh = handwritten.make_mesh(jax.devices()[:1])
    state = handwritten.replicate(tiny.leaves(num_leaves), mesh)
    batch = handwritten.split(tiny.batch(1), mesh)
    return carry(tiny.handwritten_step(mesh, donate), state, batch)


class _Form(NamedTuple):
    make: Callable[[int], Call]
    donate: bool  # whether the baseline donates, which is what `make` does
    bars: dict[int, float]


FORMS = {
    "variables": _Form(variables, True, BARS),
    "functional": _Form(functional, False, BARS),
    "functional, dj.jit": _Form(functional_donated, True, BARS),
    "all PerReplica": _Form(all_per_replica, False, {}),
    "hand-written": _Form(by_hand, True, {}),
}


def _time_copies(
    form: _Form, num_leaves: int, num_pairs: int, ours_first: bool
) -> list[tuple[float, float]]:
    makers: dict[str, Callable[[], Call]] = {
        "ours": lambda: form.make(num_leaves),
        "baseline": lambda: by_hand(num_leaves, form.donate),
    }
    calls, seconds = {}, {}
    for side in ("ours", "baseline") if ours_first else ("baseline", "ours"):
        calls[side] = makers[side]()
        seconds[side] = dispatch_seconds(calls[side], _WARM_UP_CALLS)
    num_calls = max(_MIN_CALLS, math.ceil(_BATCH_SECONDS / max(seconds.values())))
    return interleave(
        lambda: dispatch_seconds(calls["ours"], num_calls),
        lambda: dispatch_seconds(calls["baseline"], num_calls),
        num_pairs,
    )


def measure(form: str, num_leaves: int, num_pairs: int) -> dict[str, Any]:
    """One row: microseconds per call on both sides and the median ratio."""
    pairs = []
    for copy in range(_NUM_COPIES):
        pairs += _time_copies(FORMS[form], num_leaves, num_pairs, ours_first=copy % 2 == 0)
    result = medians(pairs)
    bar = FORMS[form].bars.get(num_leaves)
    return {
        "state": form,
        "leaves": num_leaves,
        "ours us": result.ours_seconds * 1e6,
        "baseline us": result.baseline_seconds * 1e6,
        "ratio": result.ratio,
        "bar": bar,
        "within bar": None if bar is None else result.ratio <= bar,
    }


def run(quick: bool) -> list[dict[str, Any]]:
    """Rows for each form of state and number of leaves; quick stops at 100."""
    sizes, num_pairs = ((1, 10, 100), 4) if quick else ((1, 10, 100, 1000), 16)
    return [measure(form, size, num_pairs) for form in FORMS for size in sizes]


BENCHMARK = Benchmark(
    name="dispatch",
    title="Dispatch of one call, R = 1, against a hand-written jit(shard_map) call",
    columns=(
        "state",
        "leaves",
        "ours us",
        "baseline us",
        "ratio",
        "bar",
        "within bar",
    ),
    run=run,
)
