"""A call of `dj.pmap` beside one of `jax.pmap` and a hand-written `jit(shard_map)`."""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import distjax as dj
from benchmarks import handwritten
from benchmarks.models import REPLICA_AXIS
from benchmarks.report import Benchmark
from benchmarks.timing import Call, carry, interleave, loop_seconds, medians

BAR = 1.1
_WARM_UP_CALLS = 20
#: On the CPU, JAX before 0.12 hangs where some 30 programs with collectives wait.
_AWAIT_EVERY = 10
_NUM_CALLS = {10: 200, 100: 80, 1000: 30}


def _step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], Any]:
    mean = lax.pmean(batch.mean(), REPLICA_AXIS)
    return jax.tree.map(lambda x: x + mean, state), mean


def _by_hand(devices: list[jax.Device]) -> Callable[..., Any]:
    def on_blocks(*blocks: Any) -> Any:
        rows = jax.tree.map(lambda x: lax.squeeze(x, (0,)), blocks)
        return jax.tree.map(lambda x: lax.expand_dims(x, (0,)), _step(*rows))

    mapped = jax.shard_map(
        on_blocks,
        mesh=handwritten.make_mesh(devices),
        in_specs=P(REPLICA_AXIS),
        out_specs=P(REPLICA_AXIS),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=0)


FORMS: dict[str, Callable[[list[jax.Device]], Callable[..., Any]]] = {
    "dj.pmap": lambda devices: dj.pmap(_step, REPLICA_AXIS, devices=devices, donate_argnums=0),
    "jax.pmap": lambda devices: jax.pmap(_step, REPLICA_AXIS, devices=devices, donate_argnums=0),
    "hand-written": _by_hand,
}


def _call(form: str, devices: list[jax.Device], num_leaves: int) -> Call:
    """A call with replicated state, a dict of leaves [R, 8], which it donates."""
    state = {f"w{i:04}": np.zeros((len(devices), 8), np.float32) for i in range(num_leaves)}
    mesh = handwritten.make_mesh(devices)
    rows = np.ones((len(devices), 4), np.float32)
    call = carry(
        FORMS[form](devices), handwritten.split(state, mesh), handwritten.split(rows, mesh)
    )
    loop_seconds(call, _WARM_UP_CALLS, _AWAIT_EVERY)
    return call


def _host_seconds(call: Call, num_calls: int) -> float:
    """The processor time that the calling thread spends per call.

    The clock stops every few calls, while a result is awaited.
    """
    seconds = 0.0
    for _ in range(num_calls // _AWAIT_EVERY):
        start = time.thread_time()
        for _ in range(_AWAIT_EVERY):
            result = call()
        seconds += time.thread_time() - start
        jax.block_until_ready(result)
    return seconds / num_calls


def measure(ours: str, against: str, num_devices: int, num_leaves: int, pairs: int) -> Any:
    """One row: microseconds per call on both sides and the median ratio."""
    devices = jax.devices()[:num_devices]
    first, second = (_call(form, devices, num_leaves) for form in (ours, against))
    num_calls = _NUM_CALLS[num_leaves]
    result = medians(
        interleave(
            lambda: _host_seconds(first, num_calls),
            lambda: _host_seconds(second, num_calls),
            pairs,
        )
    )
    bar = BAR if (ours, against) == ("dj.pmap", "jax.pmap") else None
    return {
        "call": ours,
        "against": against,
        "devices": num_devices,
        "leaves": num_leaves,
        "call us": result.ours_seconds * 1e6,
        "against us": result.baseline_seconds * 1e6,
        "ratio": result.ratio,
        "bar": bar,
        "within bar": None if bar is None else result.ratio <= bar,
    }


def run(quick: bool) -> list[dict[str, Any]]:
    """Rows for each number of leaves, on one device and on all."""
    sizes, pairs = ((10, 100), 6) if quick else ((10, 100, 1000), 16)
    compared = [("dj.pmap", "jax.pmap"), ("jax.pmap", "hand-written")]
    return [
        measure(*names, count, size, pairs)
        for names in compared
        for count in sorted({1, len(jax.devices())})
        for size in sizes
    ]


BENCHMARK = Benchmark(
    name="mapped_calls",
    title="A call of dj.pmap beside jax.pmap, and of that beside a hand-written jit(shard_map)",
    columns=(
        "call",
        "against",
        "devices",
        "leaves",
        "call us",
        "against us",
        "ratio",
        "bar",
        "within bar",
    ),
    run=run,
)
