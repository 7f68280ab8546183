"""What does `dj.check` of a step take, beside the first plain run of the step?"""

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax

import distjax as dj
from benchmarks.report import Benchmark
from distjax.errors import RecompilationWarning

BAR = 5.0
_REPLICAS, _ROWS, _AXIS = 4, 16, "replica"
_rng = np.random.default_rng(0)

#: A new step, its state, and the arrays of a batch.
Step = tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]


def _draw(*shape: int) -> np.ndarray[Any, Any]:
    return _rng.normal(size=shape).astype(np.float32)


def linear() -> Step:
    """A linear regression by hand."""

    def step(w: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
        loss, grads = lax.pmean((loss, grads), _AXIS)
        return w - 0.1 * grads, loss

    return step, (jnp.ones(8),), (_draw(_ROWS, 8), _draw(_ROWS))


def mlp_nnx() -> Step:
    """Three layers of Flax NNX with Adam."""
    rngs = nnx.Rngs(0)
    layers = [nnx.Linear(16, 32, rngs=rngs), nnx.relu, nnx.Linear(32, 32, rngs=rngs), nnx.relu]
    model = nnx.Sequential(*layers, nnx.Linear(32, 4, rngs=rngs))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def step(model: Any, optimizer: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        loss, grads = lax.pmean((loss, grads), _AXIS)
        optimizer.update(model, grads)
        return loss

    return step, (model, optimizer), (_draw(_ROWS, 16), _draw(_ROWS, 4))


class _Cnn(nn.Module):
    """Two convolutions with batch norms over all replicas."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (8, 16):
            x = nn.Conv(features, (3, 3))(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, axis_name=_AXIS)(x))
        return nn.Dense(10)(x.mean((1, 2)))


def cnn_batch_norm() -> Step:
    """A convolutional network of linen with batch norms, and momentum."""
    net: Any = _Cnn()
    tx = optax.sgd(0.1, momentum=0.9)
    images, labels = _draw(_ROWS, 8, 8, 3), np.arange(_ROWS) % 10
    init = jax.vmap(lambda x: net.init(jax.random.key(0), x), axis_name=_AXIS)
    variables = init(images[None, :2])
    variables = jax.tree.map(lambda x: x[0], variables)
    state = variables, tx.init(variables["params"])

    def step(state: Any, images: jax.Array, labels: jax.Array) -> Any:
        variables, slots = state

        def loss_of(params: Any) -> Any:
            logits, new = net.apply({**variables, "params": params}, images, mutable="batch_stats")
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), new

        (loss, new), grads = jax.value_and_grad(loss_of, has_aux=True)(variables["params"])
        loss, grads = lax.pmean((loss, grads), _AXIS)
        updates, slots = tx.update(grads, slots)
        params = optax.apply_updates(variables["params"], updates)
        return ({"params": params, **new}, slots), loss

    return step, (state,), (images, labels)


class _Transformer(nn.Module):
    """Two blocks of a decoder."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(32, 16)(tokens)
        for _ in range(2):
            x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
            x = x + nn.Dense(16)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))
        return nn.Dense(32)(x)


def _train_state_step(tx: Any) -> Step:
    net: Any = _Transformer()
    tokens = _rng.integers(0, 32, (_ROWS, 9)).astype(np.int32)
    params = net.init(jax.random.key(0), tokens[:1, :-1])
    state = TrainState.create(apply_fn=net.apply, params=params, tx=tx)

    def step(state: TrainState, tokens: jax.Array) -> Any:
        def loss_of(params: Any) -> jax.Array:
            logits = net.apply(params, tokens[:, :-1])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return losses.mean()

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        loss, grads = lax.pmean((loss, grads), _AXIS)
        return state.apply_gradients(grads=grads), loss

    return step, (state,), (tokens,)


def transformer() -> Step:
    """Two blocks of a decoder with AdamW."""
    return _train_state_step(optax.adamw(1e-3))


def multi_steps() -> Step:
    """The same with `optax.MultiSteps`."""
    tx = optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=2).gradient_transformation()
    return _train_state_step(tx)


MODELS = (linear, mlp_nnx, cnn_batch_norm, transformer, multi_steps)


def _seconds(make: Callable[[], Step], checks: bool) -> float:
    """The processor time of a check, or of a first run, of a new step."""
    jax.clear_caches()
    strategy = dj.VirtualStrategy(_REPLICAS)
    step, state, arrays = make()
    batch = next(iter(strategy.distribute_dataset([arrays])))
    start = time.process_time()
    if checks:
        dj.check(step, *state, *batch, strategy=strategy)
    else:
        jax.block_until_ready(strategy.run(step, args=(*state, *batch)))
    return time.process_time() - start


def run(quick: bool) -> list[dict[str, Any]]:
    """A row for each model; runs and checks take turns."""
    warnings.simplefilter("ignore", RecompilationWarning)  # each run is of a new step
    return [_row(make, 1 if quick else 5) for make in MODELS]


def _row(make: Callable[[], Step], rounds: int) -> dict[str, Any]:
    _seconds(make, checks=False)  # pays for what JAX imports lazily
    pairs = [[_seconds(make, checks) for checks in (False, True)] for _ in range(rounds)]
    plain, check = (statistics.median(own) for own in zip(*pairs, strict=True))
    return {
        "step": make.__name__,
        "first run s": plain,
        "check s": check,
        "ratio": check / plain,
        "bar": BAR,
        "within bar": check <= BAR * plain,
    }


BENCHMARK = Benchmark(
    name="check_cost",
    title="dj.check of a right step, beside the first plain run of it: processor time",
    columns=("step", "first run s", "check s", "ratio", "bar", "within bar"),
    run=run,
)
