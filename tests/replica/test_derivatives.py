"""Derivatives of steps with merges equal their closed form (TensorFlow raises there).

With x_r = r + 1, S = w * sum(x^2) merged over the replicas and loss_r = S^2 on each:
  the gradient that replica r gets for its copy of w is 2 R S x_r^2,
  the tangent for tangent 1 on every copy is 2 S sum(x^2),
  the second derivative is 2 R x_r^2 sum(x^2).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distjax as dj
from distjax.errors import MergeError
from tests.replicas import ids, local

W = 3.0


def merged_square(w, x):
    """Returns S^2, S merged in cross-replica context."""
    ctx = dj.get_replica_context()
    return ctx.merge_call(lambda strategy, v: strategy.reduce("sum", v), args=(w * x * x,)) ** 2


def reduced_square(w, x):
    """The same by all_reduce."""
    return dj.get_replica_context().all_reduce("sum", w * x * x) ** 2


def scanned(w, x):
    """S^2 in the second of two steps of a scan."""

    def body(carry, weight):
        return carry + weight * merged_square(w, x), None

    return lax.scan(body, 0.0, jnp.array([0.0, 1.0]))[0]


def branched(w, x):
    """S^2 in a branch."""
    return lax.cond(w > 0, lambda: merged_square(w, x), lambda: w)


def rematerialized(w, x):
    """S^2 under checkpoint."""
    return jax.checkpoint(merged_square)(w, x)


def jitted(w, x):
    """S^2 under an inner jit."""
    return jax.jit(merged_square)(w, x)


def scanned_remat(w, x):
    """S^2 under checkpoint in a scan."""
    return lax.scan(lambda c, _: (c + rematerialized(w, x), None), 0.0, None, length=1)[0]


FORMS = [
    merged_square, reduced_square, scanned, branched, rematerialized, jitted, scanned_remat,
]  # fmt: skip


def per_replica(strategy):
    return strategy.distribute_values_from_function(
        lambda ctx: np.float32(ctx.replica_id_in_sync_group + 1)
    )


def results(strategy, value):
    return np.array([np.asarray(v) for v in strategy.local_results(value)])


@pytest.fixture(params=["mirrored3", "virtual2"])
def case(request):
    kind, count = request.param[:-1], int(request.param[-1])
    if kind == "mirrored":
        strategy = dj.MirroredStrategy(jax.devices()[:count])
    else:
        strategy = dj.VirtualStrategy(count)
    x = np.arange(1.0, count + 1)
    return strategy, count, x, W * np.sum(x**2)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_first_derivatives(case, form):
    strategy, count, x, total = case

    def step(x):
        tangent = jax.jvp(lambda w: form(w, x), (W,), (1.0,))[1]
        return jax.value_and_grad(form)(W, x), tangent, jax.jacfwd(form)(W, x)

    (value, grad), tangent, forward = strategy.run(step, args=(per_replica(strategy),))
    np.testing.assert_allclose(results(strategy, value), [total**2] * count, rtol=1e-5)
    np.testing.assert_allclose(results(strategy, grad), 2 * count * total * x**2, rtol=1e-5)
    expected = [2 * total * np.sum(x**2)] * count
    np.testing.assert_allclose(results(strategy, tangent), expected, rtol=1e-5)
    np.testing.assert_allclose(results(strategy, forward), expected, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_second_derivatives(case, form):
    strategy, count, x, _ = case

    def step(x):
        return jax.hessian(form)(W, x), jax.grad(jax.grad(form))(W, x)

    hessian, twice = strategy.run(step, args=(per_replica(strategy),))
    expected = 2 * count * x**2 * np.sum(x**2)
    np.testing.assert_allclose(results(strategy, hessian), expected, rtol=1e-5)
    np.testing.assert_allclose(results(strategy, twice), expected, rtol=1e-5)


@pytest.mark.pairwise
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_grad_around_run_and_reduce(case, form, how):
    strategy, _, x, total = case
    batch = per_replica(strategy)

    def loss(w):
        return strategy.reduce("mean", strategy.run(form, args=(w, batch)))

    value, grad = how(lambda w: jax.value_and_grad(loss)(w))(jnp.float32(W))
    np.testing.assert_allclose(value, total**2, rtol=1e-5)
    np.testing.assert_allclose(grad, 2 * total * np.sum(x**2), rtol=1e-5)


def test_grad_of_a_merge_with_integer_key_and_none_operands(pair):
    def merge_fn(strategy, tree):
        return {
            "loss": strategy.reduce("sum", tree["x"]) * tree["n"].astype(jnp.float32),
            "n": tree["n"],
            "key": tree["key"],
            "none": tree["none"],
        }

    def loss(w, x):
        tree = {"x": w * x, "n": jnp.int32(3), "key": jax.random.key(0), "none": None}
        out = dj.get_replica_context().merge_call(merge_fn, args=(tree,))
        assert out["none"] is None
        return out["loss"] + out["n"] + jax.random.uniform(out["key"]) * 0

    grad = pair.run(lambda x: jax.grad(loss)(W, x), args=(per_replica(pair),))
    np.testing.assert_allclose(results(pair, grad), [6.0, 12.0])  # R * n * x_r


def test_grad_through_per_replica_results(pair):
    def merge_fn(strategy, x):
        return x.map(lambda v: v * v)

    def loss(x):
        return dj.get_replica_context().merge_call(merge_fn, args=(x,))

    grad = pair.run(jax.grad(loss), args=(per_replica(pair),))
    np.testing.assert_allclose(results(pair, grad), [2.0, 4.0])


def test_grad_of_a_merge_of_equal_values_stays_equal(pair):
    def loss(w):
        return dj.get_replica_context().merge_call(lambda strategy, v: v**2, args=(w,))

    grad = pair.run(jax.grad(loss), args=(jnp.float32(W),))
    assert isinstance(grad, jax.Array)  # proved equal: no PerReplica
    np.testing.assert_allclose(grad, 2 * W)


def test_vmap_of_a_merge_and_of_its_gradient(pair):
    ws = jnp.array([0.0, 1.0, 3.0])

    def step(x):
        values = jax.vmap(lambda w: merged_square(w, x))(ws)
        grads = jax.vmap(jax.grad(lambda w: merged_square(w, x)))(ws)
        return (
            values,
            grads,
            jax.grad(lambda ws: jax.vmap(merged_square, (0, None))(ws, x).sum())(ws),
        )

    values, grads, grads_of_map = pair.run(step, args=(per_replica(pair),))
    np.testing.assert_allclose(values, (5 * np.array(ws)) ** 2)
    expected = np.outer([1.0, 4.0], 2 * 2 * 5 * np.array(ws))
    np.testing.assert_allclose(results(pair, grads), expected)
    np.testing.assert_allclose(results(pair, grads_of_map), expected)


def test_vmap_of_a_merge_over_axes_other_than_the_first(pair):
    xs = pair.distribute_values_from_function(
        lambda ctx: np.full((2, 3), ctx.replica_id_in_sync_group + 1, np.float32)
    )

    def step(x):
        merge = lambda v: dj.get_replica_context().merge_call(
            lambda strategy, v: (strategy.reduce("sum", v), v), args=(v,)
        )
        return jax.vmap(merge, in_axes=1, out_axes=1)(x)

    total, same = pair.run(step, args=(xs,))
    np.testing.assert_allclose(total, np.full((2, 3), 3.0))
    np.testing.assert_allclose(results(pair, same), [np.full((2, 3), 1.0), np.full((2, 3), 2.0)])


def test_a_merge_is_transposed_by_its_derivative_only(pair):
    """`jax.vjp` transposes it; `jax.linear_transpose`, which takes it for linear, is refused."""

    def step(x, transpose):
        ctx = dj.get_replica_context()
        meet = lambda x: ctx.merge_call(lambda s, x: s.reduce("sum", 3 * x), args=(x,))
        return transpose(meet, x)

    x = jnp.float32(2)
    # each of two replicas sends 1 back, and each gave its x to the sum of both
    assert float(pair.run(lambda x: step(x, lambda f, x: jax.vjp(f, x)[1](x / 2)), (x,))[0]) == 6
    with pytest.raises(MergeError, match="^jax.linear_transpose needs a function without a merge"):
        pair.run(lambda x: step(x, lambda f, x: jax.linear_transpose(f, x)(x)), (x,))


def test_custom_vjp_around_a_merge_keeps_its_rule_inside_run(pair):
    @jax.custom_vjp
    def clipped(w, x):
        return merged_square(w, x)

    clipped.defvjp(lambda w, x: (merged_square(w, x), None), lambda _, ct: (ct * 0 + 7.0, None))
    grad = pair.run(lambda x: jax.grad(clipped)(W, x), args=(per_replica(pair),))
    np.testing.assert_allclose(results(pair, grad), [7.0, 7.0])


def test_r331_a_gradient_is_the_replicas_own(pair, how):
    """With respect to a variable's value, in a replica: local, not reduced."""
    with pair.scope():
        w = dj.Variable(np.float32([1, 2, 3]))

    def fn(r):
        return jax.grad(lambda w: jnp.sum(w * w) * (r + 1))(w.value)

    out = how(lambda r: pair.run(fn, args=(r,)))(ids(pair))
    assert local(pair, out) == [[2.0, 4.0, 6.0], [4.0, 8.0, 12.0]]
