"""Facts of gradients: what a loss is made of is known behind every layer of a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, nn

import distjax as dj
from distjax.errors import CheckError, ReductionWarning
from tests.wrong_programs.program import BATCH, FEATURES, ctx, inputs, on_replicas

WIDTH = 8


def weights():
    return np.random.default_rng(0).normal(size=(FEATURES, WIDTH)).astype(np.float32)


@jax.custom_vjp
def by_custom_vjp(h):
    return jnp.tanh(h)


by_custom_vjp.defvjp(
    lambda h: (jnp.tanh(h), jnp.tanh(h)), lambda out, cotangent: (cotangent * (1 - out**2),)
)


@jax.custom_jvp
def by_custom_jvp(h):
    return jnp.tanh(h)


by_custom_jvp.defjvp(lambda h, dh: (jnp.tanh(h[0]), dh[0] * (1 - jnp.tanh(h[0]) ** 2)))


def of_rows(function):
    """A layer that is a number of each row's outer product with itself, made regular."""
    return jax.vmap(lambda row: function(jnp.outer(row, row) + jnp.eye(WIDTH)))


def scanned(step):
    """A layer that folds the columns; its carry is [n]."""
    return lambda h: lax.scan(step, jnp.zeros(h.shape[0]), h.T)


def attention(h):
    heads = h.reshape(1, -1, 2, WIDTH // 2)
    return nn.dot_product_attention(heads, heads, heads)[0].sum((1, 2))


def pooled(init, reduce):
    return lambda h: lax.reduce_window(h, init, reduce, (1, 2), (1, 2), "VALID")


def layer_norm(h):
    return (h - h.mean(1, keepdims=True)) / jnp.sqrt(h.var(1, keepdims=True) + 1e-5)


#: Layers, [n, WIDTH] to [n, ...].
LAYERS = {
    "identity": lambda h: h,
    "relu": nn.relu,
    "gelu": nn.gelu,
    "silu": nn.silu,
    "elu": nn.elu,
    "softplus": nn.softplus,
    "softmax": lambda h: nn.softmax(h)[:, 0],
    "log_softmax": lambda h: nn.log_softmax(h)[:, 1],
    "logsumexp": lambda h: nn.logsumexp(h, axis=1),
    "maximum": lambda h: h.max(1),
    "median": lambda h: jnp.median(h, axis=1),
    "sort": lambda h: jnp.sort(h, axis=1)[:, 0],
    "top_k": lambda h: lax.top_k(h, 2)[0],
    "product": lambda h: jnp.prod(h, axis=1),
    "cumulative": lambda h: jnp.cumprod(jnp.cumsum(h, axis=1), axis=1)[:, 3],
    "associative_scan": lambda h: lax.associative_scan(jnp.add, h, axis=1),
    "fft": lambda h: jnp.abs(jnp.fft.rfft(h, axis=1))[:, 1],
    "complex": lambda h: jnp.real(h * (1 + 1j)),
    "where": lambda h: jnp.where(h > 0, h, 0.1 * h),
    "clip": lambda h: jnp.clip(h, -1, 1),
    "huber": lambda h: jnp.where(jnp.abs(h) < 1, 0.5 * h**2, jnp.abs(h)),
    "powers": lambda h: jnp.power(jnp.abs(h) + 1, 1.5) + jnp.square(h) + jnp.cbrt(h),
    "norm": lambda h: jnp.linalg.norm(h, axis=1),
    "layer_norm": layer_norm,
    "split": lambda h: sum(jnp.split(h, 2, axis=1)),
    "concatenate": lambda h: jnp.concatenate([h, h * 2], axis=1),
    "stack": lambda h: jnp.stack([h[:, 0], h[:, 1]], axis=1),
    "reshape": lambda h: h.reshape(-1, 2, WIDTH // 2).sum(1),
    "roll": lambda h: jnp.roll(h, 1, axis=1)[:, ::-1],
    "tile": lambda h: jnp.tile(h, (1, 2)),
    "pad": lambda h: jnp.pad(h, ((0, 0), (1, 1))),
    "take_along_axis": lambda h: jnp.take_along_axis(h, jnp.zeros((h.shape[0], 1), int), 1),
    "index": lambda h: h[jnp.arange(h.shape[0]), 1],
    "set": lambda h: h.at[:, 0].set(0.0),
    "add_at": lambda h: h.at[:, 0].add(h[:, 1]),
    "multiply_at": lambda h: h.at[:, 0].multiply(2.0),
    "dynamic_slice": lambda h: lax.dynamic_slice(h, (0, 1), (h.shape[0], 2)),
    "max_pool": pooled(-jnp.inf, lax.max),
    "sum_pool": pooled(0.0, lax.add),
    "convolution": lambda h: lax.conv_general_dilated(
        h[:, None], jnp.ones((1, 1, 3)), (1,), "SAME"
    ),
    "einsum": lambda h: jnp.einsum("bi,bj->bij", h, h),
    "ragged_dot": lambda h: lax.ragged_dot(h, jnp.ones((2, WIDTH, 3)), jnp.array([2, 2])),
    "attention": attention,
    "scan_to_carry": lambda h: scanned(lambda c, x: (jnp.tanh(c + x), None))(h)[0],
    "scan_to_outputs": lambda h: scanned(lambda c, x: (jnp.tanh(c + x), c))(h)[1].T,
    "scan_with_remat": lambda h: scanned(jax.checkpoint(lambda c, x: (jnp.sin(c + x), None)))(h)[0],
    "fori_loop": lambda h: lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h), h),
    "cond": lambda h: lax.cond(h.shape[0] > 0, jnp.tanh, jnp.sin, h),
    "remat": jax.checkpoint(jnp.tanh),
    "vmap": jax.vmap(lambda row: jnp.tanh(row).sum()),
    "custom_vjp": by_custom_vjp,
    "custom_jvp": by_custom_jvp,
    "half_precision": lambda h: h.astype(jnp.bfloat16).astype(jnp.float32),
    "dropout": lambda h: dj.layers.dropout(jax.random.key(0), 0.5, h),
    "straight_through": lambda h: h + lax.stop_gradient(jnp.round(h) - h),
    "triangular_solve": lambda h: jax.scipy.linalg.solve_triangular(2 * jnp.eye(WIDTH), h.T).T,
    "solve": lambda h: jnp.linalg.solve(2 * jnp.eye(WIDTH), h.T).T,
    "cholesky": of_rows(lambda m: jnp.linalg.cholesky(m)[0, 0]),
    "inverse": of_rows(lambda m: jnp.linalg.inv(m)[0, 0]),
    "determinant": of_rows(lambda m: jnp.linalg.slogdet(m)[1]),
    "eigenvalues": of_rows(lambda m: jnp.linalg.eigvalsh(m)[-1]),
    "interpolation": lambda h: jnp.interp(h[:, 0], jnp.arange(3.0), jnp.arange(3.0) ** 2),
    "one_hot": lambda h: h * nn.one_hot(h.argmax(1), WIDTH),
}


