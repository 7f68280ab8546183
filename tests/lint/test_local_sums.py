"""What is computed of one replica's sums and may be meant is silent in a plain run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distjax as dj
from distjax.errors import ReductionWarning
from tests.wrong_programs.program import MEAN, ON_READ, ctx, mean, require_silence, total

R, ROWS, SIZE = 2, 6, 5
_rng = np.random.default_rng(0)
X = _rng.normal(size=(R * ROWS, SIZE)).astype(np.float32)
MASK = (np.arange(R * ROWS) % 5 > 0).astype(np.float32)


@pytest.fixture(scope="module")
def two():
    return dj.VirtualStrategy(R)


def batch(s):
    return next(iter(s.distribute_dataset([(X, MASK)])))


def weights():
    return np.linspace(-1, 1, SIZE, dtype=np.float32)


def errors(w, x):
    return (x @ w - 1) ** 2


def loss_of(w, x):
    return errors(w, x).mean()


def kept_component(right):
    """An accuracy of each replica's own rows, whose mean over the replicas is read."""
    variable = []

    def step(w, x, mask):
        with_sums = mask.sum() if not right else 3.0
        variable[0].assign_add((errors(w, x) * mask).sum() / with_sums)

    step.variable = variable
    return step


def test_a_component_that_is_a_quotient(two):
    for right in (False, True):
        step = kept_component(right)
        with two.scope():
            v = dj.Variable(jnp.float32(0), synchronization=ON_READ, aggregation=MEAN)
        step.variable.append(v)
        if right:
            require_silence(two, step, weights(), *batch(two))
        else:
            with pytest.warns(ReductionWarning, match="quotients by a local count"):
                two.run(step, args=(weights(), *batch(two)))


def normalized(w, x, mask):
    """A batch norm of each replica's own, whose running statistics are averaged."""
    z = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3)
    return w - 0.1 * mean(jax.grad(loss_of)(w, z)), mean(x.var(0))


def contrasted(w, x, mask):
    logits = (x * w) @ x.T
    return w - 0.1 * mean(
        jax.grad(lambda w: -jnp.diag(jax.nn.log_softmax((x * w) @ x.T)).mean())(w)
    ), mean(logits.mean())


def perplexity(w, x, mask):
    """What is not linear in local sums is for `dj.check`."""
    return mean(jnp.exp(loss_of(w, x))), total(loss_of(w, x)), mean(jnp.max(x))


def clipped_gradient(w, x, mask):
    grads = jax.grad(loss_of)(w, x)
    return w - 0.1 * total(jnp.clip(grads, -0.1, 0.1)), mean(jnp.linalg.norm(grads))


def signs(w, x, mask):
    return w - 0.1 * jnp.sign(total(jnp.sign(jax.grad(loss_of)(w, x))))


def clipped_rows(w, x, mask):
    grads = jax.vmap(lambda x: jax.grad(lambda w: (x @ w - 1) ** 2)(w))(x)
    norms = jnp.sqrt(jnp.sum(grads**2, 1, keepdims=True))
    return w - 0.1 * mean((grads / jnp.maximum(norms, 1)).mean(0))


def decay_over_the_replicas(w, x, mask):
    decay = 0.05 / ctx().num_replicas_in_sync  # the trace shows 0.025

    def loss(w):
        return errors(w, x).sum() / (R * ROWS) + decay * jnp.sum(w * w)

    return w - 0.1 * total(jax.grad(loss)(w))


def gradient_penalty(w, x, mask):
    def penalty(w):
        slopes = jax.grad(lambda x: jnp.tanh(x @ w).sum())(x)  # of each row
        return jnp.mean((jnp.sqrt(jnp.sum(slopes**2, 1)) - 1) ** 2)

    return mean(penalty(w)), w - 0.1 * mean(jax.grad(penalty)(w))


def masked(w, x, mask):
    return total((errors(w, x) * mask).sum()) / jnp.maximum(total(mask.sum()), 1)


def loss_per_row(w, x, mask):
    return mean(lax.map(lambda row: jax.nn.logsumexp(row * w), x).mean())


@pytest.mark.parametrize(
    "step",
    [
        normalized,
        contrasted,
        perplexity,
        clipped_gradient,
        signs,
        clipped_rows,
        decay_over_the_replicas,
        gradient_penalty,
        masked,
        loss_per_row,
    ],
)
def test_what_may_be_meant_is_silent(two, step):
    require_silence(two, step, weights(), *batch(two))
