"""What share of a step's trace do proofs, facts and findings take?"""

import contextlib
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import distjax as dj
from benchmarks import models, ours
from benchmarks.handwritten import replicate
from benchmarks.report import Benchmark
from distjax._src import hooks
from distjax._src.program import program
from distjax._src.replica.analysis import Analysis
from distjax.errors import RecompilationWarning

BAR = 0.10
_CALLS = 20


class Clock:
    """Adds up the processor time of functions, counting nested calls once."""

    def __init__(self) -> None:
        self.seconds, self.num_calls, self._depth = 0.0, 0, 0

    def timed(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function, with its time counted."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.num_calls += 1
            self._depth += 1
            start = time.thread_time()
            try:
                return fn(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.thread_time() - start

        return call


#: Everything that a trace does for proofs and findings, as pairs of an owner and a name.
ANALYSIS = (
    (Analysis, "run"),
    (hooks, "on_traced"),
    (hooks, "on_call"),
)


@contextlib.contextmanager
def timed(clock: Clock, owners: Sequence[tuple[Any, str]]) -> Generator[None]:
    """Counts the time that functions take in a `with` block."""
    with contextlib.ExitStack() as stack:
        for owner, name in owners:
            fn = getattr(owner, name)
            is_event = isinstance(fn, hooks.Event)
            timed = hooks.Event(map(clock.timed, fn)) if is_event else clock.timed(fn)
            stack.enter_context(mock.patch.object(owner, name, timed))
        yield


# -- the steps -----------------------------------------------------------------


class _Block(nn.Module):
    """A pre-norm decoder block."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
        x = x + y
        y = nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1])(nn.gelu(y))


class _Flax(nn.Module):
    """A transformer of Flax modules."""

    num_layers: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(64, 32)(tokens)
        for _ in range(self.num_layers):
            x = _Block()(x)
        return nn.Dense(64)(nn.LayerNorm()(x))


def _flax(strategy: dj.MirroredStrategy, num_layers: int = 8) -> tuple[Any, ...]:
    """A `TrainState` with Adam; gradients and loss averaged."""
    model, count = _Flax(num_layers), strategy.num_replicas_in_sync
    tokens = np.random.default_rng(0).integers(0, 64, (2 * count, 16)).astype(np.int32)
    params = jax.jit(model.init)(jax.random.key(0), tokens[:1])
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    def make() -> Callable[..., Any]:
        def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
            logits = model.apply(params, tokens[:, :-1])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return losses.mean()

        def step(state: TrainState, tokens: jax.Array) -> Any:
            loss, grads = jax.value_and_grad(loss_fn)(state.params, tokens)
            loss, grads = dj.get_replica_context().all_reduce("mean", (loss, grads))
            return state.apply_gradients(grads=grads), loss

        return step

    return make, replicate(state, strategy.mesh), ours.per_replica(strategy, tokens)


def _scans(strategy: dj.MirroredStrategy, depth: int = 5) -> tuple[Any, ...]:
    """Nested scans whose carries become varying one by one, one in each iteration."""
    x = np.ones((strategy.num_replicas_in_sync, 8), np.float32)

    def make() -> Callable[..., Any]:
        def body(carry: tuple[jax.Array, ...], x: jax.Array, level: int) -> Any:
            if level:
                inner = lambda carry, _: (body(carry, x, level - 1), None)
                carry, _ = jax.lax.scan(inner, carry, length=3)
            first, *rest = carry
            return jnp.tanh(first + jnp.sin(rest[0])), *rest[1:], rest[-1] * 0.5 + x

        def step(w: jax.Array, x: jax.Array) -> jax.Array:
            grad = jax.grad(lambda w: jnp.mean(body((w,) * 4, x[0], depth)[0] ** 2))(w)
            return w - 0.1 * dj.get_replica_context().all_reduce("mean", grad)

        return step

    batch = ours.per_replica(strategy, x)
    return make, replicate(jnp.ones(8), strategy.mesh), batch


def _mlp(strategy: dj.MirroredStrategy) -> tuple[Any, ...]:
    """Three layers with momentum."""
    model = models.mlp()
    batch = ours.per_replica(strategy, model.batch(16 * strategy.num_replicas_in_sync))
    state = replicate(models.initial_state(model), strategy.mesh)

    def make() -> Callable[..., Any]:
        def step(state: models.State, batch: Any) -> Any:
            context = dj.get_replica_context()
            loss, stats, grads = models.local_gradients(model, state, batch)
            loss, grads = context.all_reduce("mean", (loss, grads))
            return models.apply_gradients(model, state, grads, stats), loss

        return step

    return make, state, batch


PROGRAMS = {
    "plain MLP": _mlp,
    "Flax transformer, 8 layers": _flax,
    "5 nested scans, their gradient": _scans,
}


# -- measuring -----------------------------------------------------------------


def trace_seconds(
    strategy: dj.MirroredStrategy, make: Callable[[], Callable[..., Any]], *args: Any
) -> tuple[float, float, float]:
    """Returns the seconds of the analysis, of the whole trace, and of trace and lowering."""
    jax.clear_caches()
    warnings.simplefilter("ignore", RecompilationWarning)  # first calls are what is measured
    gc.collect()
    step, analysis, trace = make(), Clock(), Clock()
    compiled = dj.jit(lambda *args: strategy.run(step, args=args))
    with timed(trace, [(program, "discover")]), timed(analysis, ANALYSIS):
        start = time.thread_time()
        compiled.lower(*args)
        seconds = time.thread_time() - start
    return analysis.seconds, trace.seconds, seconds


def calls_of_analysis(
    strategy: dj.MirroredStrategy, make: Callable[[], Callable[..., Any]], *args: Any
) -> float:
    """How many times one call of a compiled step calls the analysis."""
    step, clock = make(), Clock()
    for _ in range(2):  # the second call compares its feedback with that of the first
        strategy.run(step, args=args)
    with timed(clock, ANALYSIS):
        for _ in range(_CALLS):
            jax.block_until_ready(strategy.run(step, args=args))
    return clock.num_calls / _CALLS


def run(quick: bool) -> list[dict[str, Any]]:
    """A row for each program. Programs take turns; both figures of a share are of one trace."""
    strategy = dj.MirroredStrategy()
    steps = {name: build(strategy) for name, build in PROGRAMS.items()}
    traces: dict[str, list[tuple[float, float, float]]] = {name: [] for name in steps}
    for round_number in range(5 if quick else 12):
        for name, step in steps.items():
            seconds = trace_seconds(strategy, *step)
            if round_number:  # the first round pays for what JAX imports lazily
                traces[name].append(seconds)
    return [
        _row(name, traces[name], calls_of_analysis(strategy, *step)) for name, step in steps.items()
    ]


def _row(name: str, traces: list[tuple[float, float, float]], num_calls: float) -> dict[str, Any]:
    share = statistics.median(analysis / trace for analysis, trace, _ in traces)
    return {
        "step": name,
        "analysis ms": 1e3 * statistics.median(analysis for analysis, _, _ in traces),
        "trace ms": 1e3 * statistics.median(trace for _, trace, _ in traces),
        "of trace": share,
        "of trace + lower": statistics.median(analysis / total for analysis, _, total in traces),
        "bar": BAR,
        "within bar": share <= BAR,
        "per call": num_calls,
    }


BENCHMARK = Benchmark(
    name="analysis_cost",
    title="The analysis of replica functions, as a share of trace and lowering",
    columns=(
        "step",
        "analysis ms",
        "trace ms",
        "of trace",
        "of trace + lower",
        "bar",
        "within bar",
        "per call",
    ),
    run=run,
)
