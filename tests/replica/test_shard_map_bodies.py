"""Bodies that were written for `jax.shard_map`: casts of varying types, derivatives in them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distjax as dj
from tests.replicas import ids, local


def cast(x):
    return lax.pcast(x, "replica", to="varying")


def of_typeof(x):
    return jax.typeof(x).manual_axis_type.varying


def test_pcast_is_the_identity_and_no_proof(pair):
    def step(w, x):
        return cast(w), cast(x), lax.psum(cast(w) * cast(x), "replica")

    w, x, total = pair.run(step, args=(jnp.float32(3), ids(pair)))
    assert isinstance(w, jax.Array) and float(w) == 3  # what was equal stays proved
    assert isinstance(x, dj.PerReplica) and local(pair, x) == [0, 1]
    assert float(total) == 3


def test_the_types_show_nothing_varying(pair):
    seen = []

    def step(w, x):
        seen.extend(map(of_typeof, (w, x, w * x, lax.psum(x, "replica"))))
        return x

    pair.run(step, args=(jnp.float32(3), ids(pair)))
    assert seen == [frozenset()] * 4


def test_a_step_of_shard_map_runs_as_it_is(pair):
    """The gradient by the cast parameters is that of this replica: it is reduced by hand."""

    def step(w, x):
        def loss(w):
            carry, _ = lax.scan(lambda c, y: (c + w * y, None), cast(jnp.zeros(())), x)
            return carry

        grads = jax.grad(loss)(cast(w))
        inner = jax.jit(lambda w: lax.cond(w > 0, cast, lambda w: w, w))(w)
        return w - lax.pmean(grads, "replica"), inner

    x = ids(pair).map(lambda r: jnp.stack([r, r + 1]))
    w, inner = pair.run(step, args=(jnp.float32(5), x))
    assert float(w) == 5 - np.mean([1, 3]) and float(inner) == 5


def test_variables_and_merges_with_a_cast(pair):
    with pair.scope():
        v = dj.Variable(2.0, aggregation=dj.VariableAggregation.SUM)

    def step(x):
        ctx = dj.get_replica_context()
        v.assign_add(cast(x))
        return ctx.merge_call(lambda strategy, x: strategy.reduce("sum", x), args=(cast(x),))

    assert float(pair.run(step, args=(ids(pair),))) == 1 and float(v.value) == 3


def test_an_assertion_of_the_body_comes_out(pair):
    def step(x):
        assert x.shape == (1,), "mine"

    with pytest.raises(AssertionError, match="mine"):
        pair.run(step, args=(ids(pair),))


# -- derivatives inside and around, beside pmap and shard_map -------------------


def total(w, x):
    return jnp.sum(w * x)


def test_derivatives_by_what_is_equal_and_what_is_not(pair):
    """The table of `docs/migration/shard_map.md`: x is 0, 1, and the loss w * x."""
    w, x = jnp.float32(2), ids(pair)
    shards = x.map(lambda r: 2 + 0 * r)
    gradient = lambda w, x: jax.grad(total)(w, x)
    assert local(pair, pair.run(gradient, args=(w, x))) == [0, 1]
    assert local(pair, pair.run(gradient, args=(shards, x))) == [0, 1]

    def around(w, reduced):
        step = lambda w, x: lax.pmean(total(w, x), "replica") if reduced else total(w, x)
        out = pair.run(step, args=(w, x))
        return out if reduced else out.stacked.sum()

    assert float(jax.grad(lambda w: around(w, False))(w)) == 1  # the sum over the replicas
    assert float(jax.grad(lambda w: around(w, True))(w)) == 0.5  # the mean
    of_shards = lambda reduced: jax.grad(
        lambda stacked: around(dj.PerReplica(stacked, shards.topology), reduced)
    )(shards.stacked)
    assert of_shards(False).tolist() == [0, 1] and of_shards(True).tolist() == [0, 0.5]
