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


# -- derivatives inside and around, as the table of docs/migration/shard_map.md ----

LOSSES = {
    "loss": lambda w, x: w * x,
    "psum": lambda w, x: lax.psum(w * x, "replica"),
    "pmean": lambda w, x: lax.pmean(w * x, "replica"),
}
X = np.array([1, 3], np.float32)


def mapped(pair, fn, axis, out_axes=0):
    """Yields ``fn`` of (w, X) mapped by us and by JAX; w is shared, or has a row each."""
    options = {"in_axes": (axis, 0), "out_axes": out_axes}
    yield dj.pmap(fn, "replica", strategy=pair, **options)
    yield jax.pmap(fn, "replica", **options)


@pytest.mark.parametrize("axis", [None, 0], ids=["M", "T"])
def test_derivatives_inside(pair, axis):
    w = np.float32(2) if axis is None else np.full(2, 2, np.float32)
    for name, expected in (("loss", [1, 3]), ("psum", [2, 6]), ("pmean", [1, 3])):
        for fn in mapped(pair, jax.grad(LOSSES[name]), axis):
            assert fn(w, X).tolist() == expected


@pytest.mark.parametrize(
    ("axis", "name", "expected"),
    [(None, "loss", 4), (0, "loss", [1, 3]), (None, "pmean", 2), (0, "pmean", [0.5, 1.5])],
)
def test_derivatives_around(pair, axis, name, expected):
    w = np.float32(2) if axis is None else np.full(2, 2, np.float32)
    for fn in mapped(pair, LOSSES[name], axis, None if name == "pmean" else 0):
        assert jax.grad(lambda w, fn=fn: fn(w, X).sum())(w).tolist() == expected


def test_derivatives_around_run(pair):
    x = ids(pair).map(lambda r: 1 + 2 * r)

    def summed(w):
        return pair.run(LOSSES["loss"], args=(w, x)).stacked.sum()

    assert float(jax.grad(summed)(jnp.float32(2))) == 4
    shards = dj.PerReplica(jnp.full(2, 2.0), x.topology)
    of_shards = lambda stacked: summed(dj.PerReplica(stacked, x.topology))
    assert jax.grad(of_shards)(shards.stacked).tolist() == [1, 3]
