"""What does a call cost before the device has anything to do?"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

import distjax as dj
from benchmarks import handwritten, tiny
from benchmarks.ours import per_replica
from benchmarks.report import Benchmark
from benchmarks.timing import Call, carry, dispatch_seconds, interleave, medians

# The bar for few leaves: how much more than by hand, in seconds, or as a multiple of a
# hand-written call with one leaf.
_MORE_SECONDS, _MORE_CALLS = 3e-6, 0.6
_FEW_LEAVES = 10
# The bar for many leaves, and for several devices: a multiple of the hand-written call.
_RATIOS = {"list": 1.10, "dict": 1.03}
_RATIO_ON_DEVICES = 1.10
_BATCH_SECONDS = 0.04
_MIN_CALLS = 20
_WARM_UP_CALLS = 50
_IN_FLIGHT = 8  # on several devices; distjax itself waits at 10 where JAX needs it
# Two copies of one loop differ by a few percent for as long as they live, depending on
# where their buffers are in memory. So each row pools several pairs of fresh copies.
_NUM_COPIES = 4


class Size(NamedTuple):
    """What the two sides of a row have in common."""

    devices: int
    leaves: int
    tree: str  # how the hand-written state is held, and ours where it is an argument


def _strategy(size: Size) -> dj.MirroredStrategy:
    return dj.MirroredStrategy(jax.devices()[: size.devices])


def variables(size: Size) -> Call:
    """State in variables, whose memory is reused."""
    strategy = _strategy(size)
    step = tiny.variable_step(strategy, size.leaves)
    batch = per_replica(strategy, tiny.batch(size.devices))
    return lambda: step(batch)


def functional(size: Size, donate: bool = False) -> Call:
    """Mirrored state through `strategy.run`, which donates nothing; or `dj.jit`, donated."""
    strategy = _strategy(size)
    state = tiny.state(size.leaves, size.tree)  # not placed, as a loop begins
    batch = per_replica(strategy, tiny.batch(size.devices))
    step = tiny.functional_step(strategy)
    return carry(dj.jit(step, donate_argnums=(0,)) if donate else step, state, batch)


def all_per_replica(size: Size) -> Call:
    """Every leaf a `PerReplica`, the same at each call and not donated.

    Results are not passed on, since with one replica they are plain arrays.
    """
    strategy = _strategy(size)
    state = per_replica(strategy, tiny.leaves(size.leaves, num_replicas=size.devices))
    batch = per_replica(strategy, tiny.batch(size.devices))
    step = tiny.functional_step(strategy)
    return lambda: step(state, batch)


def by_hand(size: Size, donate: bool = True) -> Call:
    """The hand-written call."""
    mesh = handwritten.make_mesh(jax.devices()[: size.devices])
    state = handwritten.replicate(tiny.state(size.leaves, size.tree), mesh)
    batch = handwritten.split(tiny.batch(size.devices), mesh)
    return carry(tiny.handwritten_step(mesh, donate), state, batch)


class _Form(NamedTuple):
    make: Callable[[Size], Call]
    donate: bool  # whether the baseline donates, which is what `make` does
    has_bar: bool


FORMS = {
    "variables": _Form(variables, True, True),
    "functional": _Form(functional, False, False),
    "functional, dj.jit": _Form(functools.partial(functional, donate=True), True, True),
    "all PerReplica": _Form(all_per_replica, False, False),
    "hand-written": _Form(by_hand, True, False),
}


def _time_copies(
    form: _Form, size: Size, num_pairs: int, ours_first: bool
) -> list[tuple[float, float]]:
    makers: dict[str, Callable[[], Call]] = {
        "ours": lambda: form.make(size),
        "baseline": lambda: by_hand(size, form.donate),
    }
    calls, seconds = {}, {}
    at_once = _IN_FLIGHT if size.devices > 1 else None
    for side in ("ours", "baseline") if ours_first else ("baseline", "ours"):
        calls[side] = makers[side]()
        seconds[side] = dispatch_seconds(calls[side], _WARM_UP_CALLS, at_once)
    num_calls = max(_MIN_CALLS, math.ceil(_BATCH_SECONDS / max(seconds.values())))
    return interleave(
        lambda: dispatch_seconds(calls["ours"], num_calls, at_once),
        lambda: dispatch_seconds(calls["baseline"], num_calls, at_once),
        num_pairs,
    )


@functools.cache
def _one_leaf_seconds() -> float:
    """The time of a hand-written call with one leaf on one device."""
    call = by_hand(Size(1, 1, "list"))
    dispatch_seconds(call, _WARM_UP_CALLS)
    return min(dispatch_seconds(call, 1000) for _ in range(10))


def _bar(size: Size, baseline_seconds: float) -> float:
    """Returns the most that ours may take, as a multiple of the baseline."""
    if size.devices > 1:
        return _RATIO_ON_DEVICES
    if size.leaves > _FEW_LEAVES:
        return _RATIOS[size.tree]
    more = max(_MORE_SECONDS, _MORE_CALLS * _one_leaf_seconds())
    return 1 + more / baseline_seconds


def measure(form: str, size: Size, num_pairs: int) -> dict[str, Any]:
    """One row: microseconds per call on both sides and the median ratio."""
    pairs = []
    for copy in range(_NUM_COPIES):
        pairs += _time_copies(FORMS[form], size, num_pairs, ours_first=copy % 2 == 0)
    result = medians(pairs)
    bar = _bar(size, result.baseline_seconds) if FORMS[form].has_bar else None
    return {
        "state": form,
        **size._asdict(),
        "ours us": result.ours_seconds * 1e6,
        "baseline us": result.baseline_seconds * 1e6,
        "ratio": result.ratio,
        "bar": bar,
        "within bar": None if bar is None else result.ratio <= bar,
    }


def run(quick: bool) -> list[dict[str, Any]]:
    """Rows for each form of state and size; quick stops at 100 leaves."""
    counts, num_pairs = ((1, 10, 100), 4) if quick else ((1, 10, 100, 1000), 8)
    rows = []
    for form in FORMS:
        trees = ("list",) if form == "all PerReplica" else ("list", "dict")
        sizes = [Size(1, count, tree) for count in counts for tree in trees]
        if len(jax.devices()) > 1:
            sizes += [Size(len(jax.devices()), 10, tree) for tree in trees]
        rows += [measure(form, size, num_pairs) for size in sizes]
    return rows


BENCHMARK = Benchmark(
    name="dispatch",
    title="Dispatch of one call against a hand-written jit(shard_map) call",
    columns=(
        "state",
        "devices",
        "leaves",
        "tree",
        "ours us",
        "baseline us",
        "ratio",
        "bar",
        "within bar",
    ),
    run=run,
)
