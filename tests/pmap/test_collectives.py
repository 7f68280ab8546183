"""Collectives in a mapped function: what JAX's own tests of pmap ask of them, written anew."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.pmap.kinds import Replicas, assert_equal

#: In one worker, which makes what jax.pmap gives once.
pytestmark = pytest.mark.xdist_group("pmap collectives")


def ring(count):
    return [(i, (i + 1) % count) for i in range(count)]


#: A body over the axis "i" of R replicas; it takes [R, 4] per replica.
BODIES = {
    "psum": lambda n: lambda x: x - lax.psum(x, "i"),
    "pmean": lambda n: lambda x: x - lax.pmean(x, "i"),
    "pmax": lambda n: lambda x: x - lax.pmax(x, "i"),
    "pmin": lambda n: lambda x: x - lax.pmin(x, "i"),
    "all_gather": lambda n: lambda x: lax.all_gather(x, "i"),
    "all_gather_last": lambda n: lambda x: lax.all_gather(x, "i", axis=-1),
    "all_gather_tiled": lambda n: lambda x: lax.all_gather(x, "i", tiled=True),
    "all_gather_tiled_last": lambda n: lambda x: lax.all_gather(x, "i", tiled=True, axis=-1),
    "psum_scatter": lambda n: lambda x: lax.psum_scatter(x, "i"),
    "psum_scatter_tiled": lambda n: lambda x: lax.psum_scatter(x, "i", tiled=True),
    "ppermute": lambda n: lambda x: lax.ppermute(x, "i", ring(n)),
    "ppermute_back": lambda n: lambda x: lax.ppermute(x, "i", [(b, a) for a, b in ring(n)]),
    "ppermute_partial": lambda n: lambda x: lax.ppermute(x, "i", ring(n)[:-1]),
    "pshuffle": lambda n: lambda x: lax.pshuffle(x, "i", [(i - 1) % n for i in range(n)]),
    "all_to_all": lambda n: lambda x: lax.all_to_all(x, "i", 0, 0),
    "all_to_all_01": lambda n: lambda x: lax.all_to_all(x, "i", 0, 1),
    "all_to_all_tiled": lambda n: lambda x: lax.all_to_all(x, "i", 0, 1, tiled=True),
    "pswapaxes": lambda n: lambda x: lax.pswapaxes(x, "i", 0),
    "axis_index": lambda n: lambda x: x + lax.axis_index("i"),
    "axis_size": lambda n: lambda x: lax.axis_size("i"),
    "constant": lambda n: lambda x: lax.psum(2.0, "i"),
    "number": lambda n: lambda x: 3,
    "trees": lambda n: lambda x: lax.psum({"a": x, "b": (x.astype(jnp.int32), [2 * x])}, "i"),
    "bool": lambda n: lambda x: (lax.psum(x > 0, "i"), lax.pmean(x > 0, "i")),
    "complex": lambda n: lambda x: lax.psum(x + 1j * x, "i"),
    "gather_bool": lambda n: lambda x: lax.all_gather(x > 0, "i"),
    "scan": lambda n: lambda x: lax.scan(lambda c, y: (c + lax.psum(y, "i"), y), 0 * x[0], x),
    "remat": lambda n: jax.remat(lambda x: jnp.sin(x) * lax.axis_index("i")),
    "jit": lambda n: jax.jit(lambda x: x / lax.psum(jnp.abs(x) + 1, "i")),
    "inner_grad": lambda n: lambda x: lax.pmean(jax.grad(lambda y: jnp.sum(y**2))(x), "i"),
    "grad_of_psum": lambda n: jax.grad(lambda x: jnp.sum(lax.psum(x**2, "i"))),
    "grad_of_ppermute": lambda n: jax.grad(
        lambda x: jnp.sum(x * lax.ppermute(jnp.sin(x), "i", ring(n)))
    ),
    "inner_vmap": lambda n: lambda x: jax.vmap(lambda y: y - lax.psum(y, "i"))(x),
    "inner_vmap_gather": lambda n: lambda x: jax.vmap(lambda y: lax.all_gather(y, "i"))(x),
    "inner_vmap_all_to_all": lambda n: (
        lambda x: jax.vmap(lambda y: lax.all_to_all(y, "i", 0, 0), in_axes=1)(x)
    ),
    "inner_axis": lambda n: (
        lambda x: jax.vmap(lambda y: y - lax.psum(y, ("i", "j")), axis_name="j")(x)
    ),
}


def all_of(bodies, argument):
    """Returns one function that computes all bodies, made with `argument`: one compilation."""
    return lambda x: {name: make(argument)(x) for name, make in bodies.items()}


@functools.cache
def of_jax(count):
    """Returns what `jax.pmap` gives for all bodies on R replicas."""
    rows = Replicas(count, "local").rows(count, 4)
    return jax.pmap(all_of(BODIES, count), "i", devices=jax.devices()[:count])(rows)


def test_bodies(replicas):
    count = replicas.count
    found = replicas.pmap(all_of(BODIES, count), "i")(replicas.rows(count, 4))
    for name, expected in of_jax(count).items():
        assert all(leaf.shape[0] == count for leaf in jax.tree.leaves(found[name])), name
        assert_equal(found[name], expected)


def test_numbers_in_closed_form(replicas):
    x = replicas.rows(4)
    total = replicas.pmap(lambda x: lax.psum(x, "i"), "i")(x)
    np.testing.assert_array_equal(total, np.broadcast_to(x.sum(0), x.shape))
    moved = replicas.pmap(lambda x: lax.ppermute(x, "i", ring(replicas.count)), "i")(x)
    np.testing.assert_array_equal(moved, np.roll(x, 1, axis=0))


GROUPED = {
    "psum": lambda g: lambda x: x - lax.psum(x, "i", axis_index_groups=g),
    "psum_constant": lambda g: lambda x: x - lax.psum(2.0, "i", axis_index_groups=g),
    "all_gather": lambda g: lambda x: lax.all_gather(x, "i", axis_index_groups=g),
    "psum_scatter": lambda g: lambda x: lax.psum_scatter(x, "i", axis_index_groups=g, tiled=True),
    "all_to_all": lambda g: lambda x: lax.all_to_all(x, "i", 0, 0, tiled=True, axis_index_groups=g),
}


@pytest.mark.parametrize("groups", [[[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 2, 4, 6], [1, 3, 5, 7]]])
@pytest.mark.parametrize("kind", ["local", "virtual"])
def test_groups(kind, groups):
    replicas = Replicas(8, kind)
    replicas.assert_as_jax(all_of(GROUPED, groups), replicas.rows(8, 2))


@pytest.mark.parametrize("kind", ["local", "virtual"])
def test_groups_of_unequal_size(kind):
    replicas, groups = Replicas(8, kind), [[0, 1], [2, 3, 4, 5, 6, 7]]
    replicas.assert_as_jax(lambda x: lax.psum(x, "i", axis_index_groups=groups), replicas.rows(4))


def test_dtypes(replicas):
    dtypes = [jnp.dtype(name) for name in ("int32", "uint8", "bool", "bfloat16", "complex64")]
    xs = [replicas.rows(replicas.count, 2).astype(dtype) for dtype in dtypes]
    replicas.assert_as_jax(lambda x: lax.all_to_all(x, "i", 0, 0), xs)
    replicas.assert_as_jax(lambda x: lax.psum(x, "i"), xs)


def test_a_psum_of_a_typed_number_keeps_its_dtype(replicas):
    out = replicas.pmap(lambda _: lax.psum(np.int32(1), "i"), "i")(np.arange(replicas.count))
    assert out.dtype == np.int32 and out.tolist() == [replicas.count] * replicas.count


def test_rule_30(replicas):
    """A halo exchange: every replica has a part of a row of cells."""
    count = replicas.count

    def step(cells):
        left = lax.ppermute(cells[-1:], "i", ring(count))
        right = lax.ppermute(cells[:1], "i", [(b, a) for a, b in ring(count)])
        wide = jnp.concatenate([left, cells, right])
        return wide[:-2] ^ (wide[1:-1] | wide[2:])

    step = replicas.pmap(step, "i")
    cells = np.zeros(40, bool)
    cells[20] = True
    expected, found = cells, cells.reshape(count, -1)
    for _ in range(9):
        expected = np.roll(expected, 1) ^ (expected | np.roll(expected, -1))
        found = step(found)
    np.testing.assert_array_equal(np.asarray(found).ravel(), expected)


def test_a_permutation_that_is_none_is_an_error_of_jax(replicas):
    if replicas.count == 1:
        return
    with pytest.raises(ValueError, match="does not represent a permutation"):
        replicas.pmap(lambda x: lax.pshuffle(x, "i", [1, 1] + [0] * (replicas.count - 2)), "i")(
            np.arange(replicas.count)
        )


def test_keys(replicas):
    keys = jax.random.split(jax.random.key(0), replicas.count)

    @jax.checkpoint
    def fold_in(key):
        return jax.random.fold_in(key, lax.axis_index("i"))

    def body(key, data, shared):
        return key, jax.random.bits(key), jax.random.fold_in(data, 1), fold_in(key), shared

    arguments = keys, jax.random.key_data(keys), jax.random.key(3)
    axes = {"in_axes": (0, 0, None), "out_axes": (0, 0, 0, 0, None)}
    replicas.assert_as_jax(body, *arguments, **axes)


def test_pargmax_along_each_axis(replicas):
    x = replicas.rows(4) + np.arange(replicas.count, dtype=np.float32)[:, None] / 16
    for fn, expected in ((jnp.argmax, x.argmax(0)), (jnp.argmin, x.argmin(0))):
        body = lambda row, fn=fn: fn(lax.all_gather(row, "i"), axis=0)
        found = replicas.pmap(body, "i", out_axes=None)(x)
        np.testing.assert_array_equal(found, expected)


def test_what_is_equal_everywhere_is_stacked_too(replicas):
    x = replicas.rows(3)
    out = replicas.pmap(lambda x: (lax.psum(x, "i"), jnp.ones(2), 2.5), "i")(x)
    assert [leaf.shape for leaf in out] == [
        (replicas.count, 3),
        (replicas.count, 2),
        (replicas.count,),
    ]
    assert_equal(out[2], jnp.full(replicas.count, 2.5))
