"""Over model axes on CPU, bfloat16 is reduced in float32: XLA would abort the process there."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distjax as dj

X = jnp.array([[1, 2], [3, 4]], jnp.bfloat16)
MANY = jnp.linspace(-3, 5, 256, dtype=jnp.bfloat16).reshape(2, 128)


@jax.custom_vjp
def summed(x):
    return lax.psum(x, "replica")


summed.defvjp(lambda x: (summed(x), x), lambda x, g: (lax.psum(g, "replica") * x,))

#: Bodies of a replica function of its row.
BODIES = {
    "all_reduce": lambda x: dj.get_replica_context().all_reduce("mean", x),
    "psum of two types": lambda x: lax.psum((x, x.astype(jnp.float32)), "replica"),
    "psum of a constant": lambda x: lax.psum(jnp.ones((), x.dtype), "replica"),
    "psum of groups": lambda x: lax.psum(x, "replica", axis_index_groups=[[0], [1]]),
    "pmean": lambda x: lax.pmean(x, "replica"),
    "pmax": lambda x: lax.pmax(x, "replica"),
    "pmin": lambda x: lax.pmin(x, "replica"),
    "psum_scatter": lambda x: lax.psum_scatter(x, "replica", tiled=True),
    "jit": lambda x: jax.jit(lambda x: lax.psum(x, "replica"))(x),
    "vmap": jax.vmap(lambda x: lax.psum(x, "replica")),
    "scan": lambda x: lax.scan(lambda c, _: (lax.psum(x * c, "replica"), c), x, length=2),
    "while": lambda x: lax.while_loop(
        lambda c: lax.pmax(c, "replica").sum() < 100, lambda c: lax.psum(c, "replica"), x
    ),
    "cond": lambda x: lax.cond(x.size > 1, lambda x: lax.psum(x, "replica"), lambda x: x, x),
    "merge": lambda x: dj.get_replica_context().merge_call(
        lambda s, x: s.reduce("sum", x), args=(x,)
    ),
    "gradient": jax.grad(lambda x: (lax.all_gather(x, "replica") ** 2).sum()),
    "checkpoint": jax.grad(jax.checkpoint(lambda x: lax.psum(x * x, "replica").sum())),
    "custom rule": jax.grad(lambda x: summed(x).sum()),
}


def loss(body):
    """Returns a loss of weights, which are equal on all replicas, and of rows."""

    def on_replica(w, x):
        return jnp.sum(body(w * x), dtype=jnp.float32)

    def of(strategy, rows, w):
        args = w, strategy.per_replica(rows)
        return strategy.reduce("mean", strategy.run(on_replica, args=args))

    return of


def in_run(body):
    return lambda s, rows: s.run(body, args=(s.per_replica(rows),))


#: Programs of a strategy and of rows.
PROGRAMS = {
    **{name: in_run(body) for name, body in BODIES.items()},
    "reduce": lambda s, rows: s.reduce("sum", s.per_replica(rows)),
    "reduce with an axis": lambda s, rows: s.reduce("mean", s.per_replica(rows), axis=0),
    "reduce_to": lambda s, rows: s.extended.reduce_to("mean", s.per_replica(rows), None),
    **{
        f"derivative around {name}": lambda s, rows, body=body: jax.grad(loss(body), argnums=2)(
            s, rows, jnp.ones(rows.shape[1:], rows.dtype)
        )
        for name, body in {
            "run": lambda x: x,
            "psum": BODIES["pmean"],
            "all_gather": lambda x: lax.all_gather(x, "replica"),
        }.items()
    },
}


def reduces_bfloat16(lowered):
    return re.search(r"\^bb0\(%\w+: tensor<bf16>", lowered.as_text()) is not None


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_reduction_is_that_of_replicas_of_one_device(name):
    # In a loop, XLA may keep the float32 value that a summand is rounded from: these are exact.
    rows = X if name in ("scan", "while") else MANY
    pair = dj.MirroredStrategy(jax.devices()[:2])
    two_each = dj.MirroredStrategy(jax.devices()[:4], model_axes={"model": 2})
    narrow, wide = (dj.jit(lambda rows, s=s: PROGRAMS[name](s, rows)) for s in (pair, two_each))
    assert reduces_bfloat16(narrow.lower(rows))
    assert not reduces_bfloat16(wide.lower(rows))  # or the call would end this process
    want, got = (jax.tree.leaves(program(rows)) for program in (narrow, wide))
    for w, g in zip(want, got, strict=True):
        assert w.dtype == g.dtype
        np.testing.assert_array_equal(np.asarray(w, np.float32), np.asarray(g, np.float32))


@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
def test_variables(synchronization):
    strategy = dj.MirroredStrategy(jax.devices()[:4], model_axes={"model": 2})
    with strategy.scope():
        v = dj.Variable(
            jnp.ones(2, jnp.bfloat16),
            synchronization=dj.VariableSynchronization[synchronization],
            aggregation=dj.VariableAggregation.MEAN,
        )
    strategy.run(v.assign_add, args=(strategy.per_replica(X),))
    assert v.value.dtype == jnp.bfloat16 and v.value.tolist() == [3, 4]