def by_example(h):
    """[n, ...] to [n]."""
    return h.sum(tuple(range(1, h.ndim)))


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_a_sum_of_means_is_found_behind_a_layer(layer):
    s = dj.VirtualStrategy(3)
    gradient = jax.grad(lambda w, x: jnp.mean(by_example(layer(x @ w))))

    def step(w, x, op):
        return w - 0.1 * ctx().all_reduce(op, gradient(w, x))

    assert dj.check(step, weights(), inputs(s), "mean", strategy=s, rules_only=True) is None
    with pytest.raises(CheckError, match="the sum of R means"):
        dj.check(step, weights(), inputs(s), "sum", strategy=s, rules_only=True)


#: Losses whose sum over R replicas is the mean over all examples, of a layer's [n, WIDTH], a mask
#: [n] and R.
SHARES = {
    "losses over R": lambda h, mask, R: jnp.mean(h.sum(1) / R),
    "squares over R": lambda h, mask, R: jnp.mean(h.sum(1) ** 2 / R),
    "losses times 1/R": lambda h, mask, R: jnp.mean(jnp.tanh(h).sum(1) * (1 / R)),
    "losses over R, masked": lambda h, mask, R: jnp.mean(jnp.tanh(h).sum(1) / R * mask),
    "masked losses over R": lambda h, mask, R: jnp.mean(mask * jnp.tanh(h).sum(1) / R),
    "two parts over R": lambda h, mask, R: jnp.mean(nn.gelu(h)[:, 0] / R + nn.relu(h)[:, 1] / R),
    "a mean over R": lambda h, mask, R: jnp.mean(nn.gelu(h).sum(1)) / R,
    "a sum of means over R": lambda h, mask, R: (
        (jnp.mean(nn.gelu(h)[:, 0]) + jnp.mean(h[:, 1])) / R
    ),
    "a sum over all": lambda h, mask, R: jnp.sum(nn.gelu(h).sum(1)) / (BATCH * R),
    "a sum of shares": lambda h, mask, R: jnp.sum(nn.gelu(h).sum(1) / (BATCH * R)),
    "a masked sum over all": lambda h, mask, R: jnp.sum(nn.gelu(h).sum(1) * mask) / (BATCH * R),
    "average_loss": lambda h, mask, R: dj.losses.average_loss(nn.relu(h).sum(1)),
    "average_loss, masked": lambda h, mask, R: dj.losses.average_loss(nn.gelu(h).sum(1), mask),
    "over a reduced count": lambda h, mask, R: (
        jnp.sum(nn.gelu(h).sum(1) * mask) / lax.psum(jnp.sum(mask), dj.REPLICA_AXIS)
    ),
    "means of rows": lambda h, mask, R: jnp.mean(h.mean(1) / R),
    "selected": lambda h, mask, R: jnp.mean(jnp.where(mask > 0, h.sum(1) / R, 0.0)),
    "in halves": lambda h, mask, R: jnp.mean(jnp.concatenate([h[:2] / R, h[2:] / R]).sum(1)),
    "stacked": lambda h, mask, R: jnp.mean(jnp.stack([h.sum(1), (h**2).sum(1)]).sum(0) / R),
    "clipped": lambda h, mask, R: jnp.mean(jnp.clip(h.sum(1), -1, 1) / R),
    "norms": lambda h, mask, R: jnp.mean(jnp.linalg.norm(h, axis=1) / R),
    "scanned": lambda h, mask, R: lax.scan(lambda c, x: (c + x.mean() / R, None), 0.0, h.T)[0],
    "mapped": lambda h, mask, R: lax.map(lambda x: jnp.mean(x**2), h.T).mean() / R,
    "with remat": lambda h, mask, R: jnp.mean(jax.checkpoint(lambda h: nn.gelu(h)[:, 0] / R)(h)),
}


