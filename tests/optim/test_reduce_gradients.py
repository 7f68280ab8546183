"""reduce_gradients: the reduction as a link of an optax chain."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distjax as dj
from distjax.errors import ContextError
from tests.optim.regression import initial, loss_fn, make_data, plain, split
from tests.replicas import ids, local


@pytest.mark.pairwise
@pytest.mark.parametrize("op", ["sum", "MEAN", dj.ReduceOp.SUM])
def test_reduces_a_tree(strategy, how, op):
    tx = dj.optim.reduce_gradients(op)

    def step(i):
        reduced, state = tx.update({"a": i, "b": (i + 1,)}, tx.init(None))
        assert jax.tree.leaves(state) == []
        return reduced

    out = how(lambda i: strategy.run(step, args=(i,)))(ids(strategy))
    count = strategy.num_replicas_in_sync
    total = count * (count - 1) / 2
    divisor = count if op == "MEAN" else 1
    assert float(out["a"]) == total / divisor
    assert float(out["b"][0]) == (total + count) / divisor


def test_a_functional_loop_equals_optax_on_one_device(strategy, how):
    """Parameters and state are arguments and results; what follows sees the global gradient."""
    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.05))
    tx = optax.chain(dj.optim.reduce_gradients("mean"), inner)

    def replica_step(params, state, x, y):
        updates, state = tx.update(jax.grad(loss_fn)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    step = how(lambda *args: strategy.run(replica_step, args=args))
    params = jax.tree.map(jnp.asarray, initial())
    state = tx.init(params)
    for i in range(3):
        params, state = step(params, state, *(split(strategy, a) for a in make_data(i)))
    for key, expected in plain(inner, 3).items():
        np.testing.assert_allclose(params[key], expected, rtol=2e-5, atol=1e-6)


def test_masked_parameters_are_left_alone(pair):
    tx = optax.masked(dj.optim.reduce_gradients("sum"), {"a": True, "b": False})

    def step(i):
        return tx.update({"a": i, "b": i}, tx.init({"a": i, "b": i}))[0]

    out = pair.run(step, args=(ids(pair),))
    assert float(out["a"]) == 1.0
    assert local(pair, out["b"]) == [0.0, 1.0]


def test_identity_in_the_default_context():
    tx = dj.optim.reduce_gradients("sum")
    g = np.ones(3)
    assert tx.update(g, tx.init(g))[0] is g


def test_one_all_reduce_per_leaf(mirrored):
    tx = dj.optim.reduce_gradients("mean")

    def step(i):
        return tx.update([i, i * 2, i * 3], tx.init(None))[0]

    lowered = dj.jit(lambda i: mirrored.run(step, args=(i,))).lower(ids(mirrored))
    assert lowered.as_text().count('"stablehlo.all_reduce"') == 3


def test_refused_in_cross_replica_context(pair):
    tx = dj.optim.reduce_gradients("sum")
    with pair.scope(), pytest.raises(ContextError, match="^reduce_gradients needs a replica"):
        tx.update(jnp.ones(2), tx.init(None))


def test_an_unknown_op():
    with pytest.raises(ValueError, match="MAX"):
        dj.optim.reduce_gradients("MAX")
