"""Steps with Flax objects: NNX beside `nnx.jit` and hand-written, linen beside `pmap`."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from flax import jax_utils, nnx
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import distjax as dj
from benchmarks import handwritten
from benchmarks.models import REPLICA_AXIS
from benchmarks.ours import per_replica
from benchmarks.report import Benchmark
from benchmarks.timing import Call, carry, interleave, loop_seconds, medians

_BATCH = 4  # per replica; small enough for the work on the host to show
_SIZE = 8
_AWAIT_EVERY = 10
_CALLS = 40
_RATE = 0.01


def _batch(num_replicas: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = (num_replicas * _BATCH, _SIZE, _SIZE, 1)
    label = rng.integers(0, 10, shape[0]).astype(np.int32)
    return {"image": rng.normal(size=shape).astype(np.float32), "label": label}


def _loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# -- NNX -----------------------------------------------------------------------


class _Network(nnx.Module):
    """Two convolutions, each with batch normalization, dropout, two dense layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 4, (3, 3), strides=2, rngs=rngs)
        self.norm1 = nnx.BatchNorm(4, rngs=rngs)
        self.conv2 = nnx.Conv(4, 8, (3, 3), strides=2, rngs=rngs)
        self.norm2 = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)
        self.dense1 = nnx.Linear(8 * (_SIZE // 4) ** 2, 16, rngs=rngs)
        self.dense2 = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs) -> jax.Array:
        x = nnx.relu(self.norm1(self.conv1(x)))
        x = nnx.relu(self.norm2(self.conv2(x)))
        x = nnx.relu(self.dense1(x.reshape(x.shape[0], -1)))
        return self.dense2(self.dropout(x, rngs=rngs))


def _nnx_objects() -> tuple[Any, ...]:
    """A model, its optimizer, metrics and random streams: 48 variables."""
    model = _Network(nnx.Rngs(0))
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    return model, nnx.Optimizer(model, optax.adamw(_RATE), wrt=nnx.Param), metrics, nnx.Rngs(1)


def _nnx_step(all_reduce: Callable[[Any], Any] = lambda grads: grads) -> Callable[..., Any]:
    """The step of an NNX training loop; returns the loss."""

    def loss_fn(model: Any, rngs: Any, batch: Any) -> Any:
        logits = model(batch["image"], rngs)
        return _loss(logits, batch["label"]), logits

    def step(model: Any, optimizer: Any, metrics: Any, rngs: Any, batch: Any) -> Any:
        grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
        (loss, logits), grads = grad_fn(model, rngs, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
        loss, grads = all_reduce((loss, grads))
        optimizer.update(model, grads)
        return loss

    return step


def _nnx_jit(devices: list[jax.Device], donate: bool) -> Call:
    donated = (0, 1, 2, 3) if donate else ()
    step, objects = nnx.jit(_nnx_step(), donate_argnums=donated), _nnx_objects()
    batch = jax.device_put(_batch(1), devices[0])
    return lambda: step(*objects, batch)


def _nnx_cached_partial(devices: list[jax.Device]) -> Call:
    step = nnx.cached_partial(nnx.jit(_nnx_step()), *_nnx_objects())
    batch = jax.device_put(_batch(1), devices[0])
    return lambda: step(batch)


def _nnx_by_hand(devices: list[jax.Device]) -> Call:
    """Objects split once; the state is carried and donated."""
    mesh = handwritten.make_mesh(devices)
    graphdef, state = nnx.split(_nnx_objects())
    return carry(
        handwritten.jit_over_replicas(_local_step(graphdef), mesh, donate=True),
        handwritten.replicate(state, mesh),
        handwritten.split(_batch(mesh.size), mesh),
    )


def _nnx_by_hand_each_step(devices: list[jax.Device]) -> Call:
    """Objects split before each step and updated after it: always up to date, as with `run`."""
    mesh, objects = handwritten.make_mesh(devices), _nnx_objects()
    graphdef, state = nnx.split(objects)
    nnx.update(objects, handwritten.replicate(state, mesh))
    compiled = handwritten.jit_over_replicas(_local_step(graphdef), mesh, donate=False)
    batch = handwritten.split(_batch(mesh.size), mesh)

    def call() -> Any:
        _, state = nnx.split(objects)
        state, loss = compiled(state, batch)
        nnx.update(objects, state)
        return loss

    return call


def _local_step(graphdef: Any) -> Callable[..., Any]:
    """The body of a `shard_map`: merges the objects, and applies distjax's rules by hand."""
    step = _nnx_step(lambda tree: lax.pmean(tree, REPLICA_AXIS))

    def local_step(state: Any, batch: Any) -> Any:
        objects = model, _, metrics, rngs = nnx.merge(graphdef, state)
        before, keys = nnx.state(metrics), nnx.state(rngs, nnx.RngKey)
        replica = lax.axis_index(REPLICA_AXIS)
        nnx.update(rngs, jax.tree.map(lambda key: jax.random.fold_in(key, replica), keys))
        metrics.reset()
        loss = step(*objects, batch)
        parts = lax.psum(nnx.state(metrics), REPLICA_AXIS)
        nnx.update(metrics, jax.tree.map(lambda a, b: a + b, before, parts))
        nnx.update(model, lax.pmean(nnx.state(model, nnx.BatchStat), REPLICA_AXIS))
        nnx.update(rngs, keys)
        return nnx.state(objects), loss

    return local_step


def _nnx_ours(devices: list[jax.Device], donate: bool) -> Call:
    strategy, objects = dj.MirroredStrategy(devices), _nnx_objects()
    (batch,) = strategy.distribute_dataset([_batch(len(devices))])
    step = _nnx_step(lambda tree: dj.get_replica_context().all_reduce("mean", tree))
    if not donate:
        return lambda: strategy.run(step, args=(*objects, batch))
    with strategy.scope():
        for each in objects:
            dj.flax.place(each)
    donated = dj.jit(lambda *args: strategy.run(step, args=args), donate_argnums=(0, 1, 2, 3))
    return lambda: donated(*objects, batch)


# -- linen ---------------------------------------------------------------------


class _LinenNetwork(nn.Module):
    """Six dense layers, each with batch normalization."""

    axis_name: str | None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        for _ in range(6):
            x = nn.Dense(16)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, axis_name=self.axis_name)(x))
        return nn.Dense(10)(x)


