"""What is not linear in one replica's sums is told of where it is reduced, in a plain run."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import distjax as dj
from distjax.errors import LocalityWarning, ReductionWarning
from tests.wrong_programs.program import MEAN, ON_READ, ctx, mean, require_silence, total

R, ROWS, SIZE = 2, 6, 5
_rng = np.random.default_rng(0)
X = _rng.normal(size=(R * ROWS, SIZE)).astype(np.float32)
MASK = (np.arange(R * ROWS) % 5 > 0).astype(np.float32)
FUNCTION = "a function of one replica's sums"
SIZE_OF = "a size of gradients"
EXTREME = "each replica's own largest or smallest"
RETURNED = "which is returned"


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


def dice(x, w, reduce):
    hits, there = reduce((jax.nn.sigmoid(x @ w).sum(), jnp.sum(x[:, 0] > 0)))
    return 1 - (2 * hits + 1) / (hits + there + 1)


def decorrelated(x, w, reduce):
    z = x * w
    return jnp.sum((reduce(z.T @ z / len(z)) - 1) ** 2)


def trained(loss):
    return lambda right: (
        lambda w, x, mask: (
            w - 0.1 * mean(jax.grad(lambda w: loss(x, w, mean if right else lambda x: x))(w))
        )
    )


def kept_component(right):
    """An accuracy of each replica's own rows, whose mean over the replicas is read."""
    variable = []

    def step(w, x, mask):
        with_sums = mask.sum() if not right else 3.0
        variable[0].assign_add((errors(w, x) * mask).sum() / with_sums)

    step.variable = variable
    return step


#: What a plain run says -> the step, wrong or right.
STEPS = {
    "perplexity": (
        FUNCTION,
        lambda right: (
            lambda w, x, mask: (
                jnp.exp(mean(loss_of(w, x))) if right else mean(jnp.exp(loss_of(w, x)))
            )
        ),
    ),
    "dice": (FUNCTION, trained(dice)),
    "decorrelated": (FUNCTION, trained(decorrelated)),
    "deviation": (
        FUNCTION,
        lambda right: (
            lambda w, x, mask: jnp.sqrt(mean((x**2).mean(0))) if right else mean(x.std(0))
        ),
    ),
    "norm": (
        SIZE_OF,
        lambda right: (
            lambda w, x, mask: (
                optax.tree.norm(mean(jax.grad(loss_of)(w, x)))
                if right
                else mean(optax.tree.norm(jax.grad(loss_of)(w, x)))
            )
        ),
    ),
    "largest": (
        EXTREME,
        lambda right: (
            lambda w, x, mask: lax.pmax(jnp.max(x), "replica") if right else mean(jnp.max(x))
        ),
    ),
    "sum_of_means": (
        RETURNED,
        lambda right: lambda w, x, mask: (mean if right else total)(loss_of(w, x)),
    ),
    "sum_over_the_local_size": (
        RETURNED,
        lambda right: lambda w, x, mask: total(errors(w, x).sum()) / len(X if right else x),
    ),
    "product": (
        "updates equal state",
        lambda right: (
            lambda w, x, mask: w - 0.1 * (mean if right else total)(x.T @ (x @ w - 1) / len(x))
        ),
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_function_of_local_sums(two, name):
    told, make = STEPS[name]
    with pytest.warns(ReductionWarning, match=told) as caught:
        two.run(make(False), args=(weights(), *batch(two)))
    assert "Why: " in str(caught[0].message) and "Fix: " in str(caught[0].message)
    require_silence(two, make(True), weights(), *batch(two))


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


def test_values_of_a_replica_that_are_no_batch(two):
    """A chain has sums, too: only of a batch it is known which axis holds rows."""
    chain = two.per_replica(jnp.asarray(X[:R]))
    accepted = lambda x: mean(jnp.minimum(1.0, jnp.exp(-jnp.sum(x**2))))
    require_silence(two, accepted, chain)


def test_what_the_rows_pick_of_a_gathered_table():
    """As the embedding of a language model under ZeRO-3."""
    strategy = dj.ShardedStrategy(jax.devices()[:R], partition="parameters", min_split_bytes=0)
    with strategy.scope():
        table, w = dj.Variable(np.ones((8, SIZE), np.float32)), dj.Variable(weights())
    (tokens,) = strategy.distribute_dataset([np.arange(R * ROWS) % 8])

    def step(tokens):
        loss = lambda table, w: jnp.mean(jnp.tanh(table[tokens] @ w) ** 2)
        return mean(jax.grad(loss, (0, 1))(table.value, w.value))

    require_silence(strategy, step, tokens)


def test_explain_tells_how_a_result_depends_on_the_number_of_replicas(two):
    step = lambda w, x, mask: (jnp.exp(loss_of(w, x)), loss_of(w, x), errors(w, x).sum())
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalityWarning)
        told = str(dj.explain(step, weights(), *batch(two), strategy=two))
    assert "not linear: neither sum nor mean is what one replica computes" in told
    assert "R times too large: their mean is what one replica computes" in told
    assert "a share: their sum is what one replica computes" in told
