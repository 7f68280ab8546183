"""K steps as one compiled loop, against a hand-written `lax.scan` and one call per step."""

import concurrent.futures
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import distjax as dj
from benchmarks.models import REPLICA_AXIS
from benchmarks.report import Benchmark
from benchmarks.timing import Call, interleave, loop_seconds, medians
from distjax._src.data.input_layout import Steps

NUM_STEPS = 100
WIDTH = 128
BARS = {"scan by hand": 0.95, "one call per step": 1.0}
_BATCH = 64
_RATE = 0.01
_CALLS = 3  # so that input can be made while a program runs

#: Where the input of a call is when the call begins.
HOST, AHEAD, DEVICES = "on the host", "moved ahead by a thread", "on the devices"


def _weights() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8 for _ in range(2)]


def _batches(num_replicas: int) -> Iterator[np.ndarray]:
    """Batches without end, [R * B, width]."""
    rng = np.random.default_rng(1)
    shape = (num_replicas * _BATCH, WIDTH)
    return itertools.cycle([rng.normal(size=shape).astype(np.float32) for _ in range(NUM_STEPS)])


def _loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ weights[0]) @ weights[1] - x) ** 2)


# -- by hand -------------------------------------------------------------------


def _input_by_hand(mesh: jax.sharding.Mesh, place: str) -> Callable[[], jax.Array]:
    source = _batches(mesh.size)
    sharding = NamedSharding(mesh, P(None, REPLICA_AXIS))

    def moved() -> jax.Array:
        batches = itertools.islice(source, NUM_STEPS)
        stacked = np.stack([b.reshape(mesh.size, _BATCH, WIDTH) for b in batches])
        return jax.device_put(stacked, sharding)

    if place == HOST:
        return moved
    if place == DEVICES:
        xs = moved()
        return lambda: xs
    thread = concurrent.futures.ThreadPoolExecutor(1)
    ahead = [thread.submit(moved)]

    def from_thread() -> jax.Array:
        ahead.append(thread.submit(moved))
        return ahead.pop(0).result()

    return from_thread


def _by_hand(devices: list[jax.Device], place: str) -> Call:
    mesh = jax.sharding.Mesh(np.array(devices), (REPLICA_AXIS,), axis_types=(AxisType.Auto,))
    state = jax.device_put(_weights(), NamedSharding(mesh, P()))
    next_input = _input_by_hand(mesh, place)

    def steps(weights: list[jax.Array], xs: jax.Array) -> Any:
        def body(weights: list[jax.Array], x: jax.Array) -> Any:
            loss, grads = jax.value_and_grad(_loss)(weights, x)
            loss, grads = lax.pmean((loss, grads), REPLICA_AXIS)
            return [w - _RATE * g for w, g in zip(weights, grads, strict=True)], loss

        weights, losses = lax.scan(body, weights, xs[:, 0])
        return weights, losses[-1]

    specs = {"in_specs": (P(), P(None, REPLICA_AXIS)), "out_specs": (P(), P())}
    compiled = jax.jit(jax.shard_map(steps, mesh=mesh, check_vma=False, **specs), donate_argnums=0)

    def call() -> Any:
        nonlocal state
        state, loss = compiled(state, next_input())
        return loss

    return call


# -- with distjax --------------------------------------------------------------


def _replica_step(strategy: dj.Strategy) -> Callable[[jax.Array], Any]:
    with strategy.scope():
        weights = [dj.Variable(w) for w in _weights()]

    def apply(strategy: dj.Strategy, loss: Any, grads: list[Any]) -> Any:
        for w, g in zip(weights, strategy.reduce("mean", grads), strict=True):
            w.assign_sub(_RATE * g)
        return strategy.reduce("mean", loss)

    def replica_step(x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(_loss)([w.value for w in weights], x)
        return dj.get_replica_context().merge_call(apply, args=(loss, grads))

    return replica_step


def _input(strategy: dj.Strategy, place: str) -> Any:
    options = dj.InputOptions(prefetch=NUM_STEPS if place == AHEAD else 0)
    batches = _batches(strategy.num_replicas_in_sync)
    iterator = iter(strategy.distribute_dataset(batches, options))
    if place == DEVICES:
        steps = iterator.take(NUM_STEPS)

        def take(num_steps: int) -> Steps:
            return steps

        iterator.take = take
    return iterator


def _ours(devices: list[jax.Device], place: str) -> Call:
    strategy = dj.MirroredStrategy(devices)
    replica_step, iterator = _replica_step(strategy), _input(strategy, place)

    def step(context: dj.MultiStepContext, x: Any) -> None:
        context.set_last_step_output("loss", strategy.run(replica_step, args=(x,)))

    def call() -> Any:
        context = strategy.extended.run_steps_on_iterator(step, iterator, NUM_STEPS)
        return context.last_step_outputs["loss"]

    return call


def _one_call_per_step(devices: list[jax.Device], place: str) -> Call:
    strategy = dj.MirroredStrategy(devices)
    replica_step, iterator = _replica_step(strategy), _input(strategy, place)

    def call() -> Any:
        for x in itertools.islice(iterator, NUM_STEPS):
            loss = strategy.run(replica_step, args=(x,))
        return loss

    return call


# -- side by side --------------------------------------------------------------


def _row(devices: list[jax.Device], place: str, against: str, num_pairs: int) -> dict[str, Any]:
    make = {"scan by hand": _by_hand, "one call per step": _one_call_per_step}[against]
    ours, theirs = _ours(devices, place), make(devices, place)
    for call in (ours, theirs):
        loop_seconds(call, 2)
    found = medians(
        interleave(
            lambda: loop_seconds(ours, _CALLS), lambda: loop_seconds(theirs, _CALLS), num_pairs
        )
    )
    return {
        "replicas": len(devices),
        "against": against,
        "input": place,
        "ours steps/s": NUM_STEPS / found.ours_seconds,
        "theirs steps/s": NUM_STEPS / found.baseline_seconds,
        "steps/s ratio": 1 / found.ratio,
        "bar": BARS[against],
        "within bar": 1 / found.ratio >= BARS[against],
    }


def run(quick: bool) -> list[dict[str, Any]]:
    """Rows for R = 1, 2 and 8, as far as there are devices."""
    pairs = [("scan by hand", place) for place in (HOST, AHEAD, DEVICES)]
    pairs.append(("one call per step", HOST))
    return [
        _row(jax.devices()[:r], place, against, 4 if quick else 24)
        for r in (1, 2, 8)
        if r <= jax.device_count()
        for against, place in pairs
    ]


BENCHMARK = Benchmark(
    name="steps_on_iterator",
    title=f"run_steps_on_iterator with K = {NUM_STEPS}",
    columns=(
        "replicas",
        "against",
        "input",
        "ours steps/s",
        "theirs steps/s",
        "steps/s ratio",
        "bar",
        "within bar",
    ),
    run=run,
)