class _State(TrainState):
    batch_stats: Any


def _linen_state(is_synchronised: bool) -> _State:
    network = _LinenNetwork(REPLICA_AXIS if is_synchronised else None)
    variables = network.init(jax.random.key(0), np.zeros((1, _SIZE, _SIZE, 1), np.float32))
    return _State.create(apply_fn=network.apply, tx=optax.adam(_RATE), **variables)


def _linen_step(state: _State, batch: Any) -> tuple[_State, jax.Array]:
    """The step of a `pmap` training loop; both sides run it unchanged."""

    def loss_fn(params: Any) -> Any:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
        return _loss(logits, batch["label"]), new["batch_stats"]

    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    loss, grads = lax.pmean((loss, grads), REPLICA_AXIS)
    return state.apply_gradients(grads=grads, batch_stats=stats), loss


def _linen_pmap(devices: list[jax.Device], donate: bool, is_synchronised: bool) -> Call:
    step = jax.pmap(
        _linen_step, REPLICA_AXIS, devices=devices, donate_argnums=(0,) if donate else ()
    )
    state = jax_utils.replicate(_linen_state(is_synchronised), devices)
    split = lambda x: x.reshape(len(devices), _BATCH, *x.shape[1:])
    mesh = Mesh(np.array(devices), (REPLICA_AXIS,))
    sharding = jax.sharding.NamedSharding(mesh, P(REPLICA_AXIS))
    return carry(step, state, jax.device_put(jax.tree.map(split, _batch(mesh.size)), sharding))


def _linen_ours(devices: list[jax.Device], donate: bool, is_synchronised: bool) -> Call:
    strategy = dj.MirroredStrategy(devices)
    state = _linen_state(is_synchronised)
    if not is_synchronised:
        copies = jax.tree.map(lambda x: np.tile(x, len(devices)), state.batch_stats)
        state = state.replace(batch_stats=per_replica(strategy, copies))
    (batch,) = strategy.distribute_dataset([_batch(len(devices))])
    run = lambda state, batch: strategy.run(_linen_step, args=(state, batch))
    return carry(dj.jit(run, donate_argnums=0) if donate else run, state, batch)


# -- side by side --------------------------------------------------------------


def _rows(devices: list[jax.Device]) -> list[tuple[str, str, Call, Call, float | None]]:
    """What to measure: the objects, what against, our call, theirs, the bar."""
    run, donated = _nnx_ours(devices, False), _nnx_ours(devices, True)
    if len(devices) == 1:
        return [
            ("NNX", "nnx.jit", run, _nnx_jit(devices, False), 1.0),
            ("NNX, donated", "nnx.jit", donated, _nnx_jit(devices, True), 1.0),
            ("NNX", "nnx.cached_partial", run, _nnx_cached_partial(devices), None),
        ]
    forms = {
        "linen": (False, True),
        "linen, donated": (True, True),
        "linen, statistics per replica": (False, False),
    }
    return [
        ("NNX", "split and updated by hand", run, _nnx_by_hand_each_step(devices), 1.1),
        ("NNX, donated", "shard_map", donated, _nnx_by_hand(devices), None),
        *(
            (name, "pmap", _linen_ours(devices, *form), _linen_pmap(devices, *form), 1.1)
            for name, form in forms.items()
        ),
    ]


def _row(
    devices: list[jax.Device],
    form: str,
    against: str,
    ours: Call,
    theirs: Call,
    bar: float | None,
    num_pairs: int,
) -> dict[str, Any]:
    for call in (ours, theirs):
        loop_seconds(call, _AWAIT_EVERY, await_every=1)
    found = medians(
        interleave(
            lambda: loop_seconds(ours, _CALLS, _AWAIT_EVERY),
            lambda: loop_seconds(theirs, _CALLS, _AWAIT_EVERY),
            num_pairs,
        )
    )
    return {
        "replicas": len(devices),
        "objects": form,
        "against": against,
        "ours us": found.ours_seconds * 1e6,
        "theirs us": found.baseline_seconds * 1e6,
        "ratio": found.ratio,
        "bar": bar,
        "within bar": None if bar is None else found.ratio <= bar,
    }


def run(quick: bool) -> list[dict[str, Any]]:
    """Rows for R = 1, and for R = 8 or as many devices as there are."""
    num_pairs = 4 if quick else 16
    counts = sorted({1, min(8, jax.device_count())})
    return [
        _row(jax.devices()[:r], *row, num_pairs) for r in counts for row in _rows(jax.devices()[:r])
    ]


BENCHMARK = Benchmark(
    name="flax_steps",
    title="A small step with Flax objects",
    columns=(
        "replicas",
        "objects",
        "against",
        "ours us",
        "theirs us",
        "ratio",
        "bar",
        "within bar",
    ),
    run=run,
)
