"""A mapped function inside of jit, vmap, grad and loops; and transformations inside of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distjax as dj
from tests.pmap.kinds import Replicas


def sums_to_one(x):
    return x / lax.psum(x, "i")


@pytest.fixture
def rows(replicas):
    return np.abs(replicas.rows(3)) + 1


@pytest.mark.parametrize("around", [jax.jit, dj.jit, jax.remat])
def test_jit(replicas, rows, around):
    found = around(replicas.pmap(sums_to_one, "i"))(rows)
    np.testing.assert_allclose(found, rows / rows.sum(0), rtol=1e-6)


def test_vmap_and_pmap_in_either_order(replicas, rows):
    mapped = replicas.pmap(sums_to_one, "i")
    batch = np.stack([rows, 2 * rows, 1 / rows])
    np.testing.assert_allclose(jax.vmap(mapped)(batch), batch / batch.sum(1, keepdims=True), 1e-5)
    last = jax.vmap(mapped, in_axes=2, out_axes=2)(np.moveaxis(batch, 0, 2))
    np.testing.assert_allclose(np.moveaxis(last, 2, 0), batch / batch.sum(1, keepdims=True), 1e-5)
    inside = replicas.pmap(jax.vmap(sums_to_one), "i")(rows)
    np.testing.assert_allclose(inside, rows / rows.sum(0), rtol=1e-6)


@pytest.mark.parametrize("collective", [lax.psum, lax.pmean, lax.pmax, lax.pmin])
def test_collectives_over_the_axis_of_a_vmap_around(replicas, collective):
    x = replicas.rows(2, 3)
    body = lambda x: x + collective(x.sum(), ("i", "j"))
    one = jax.vmap(replicas.pmap(body, "i"), in_axes=1, out_axes=1, axis_name="j")(x)
    other = replicas.pmap(jax.vmap(body, axis_name="j"), "i")(x)
    expected = jax.vmap(jax.vmap(body, axis_name="j"), axis_name="i")(x)
    np.testing.assert_allclose(one, expected, rtol=1e-6)
    np.testing.assert_allclose(other, expected, rtol=1e-6)


def test_an_axis_name_may_shadow_that_of_a_vmap(replicas, rows):
    mapped = jax.vmap(replicas.pmap(lambda x: 2 * x, "i"), axis_name="i")
    np.testing.assert_allclose(mapped(rows[None])[0], 2 * rows)


def test_collectives_over_a_name_that_a_vmap_around_has_are_refused(rows):
    """`jax.pmap` reduces over the vmap there, in silence."""
    mapped = dj.pmap(lambda x: x - lax.psum(x, "i"), "i")
    with pytest.raises(ValueError, match="needs an axis_name that no jax.vmap around it has") as e:
        jax.vmap(mapped, axis_name="i")(rows[None])
    assert str(e.value).endswith("Fix: jax.vmap(fn, axis_name='rows'), or any name but 'i'")


def test_loops_and_branches(replicas, rows):
    mapped = replicas.pmap(sums_to_one, "i")
    expected = rows
    for _ in range(3):
        expected = expected / expected.sum(0)
    looped = lax.fori_loop(0, 3, lambda i, x: mapped(x), jnp.asarray(rows))
    np.testing.assert_allclose(looped, expected, rtol=1e-5)
    scanned, _ = lax.scan(lambda c, _: (mapped(c), None), jnp.asarray(rows), None, length=3)
    np.testing.assert_allclose(scanned, expected, rtol=1e-5)
    np.testing.assert_allclose(
        lax.cond(True, mapped, lambda x: x, jnp.asarray(rows)), rows / rows.sum(0), rtol=1e-6
    )


@pytest.mark.parametrize("kind", ["local", "virtual"])
def test_derivatives(kind):
    replicas = Replicas(8, kind)
    x, y = replicas.rows(2, 3) / 8, np.ones((2, 3), np.float32) / 4
    fn = lambda x, y: lax.psum(jnp.sin(x) * jnp.cos(y), "i") * x
    mapped = replicas.pmap(fn, "i", in_axes=(0, None))
    plain = jax.vmap(fn, in_axes=(0, None), axis_name="i")
    loss = lambda f: lambda x, y: jnp.sum(f(x, y) ** 2)
    for found, expected in zip(
        jax.grad(loss(mapped), argnums=(0, 1))(x, y),
        jax.grad(loss(plain), argnums=(0, 1))(x, y),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    tangents = (jnp.ones_like(x), jnp.ones_like(y))
    found, expected = jax.jvp(mapped, (x, y), tangents), jax.jvp(plain, (x, y), tangents)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-4, atol=1e-5)
    _, linear = jax.linearize(lambda x: mapped(x, y), x)
    np.testing.assert_allclose(
        linear(jnp.ones_like(x)),
        jax.jvp(lambda x: plain(x, y), (x,), (jnp.ones_like(x),))[1],
        rtol=1e-4,
        atol=1e-5,
    )


def test_second_derivatives_of_a_psum():
    mapped = dj.pmap(lambda x: lax.psum(x**3, "i"), "i")
    x = jnp.arange(4.0)
    hessian = jax.hessian(lambda x: mapped(x)[0])(x)
    np.testing.assert_allclose(hessian, jnp.diag(6 * x))


def test_gradients_with_zero_cotangents_inside():
    def inner(meta, params):
        grads = lax.psum(jax.grad(lambda p: meta * p[1] * p[0])(params), "i")
        return params[1] * (params[0] + grads[0])

    outer = lambda params: jax.grad(inner)(jnp.float32(4), params)
    params = jnp.array([2.0, 1.0]), jnp.array([3.0, 5.0])
    found = dj.pmap(outer, "i")(params)
    np.testing.assert_allclose(found, jax.pmap(outer, "i")(params))


def test_remat_around_keeps_what_its_policy_says():
    x = jnp.arange(2.0)
    fn = jax.remat(dj.pmap(lambda x: jnp.sin(jnp.sin(x))))
    np.testing.assert_allclose(
        jax.grad(lambda x: fn(x).sum())(x), jnp.cos(jnp.sin(x)) * jnp.cos(x), rtol=1e-6
    )


@pytest.mark.parametrize("kind", ["local", "virtual"])
def test_one_inside_another_is_an_error(kind):
    replicas = Replicas(2, kind)
    inner = dj.pmap(lambda x: x, "j")
    with pytest.raises(dj.errors.ContextError, match="needs to be outside of replica functions"):
        replicas.pmap(lambda x: inner(x), "i")(np.ones((2, 2)))
    outer = dj.MirroredStrategy(jax.devices()[:2])
    with pytest.raises(dj.errors.ContextError, match="needs to be outside of replica functions"):
        outer.run(lambda x: inner(x), args=(np.ones(2),))


def test_one_inside_jax_pmap_says_so():
    with pytest.raises(Exception):  # noqa: B017  (JAX has no nesting; whatever it says)
        jax.pmap(lambda x: dj.pmap(lambda y: y, "j")(x), "i")(np.ones((2, 2)))
