"""K steps as one compiled loop, against a `lax.scan` by hand and one call per step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import distjax as dj
from benchmarks.models import REPLICA_AXIS
from benchmarks.report import Benchmark
from benchmarks.timing import interleave, loop_seconds, medians

NUM_STEPS = 100
WIDTH = 128
_BATCH = 64
_RATE = 0.01


def _weights() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8 for _ in range(2)]


def _batches(num_replicas: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    shape = (num_replicas * _BATCH, WIDTH)
    return [rng.normal(size=shape).astype(np.float32) for _ in range(NUM_STEPS)]


def _loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ weights[0]) @ weights[1] - x) ** 2)


def _by_hand(devices: list[jax.Device]) -> Callable[[], Any]:
    mesh = jax.sharding.Mesh(
        np.array(devices), (REPLICA_AXIS,), axis_types=(jax.sharding.AxisType.Auto,)
    )
    count = len(devices)
    state = jax.device_put(_weights(), NamedSharding(mesh, P()))
    batches = _batches(count)

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
        stacked = np.stack([b.reshape(count, _BATCH, WIDTH) for b in batches])
        xs = jax.device_put(stacked, NamedSharding(mesh, P(None, REPLICA_AXIS)))
        state, loss = compiled(state, xs)
        return loss

    return call


def _ours(devices: list[jax.Device], steps_per_call: int) -> Callable[[], Any]:
    strategy = dj.MirroredStrategy(devices)
    with strategy.scope():
        weights = [dj.Variable(w) for w in _weights()]

    def apply(strategy: dj.Strategy, loss: Any, grads: list[Any]) -> Any:
        for w, g in zip(weights, strategy.reduce("mean", grads), strict=True):
            w.assign_sub(_RATE * g)
        return strategy.reduce("mean", loss)

    def replica_step(x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(_loss)([w.value for w in weights], x)
        return dj.get_replica_context().merge_call(apply, args=(loss, grads))

    def step(context: dj.MultiStepContext, x: Any) -> None:
        context.set_last_step_output("loss", strategy.run(replica_step, args=(x,)))

    dataset = strategy.distribute_dataset(_batches(len(devices)), dj.InputOptions(prefetch=0))

    def call() -> Any:
        iterator = iter(dataset)
        for _ in range(NUM_STEPS // steps_per_call):
            context = strategy.extended.run_steps_on_iterator(step, iterator, steps_per_call)
        return context.last_step_outputs["loss"]

    return call


def measure(num_replicas: int, num_pairs: int) -> list[dict[str, Any]]:
    """Two rows: our loop against the loop by hand, and against a call per step."""
    devices = jax.devices()[:num_replicas]
    calls = {
        "scan by hand": _by_hand(devices),
        "one call per step": _ours(devices, steps_per_call=1),
    }
    ours = _ours(devices, steps_per_call=NUM_STEPS)
    rows = []
    for name, other in calls.items():
        for call in (ours, other):
            loop_seconds(call, 2)
        pairs = interleave(
            lambda: loop_seconds(ours, 5), lambda other=other: loop_seconds(other, 5), num_pairs
        )
        found = medians(pairs)
        rows.append(
            {
                "replicas": num_replicas,
                "against": name,
                "ours steps/s": NUM_STEPS / found.ours_seconds,
                "theirs steps/s": NUM_STEPS / found.baseline_seconds,
                "steps/s ratio": 1 / found.ratio,
            }
        )
    return rows


def run(quick: bool) -> list[dict[str, Any]]:
    """Rows for R = 1, 2 and 8, as far as there are devices."""
    counts = [r for r in (1, 2, 8) if r <= jax.device_count()]
    return [row for r in counts for row in measure(r, 2 if quick else 8)]


BENCHMARK = Benchmark(
    name="steps_on_iterator",
    title=f"run_steps_on_iterator with K = {NUM_STEPS}",
    columns=("replicas", "against", "ours steps/s", "theirs steps/s", "steps/s ratio"),
    run=run,
)