def _sum_of_shares(reduce, loss, w, R):
    return reduce("sum", jax.grad(loss)(w))


def _mean_of_means(reduce, loss, w, R):
    return reduce("mean", jax.grad(lambda w: R * loss(w))(w))


def _sum_of_means_over_the_replicas(reduce, loss, w, R):
    return reduce("sum", jax.grad(lambda w: R * loss(w))(w)) / R


def _sum_of_means_at_a_rate_over_the_replicas(reduce, loss, w, R):
    return 0.1 / R * reduce("sum", jax.grad(lambda w: R * loss(w))(w))


WAYS = [
    _sum_of_shares,
    _mean_of_means,
    _sum_of_means_over_the_replicas,
    _sum_of_means_at_a_rate_over_the_replicas,
]


@pytest.mark.pairwise
@pytest.mark.parametrize("R", (2, 3, 8))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("share", SHARES.values(), ids=SHARES)
def test_a_mean_over_the_replicas_is_silent(share, way, R):
    s = dj.VirtualStrategy(R)
    args = (
        weights(),
        inputs(s),
        on_replicas(s, lambda r: np.float32(np.arange(BATCH) < BATCH - r % 2)),
    )

    def step(w, x, mask):
        return w - way(ctx().all_reduce, lambda w: share(x @ w, mask, R), w, R)

    assert dj.check(step, *args, strategy=s, rules_only=True) is None


def test_a_scope_of_that_name_is_no_backward_pass():
    strategy = dj.VirtualStrategy(2)

    def step(w, x):
        with jax.named_scope("conv_transpose"):
            grads = ctx().all_reduce("sum", jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w))
        return w - grads

    with pytest.warns(ReductionWarning, match="needs to be averaged over the replicas"):
        strategy.run(step, args=(weights(), inputs(strategy)))
