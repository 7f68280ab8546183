"""A virtual strategy computes what devices do, also where `jax.vmap` alone would not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distjax as dj

#: In one worker, which compiles all bodies once.
pytestmark = pytest.mark.xdist_group("replica one device")

R = 4
GROUPS = [[0, 3], [2, 1]]
STRATEGIES = {
    "mirrored": lambda: dj.MirroredStrategy(jax.devices()[:R]),
    "virtual": lambda: dj.VirtualStrategy(R),
}


@functools.cache
def strategy_of(kind):
    return STRATEGIES[kind]()


def replica_values(strategy, value):
    """Returns [R, ...] of an array or PerReplica."""
    return np.stack([np.asarray(v) for v in strategy.local_results(value)])


def partly_sent(x):
    return lax.ppermute(x, "replica", [(1, 0), (2, 3)]) + x


summed = lax.composite(lambda x: x + lax.psum(x, "replica"), "tests.summed")  # has no vmap
reversed_jvp = jax.custom_jvp(partly_sent)
reversed_jvp.defjvp(lambda primals, tangents: (reversed_jvp(*primals), -tangents[0]))
reversed_vjp = jax.custom_vjp(partly_sent)
reversed_vjp.defvjp(lambda x: (reversed_vjp(x), None), lambda _, g: (-g,))


@jax.custom_batching.custom_vmap
def normal(x):
    return x - lax.psum(x, "replica")


@normal.def_vmap
def _normal_rule(axis_size, in_batched, x):
    return 0 * x, True  # of the user's own vmap, and never of the replica axis


def host_double(x):
    return 2 * np.asarray(x)


def double(x):
    return jax.pure_callback(host_double, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def ragged(x):
    sizes = jnp.array([1, 3], jnp.int32) + lax.axis_index("replica") * jnp.array([1, -1])
    return lax.ragged_dot(x, jnp.stack([x, 2 * x]), sizes)


#: What a replica computes of [R, R], with an equal operand and with one that differs.
BODIES = {
    "all_to_all": lambda x: lax.all_to_all(x, "replica", 0, 1),
    "all_to_all_tiled": lambda x: lax.all_to_all(x, "replica", 1, 0, tiled=True),
    "pswapaxes": lambda x: lax.pswapaxes(x, "replica", 1),
    "psum": lambda x: lax.psum(x, "replica", axis_index_groups=GROUPS),
    "pmean": lambda x: lax.pmean(x, "replica", axis_index_groups=GROUPS),
    "pmax": lambda x: lax.pmax(x, "replica", axis_index_groups=GROUPS),
    "pmin": lambda x: lax.pmin(x, "replica", axis_index_groups=GROUPS),
    "all_gather": lambda x: lax.all_gather(x, "replica", axis_index_groups=GROUPS, axis=1),
    "all_gather_tiled": lambda x: lax.all_gather(
        x, "replica", axis_index_groups=GROUPS, axis=1, tiled=True
    ),
    "psum_scatter": lambda x: lax.psum_scatter(x[:2], "replica", axis_index_groups=GROUPS),
    "psum_scatter_tiled": lambda x: lax.psum_scatter(
        x, "replica", axis_index_groups=GROUPS, scatter_dimension=1, tiled=True
    ),
    "all_to_all_groups": lambda x: lax.all_to_all(
        x[:, :2], "replica", 1, 0, axis_index_groups=GROUPS
    ),
    "all_to_all_groups_tiled": lambda x: lax.all_to_all(
        x, "replica", 0, 1, axis_index_groups=GROUPS, tiled=True
    ),
    "ppermute": lambda x: lax.ppermute(x, "replica", [(0, 2), (3, 0)]),
    "ppermute_none": lambda x: lax.ppermute(x, "replica", []),
    "callback": double,
    "custom_vmap": normal,
    "ragged_dot": ragged,
    "in_jit": jax.jit(lambda x: x + lax.pmax(x, "replica", axis_index_groups=GROUPS)),
    "in_scan": lambda x: lax.scan(
        lambda c, row: (c + lax.psum(row, "replica", axis_index_groups=GROUPS), c), x[0], x
    ),
    "in_while": lambda x: lax.fori_loop(
        0, 3, lambda i, c: lax.ppermute(c, "replica", [(0, 1), (1, 0)]) + x, x
    ),
    "in_cond": lambda x: lax.cond(
        lax.psum(1, "replica") > 3,
        lambda x: lax.pmin(x, "replica", axis_index_groups=GROUPS),
        lambda x: x,
        x,
    ),
    "in_custom_jvp": lambda x: reversed_jvp(x) + jax.checkpoint(reversed_jvp)(x),
    "in_custom_vjp": lambda x: lax.scan(lambda c, _: (reversed_vjp(c), None), x, length=2)[0],
    "grad_of_custom_jvp": jax.grad(lambda x: jnp.sum(jnp.sin(reversed_jvp(x)))),
    "grad_of_custom_vjp": jax.grad(lambda x: jnp.sum(jnp.sin(reversed_vjp(x)))),
    "in_vmap": lambda x: jax.vmap(lambda y: lax.psum(y, "replica", axis_index_groups=GROUPS))(x),
    "composite": lambda x: lax.scan(lambda c, row: (c, summed(row)), 0, summed(x)),
    "in_composite": lax.composite(partly_sent, "tests.partly_sent"),
    "grad_of_remat_of_scan": jax.grad(
        jax.checkpoint(
            lambda x: jnp.sum(
                lax.scan(lambda c, _: (jnp.sin(partly_sent(c)), None), x, length=2)[0]
            )
        )
    ),
    "in_grad": jax.grad(
        lambda x: jnp.sum(x * lax.psum(jnp.sin(x), "replica", axis_index_groups=GROUPS))
    ),
}


@functools.cache
def results(kind, differs):
    """Returns {name: [R, ...] leaves} of all bodies, by one program."""
    strategy = strategy_of(kind)
    x = np.arange(R * R, dtype=np.float32).reshape(R, R)

    def step(x):
        own = x + lax.axis_index("replica") ** 2 if differs else x
        return {name: body(own) for name, body in BODIES.items()}

    found = strategy.run(step, args=(x,))
    is_leaf = lambda x: isinstance(x, dj.PerReplica)
    return {
        name: [replica_values(strategy, leaf) for leaf in jax.tree.leaves(tree, is_leaf=is_leaf)]
        for name, tree in found.items()
    }


@pytest.mark.parametrize("differs", [False, True], ids=["equal", "differs"])
@pytest.mark.parametrize("name", BODIES)
def test_virtual_equals_mirrored(name, differs):
    ours, theirs = (results(kind, differs)[name] for kind in ("virtual", "mirrored"))
    for x, y in zip(ours, theirs, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fn", [reversed_jvp, reversed_vjp], ids=["jvp", "vjp"])
def test_a_derivative_around_run_of_such_a_rule_is_refused(fn):
    strategy = strategy_of("virtual")
    total = dj.jit(jax.grad(lambda x: strategy.reduce("sum", strategy.run(fn, args=(x,)))))
    with pytest.raises(NotImplementedError, match="^a derivative around run, on replicas that"):
        total(np.float32(1))


def test_an_ordered_callback_runs_once_per_replica_in_order():
    seen = []

    def step(x):
        shape = jax.ShapeDtypeStruct((), np.float32)
        note = lambda x: (seen.append(float(x)), np.float32(x))[1]
        return jax.experimental.io_callback(note, shape, x, ordered=True)

    strategy = strategy_of("virtual")
    x = strategy.distribute_values_from_function(
        lambda ctx: np.float32(ctx.replica_id_in_sync_group)
    )
    out = strategy.run(step, args=(x,))
    assert replica_values(strategy, out).tolist() == seen == [0, 1, 2, 3]


def test_derivatives_around_run_of_groups():
    def loss(kind):
        strategy = strategy_of(kind)
        step = lambda x: lax.psum(jnp.sin(x), "replica", axis_index_groups=GROUPS) * x

        def total(x):
            x = dj.PerReplica(x, strategy.extended.topology)
            return strategy.run(step, args=(x,)).stacked.sum()

        return jax.grad(total)(jnp.arange(4.0))

    np.testing.assert_allclose(loss("virtual"), loss("mirrored"), rtol=1e-5)


def test_groups_of_unequal_size():
    for reduce, fill in ((lax.psum, 0), (lax.pmax, 1), (lax.pmin, 1)):
        step = lambda x, reduce=reduce: reduce(
            x * (lax.axis_index("replica") + 1), "replica", axis_index_groups=[[0], [1, 2, 3]]
        )
        ours, theirs = (
            replica_values(strategy_of(kind), strategy_of(kind).run(step, args=(jnp.ones(2),)))
            for kind in ("virtual", "mirrored")
        )
        np.testing.assert_array_equal(ours, theirs, err_msg=str(fill))
