"""Stacks of layers split over the replicas (ZeRO-3): a scan gathers one layer at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import distjax as dj
from distjax.testing.hlo import count_collectives
from tests.drill_mark import all_drills_but

WIDTH, ROWS = 32, 64
zero = functools.partial(dj.ShardedStrategy, partition="parameters", min_split_bytes=0)


def layer(x, params):
    w, b = params
    return jnp.tanh(x @ w + b), None


def forward(ws, x):
    return jnp.mean(lax.scan(jax.checkpoint(layer, prevent_cse=False), x, ws)[0] ** 2)


def without_remat(ws, x):
    return jnp.mean(lax.scan(layer, x, ws)[0] ** 2)


def backwards(ws, x):
    return jnp.mean(lax.scan(layer, x, ws, reverse=True)[0] ** 2)


def all_recomputed(ws, x):
    return jax.checkpoint(forward, prevent_cse=False)(ws, x)


def in_turns(ws, x):
    parts = x.reshape(2, -1, x.shape[-1])
    return lax.scan(lambda total, part: (total + forward(ws, part), None), 0.0, parts)[0] / 2


def twice(ws, x):
    return forward(ws, x) + 0.1 * backwards(ws, x)


def read_otherwise(ws, x):
    return forward(ws, x) + 1e-2 * jnp.mean(ws[0][0])


def in_bfloat16(ws, x):
    ws, x = jax.tree.map(lambda v: v.astype(jnp.bfloat16), (ws, x))
    return forward(ws, x).astype(jnp.float32)


LOSSES = (
    in_bfloat16,
    forward,
    without_remat,
    backwards,
    all_recomputed,
    in_turns,
    twice,
    read_otherwise,
)


def train(strategy, loss, num_layers, spec=None, width=WIDTH):
    """Returns three losses, and the compiled step."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(num_layers, width, width)).astype(np.float32) / 6
    with strategy.scope():
        w = dj.Variable(w, sharding=spec)
        b = dj.Variable(np.full((num_layers, width), 0.1, np.float32))
        optimizer = dj.optim.Optimizer(
            optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)), "mean"
        )
        optimizer.init([w, b])

    def step(x):
        value, grads = jax.value_and_grad(loss)((w.value, b.value), x)
        optimizer.apply_gradients(zip(grads, [w, b], strict=True))
        return dj.get_replica_context().all_reduce("mean", value)

    call = dj.jit(lambda x: strategy.run(step, args=(x,)))
    (x,) = strategy.distribute_dataset([rng.normal(size=(ROWS, width)).astype(np.float32)])
    return [float(call(x)) for _ in range(3)], call.lower(x).compile()


@functools.cache
def on_one_device(loss, num_layers, width=WIDTH):
    return train(dj.OneDeviceStrategy(), loss, num_layers, width=width)[0]


def gathered_bytes(compiled):
    return count_collectives(compiled.as_text())["all-gather"].result_bytes


#: Layers that 8 replicas do not divide, and layers that they do: those are exchanged.
@pytest.mark.parametrize("num_layers", all_drills_but([12], [12, 16]))
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_a_turn_gathers_its_layer(loss, num_layers):
    losses, compiled = train(zero(), loss, num_layers)
    atol = 1e-3 if loss is in_bfloat16 else 1e-6
    np.testing.assert_allclose(losses, on_one_device(loss, num_layers), atol=atol)
    is_whole = loss is read_otherwise
    scans = {twice: 4, all_recomputed: 4}.get(loss, 3)
    most = scans * 4 * WIDTH * (WIDTH + 1)
    stack = num_layers * 4 * WIDTH * WIDTH
    assert gathered_bytes(compiled) > stack if is_whole else gathered_bytes(compiled) <= most
    if loss in (forward, all_recomputed, in_bfloat16):
        assert compiled.memory_analysis().temp_size_in_bytes < stack


@pytest.mark.parametrize("loss", [forward, in_bfloat16], ids=lambda f: f.__name__)
@pytest.mark.parametrize("num_layers", all_drills_but([6], [6, 8]))
def test_with_model_axes(num_layers, loss):
    strategy = zero(model_axes={"model": 2})
    losses, compiled = train(strategy, loss, num_layers, P(None, None, "model"))
    atol = 1e-3 if loss is in_bfloat16 else 1e-6
    np.testing.assert_allclose(losses, on_one_device(loss, num_layers), atol=atol)
    of_layer = 4 * WIDTH * WIDTH // 2
    assert gathered_bytes(compiled) <= 4 * (of_layer + 4 * WIDTH)


@pytest.mark.parametrize(
    ("loss", "axes"), [(forward, None), (in_bfloat16, None), (in_turns, None), (forward, 2)]
)
def test_padded_layers(loss, axes):
    """R divides neither 7 layers nor 38 columns: each turn leaves the padding of its layer out."""
    width = 38
    options = {"model_axes": {"model": axes}} if axes else {}
    spec = P(None, None, "model") if axes else None
    losses, compiled = train(zero(**options), loss, 7, spec, width)
    atol = 1e-3 if loss is in_bfloat16 else 1e-6
    np.testing.assert_allclose(losses, on_one_device(loss, 7, width), atol=atol)
    padded = width + 2
    assert gathered_bytes(compiled) <= 3 * 4 * padded * (width + 1)


@pytest.mark.parametrize("axes", [None, {"model": 2}])
@pytest.mark.parametrize("width", [WIDTH, 38])
def test_explain_names_the_lines(axes, width):
    strategy = zero(model_axes=axes)
    with strategy.scope():
        w = dj.Variable(np.ones((11, width, width), np.float32), sharding=P(None, None, "model"))
        optimizer = dj.optim.Optimizer(optax.sgd(0.1), "mean")
        optimizer.init([w])

    def step(x):
        loss = lambda w: jnp.mean(lax.scan(lambda x, w: (x @ w, None), x, w)[0] ** 2)
        optimizer.apply_gradients([(jax.grad(loss)(w.value), w)])

    (x,) = strategy.distribute_dataset([np.ones((ROWS, width), np.float32)])
    found = dj.explain(step, x, strategy=strategy)
    moved = [c for c in (*found.written, *found.compiled) if c.over != "model"]
    lines = {c.kind: c.source for c in moved}
    assert set(lines) == {"all-gather", "reduce-scatter"}
    assert all("test_stacks.py" in line and line.endswith("step)") for line in lines.values()), (
        lines
    )
