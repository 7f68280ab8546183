"""Loops, branches, random numbers and masks: right steps pass, and wrong ones are found."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distjax as dj
from distjax.errors import CheckError
from tests.check.problem import (
    R,
    X,
    Y,
    batch_of,
    descend,
    finding_of,
    findings_of,
    is_at,
    is_right,
    loss_of,
    params,
)

AXIS = "replica"


def one_step(params, x, y, reduce=lax.pmean):
    return descend(params, reduce(jax.grad(loss_of)(params, x, y), AXIS))  # reduces


# -- loops and branches ------------------------------------------------------------


def scanned(params, x, y, reduce):
    body = lambda p, _: (one_step(p, x, y, reduce), None)
    return lax.scan(body, params, None, length=2)[0]


def while_looped(params, x, y, reduce):
    body = lambda c: (c[0] + 1, one_step(c[1], x, y, reduce))
    return lax.while_loop(lambda c: c[0] < 2, body, (0, params))[1]


def for_looped(params, x, y, reduce):
    return lax.fori_loop(0, 2, lambda _, p: one_step(p, x, y, reduce), params)


def branching(params, x, y, reduce):
    is_large = lax.psum(jnp.sum(x**2), AXIS) > 0
    return lax.cond(is_large, lambda: one_step(params, x, y, reduce), lambda: params)


def switching(params, x, y, reduce):
    branches = [lambda: params, lambda: one_step(params, x, y, reduce)]
    return lax.switch(jnp.int32(lax.pmean(1.0, AXIS)), branches)


def in_a_checkpoint(params, x, y, reduce):
    loss = jax.checkpoint(loss_of)
    return descend(params, reduce(jax.grad(loss)(params, x, y), AXIS))


def in_a_jit(params, x, y, reduce):
    return jax.jit(lambda p: one_step(p, x, y, reduce))(params)


def mapped_over_rows(params, x, y, reduce):
    one = lambda x, y: jax.grad(loss_of)(params, x[None], y[None])
    grads = jax.tree.map(lambda g: g.mean(0), jax.vmap(one)(x, y))
    return descend(params, reduce(grads, AXIS))


@pytest.mark.parametrize("reduce", [lax.pmean, lax.psum], ids=["right", "wrong"])
@pytest.mark.parametrize(
    "construct",
    [
        scanned,
        while_looped,
        pytest.param(for_looped, marks=pytest.mark.drill),
        branching,
        pytest.param(switching, marks=pytest.mark.drill),
        pytest.param(in_a_checkpoint, marks=pytest.mark.drill),
        in_a_jit,
        mapped_over_rows,
    ],
)
def test_code_in_a_construct(strategy, construct, reduce):
    step = lambda params, x, y: construct(params, x, y, reduce)
    args = params(), *batch_of(strategy)
    if reduce is lax.pmean:
        assert is_right(step, *args, strategy=strategy)
    else:
        finding = finding_of(step, *args, strategy=strategy)
        assert f"{__file__}:" in finding.source


def test_rows_that_are_scanned_one_by_one(strategy):
    """The number of turns is the number of rows, which is R times as large for one replica."""

    def step(params, x, y):
        def body(total, row):
            grads = jax.grad(loss_of)(params, row[0][None], row[1][None])
            return jax.tree.map(jnp.add, total, grads), None

        total, _ = lax.scan(body, jax.tree.map(jnp.zeros_like, params), (x, y))
        return descend(params, jax.tree.map(lambda g: g / len(X), lax.psum(total, AXIS)))

    assert is_right(step, params(), *batch_of(strategy), strategy=strategy)


def test_a_branch_that_each_replica_takes_for_itself(strategy):
    def step(params, x, y):
        grads = jax.grad(loss_of)(params, x, y)
        grads = lax.cond(x[0, 0] > 0, lambda: grads, lambda: jax.tree.map(jnp.zeros_like, grads))
        return descend(params, lax.pmean(grads, AXIS))

    assert findings_of(step, params(), *batch_of(strategy), strategy=strategy)


def make_low_precision_step(dtype, reduce):
    low = lambda tree: jax.tree.map(lambda a: jnp.asarray(a, dtype), tree)

    def step(params, x, y):
        loss, grads = jax.value_and_grad(loss_of)(low(params), low(x), low(y))
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), reduce(grads, AXIS))
        return descend(params, grads), lax.pmean(loss, AXIS)

    return step


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_rounding_of_low_precision_is_no_difference(strategy, dtype):
    step = make_low_precision_step(dtype, lax.pmean)
    assert is_right(step, params(), *batch_of(strategy), strategy=strategy)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_mistake_in_low_precision_is_found(strategy, dtype):
    step = make_low_precision_step(dtype, lax.psum)
    assert findings_of(step, params(), *batch_of(strategy), strategy=strategy)


# -- random numbers ------------------------------------------------------------------


def own_key(key):
    return jax.random.fold_in(key, lax.axis_index(AXIS))


def kept(key, x):
    return jax.random.bernoulli(key, 0.5, x.shape)


def dropped(key, x):
    return jnp.where(kept(key, x), x, 0.0)


def dropped_in_a_scan(key, x):
    body = lambda x, key: (dropped(key, x + 1), None)
    return lax.scan(body, x, jax.random.split(key, 2))[0]


def dropped_in_a_while(key, x):
    def body(carry):
        i, key, x = carry
        key, now = jax.random.split(key)
        return i + 1, key, dropped(now, x + 1)

    return lax.while_loop(lambda c: c[0] < 2, body, (0, key, x))[2]


def dropped_in_a_branch(key, x):
    is_training = lax.psum(jnp.sum(x**2), AXIS) > 0
    return lax.cond(is_training, dropped, lambda key, x: x, key, x)


def dropped_in_a_checkpoint(key, x):
    return jax.checkpoint(dropped)(key, x)


def dropped_by_row(key, x):
    keys = jax.random.split(key, len(x))
    return jax.vmap(dropped)(keys, x)


@pytest.mark.parametrize(
    "drop",
    [
        dropped,
        dropped_in_a_scan,
        pytest.param(dropped_in_a_while, marks=pytest.mark.drill),
        pytest.param(dropped_in_a_branch, marks=pytest.mark.drill),
        pytest.param(dropped_in_a_checkpoint, marks=pytest.mark.drill),
        dropped_by_row,
    ],
)
def test_random_numbers_are_the_same(strategy, drop):
    """Dropout is no difference, wherever it is drawn."""

    def make(reduce):
        def step(params, key, x, y):
            return one_step(params, drop(own_key(key), x), y, reduce)

        return step

    args = params(), jax.random.key(0), *batch_of(strategy)
    assert is_right(make(lax.pmean), *args, strategy=strategy)
    if drop in (dropped_in_a_while, dropped_by_row):  # a sum for a mean is one all the same
        finding = finding_of(make(lax.psum), *args, strategy=strategy)
        assert "by the factor 4" in finding.text


def test_keys_of_each_replica_s_own(strategy):
    """`distribute_values_from_function` gives each replica a key."""
    keys = jax.random.split(jax.random.key(0), R)
    key = strategy.distribute_values_from_function(
        lambda context: keys[context.replica_id_in_sync_group]
    )
    step = lambda params, key, x, y: one_step(params, dropped(key, x), y)
    assert is_right(step, params(), key, *batch_of(strategy), strategy=strategy)


def test_raw_keys(strategy):
    step = lambda params, key, x, y: one_step(params, dropped(own_key(key), x), y)
    args = params(), jax.random.PRNGKey(0), *batch_of(strategy)
    assert is_right(step, *args, strategy=strategy)


def test_the_same_random_numbers_on_each_replica_are_found(strategy):
    step = lambda params, key, x, y: one_step(params, dropped(key, x), y)
    args = params(), jax.random.key(0), *batch_of(strategy)
    assert findings_of(step, *args, strategy=strategy)


def test_noise_on_weights_is_equal_everywhere(strategy):
    """A draw that does not grow with the batch, from one key."""

    def step(params, key, x, y):
        params = params | {"w": params["w"] + 0.1 * jax.random.normal(key, (3,))}
        return one_step(params, x, y)

    args = params(), jax.random.key(0), *batch_of(strategy)
    assert is_right(step, *args, strategy=strategy)


def test_the_module_s_own_random_numbers(strategy):
    nnx = pytest.importorskip("flax.nnx")
    with strategy.scope():
        model = dj.flax.create(
            lambda: nnx.Sequential(
                nnx.Linear(3, 4, rngs=nnx.Rngs(0)),
                nnx.Dropout(0.5, rngs=nnx.Rngs(1)),
                nnx.Linear(4, 1, rngs=nnx.Rngs(2)),
            )
        )

    def step(model, x, y):
        grads = nnx.grad(lambda m: jnp.mean((m(x)[:, 0] - y) ** 2))(model)
        grads = lax.pmean(grads, AXIS)
        state = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, state, grads))

    assert is_right(step, model, *batch_of(strategy), strategy=strategy)


# -- masks -----------------------------------------------------------------------------

MASK = np.ones(8, np.float32)


def test_a_local_count_of_a_mask_without_zeros_is_found(strategy):
    """The mask is drawn anew: with ones only, all counts are right by chance."""

    def step(params, x, y, mask):
        loss = lambda p: jnp.sum(mask * (x @ p["w"] + p["b"] - y) ** 2) / mask.sum()  # the count
        return descend(params, lax.pmean(jax.grad(loss)(params), AXIS))

    args = params(), *batch_of(strategy, X, Y, MASK)
    found = findings_of(step, *args, strategy=strategy)
    assert "with other zeros and ones in the masks of the batch" in found[0].text


def test_a_global_count_of_a_mask_is_right(strategy):
    def step(params, x, y, mask):
        count = lax.psum(mask.sum(), AXIS)
        loss = lambda p: jnp.sum(mask * (x @ p["w"] + p["b"] - y) ** 2) / count
        return descend(params, lax.psum(jax.grad(loss)(params), AXIS))

    assert is_right(step, params(), *batch_of(strategy, X, Y, MASK), strategy=strategy)


def make_masked_step(is_masked):
    def step(params, batch):
        def loss(p):
            x, y = batch.data
            losses = (x @ p["w"] + p["b"] - y) ** 2
            return dj.losses.average_loss(losses, mask=batch.mask if is_masked else None)

        return descend(params, lax.psum(jax.grad(loss)(params), AXIS))

    return step


def masked_batch(strategy):
    """The last of two batches, of 5 rows of 8."""
    batches = [(X, Y), (X[:5], Y[:5])]
    return [*strategy.distribute_dataset(batches, dj.InputOptions(partial="pad"))][-1]


def test_a_mask_that_is_read_is_right(strategy):
    """`dj.Batch`: a mask that the step reads is right."""
    batch = masked_batch(strategy)
    assert is_right(make_masked_step(True), params(), batch, strategy=strategy)


def test_a_mask_that_nobody_reads_is_found_by_a_rule(strategy):
    batch = masked_batch(strategy)
    found = findings_of(make_masked_step(False), params(), batch, strategy=strategy)
    assert "padded examples counted" in [f.rule for f in found]


# -- what is meant -------------------------------------------------------------------------


def test_what_is_meant_is_no_finding(strategy):
    def step(params, x, y):
        with dj.expect("the loss of a replica's own rows is enough for the plot"):
            shown = jnp.sqrt(loss_of(params, x, y))
        return one_step(params, x, y), shown

    assert is_right(step, params(), *batch_of(strategy), strategy=strategy)


def test_an_argument_that_is_meant_to_differ(strategy):
    """It comes back with a value of each replica's own."""

    def step(params, stats, x, y):
        return one_step(params, x, y), 0.9 * stats + 0.1 * x.mean(0)

    stats = dj.expect("each replica has statistics of its own", differs=jnp.zeros(3))
    assert is_right(step, params(), stats, *batch_of(strategy), strategy=strategy)
    assert findings_of(step, params(), jnp.zeros(3), *batch_of(strategy), strategy=strategy)


def test_what_depends_on_the_replica_s_own_number_is_no_finding(strategy):
    def step(params, x, y):
        return one_step(params, x, y), 1.5 * lax.axis_index(AXIS)

    assert is_right(step, params(), *batch_of(strategy), strategy=strategy)


def test_of_a_loop_the_line_in_its_body_is_named(strategy):
    step = lambda params, x, y: scanned(params, x, y, lax.psum)
    finding = finding_of(step, params(), *batch_of(strategy), strategy=strategy)
    assert is_at(finding, __file__, "reduces") and "a mean in place of the sum" in finding.text


def test_an_nnx_object_that_is_meant_to_differ(strategy):
    nnx = pytest.importorskip("flax.nnx")
    norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))

    def step(norm, x):
        norm(x)
        return lax.pmean(x.mean(), AXIS)

    with pytest.raises(CheckError, match="BatchNorm.var differs"):
        dj.check(step, norm, *batch_of(strategy, X), strategy=strategy)
    own = dj.expect("each replica has statistics of its own", differs=norm)
    assert is_right(step, own, *batch_of(strategy, X), strategy=strategy)


def test_one_number_is_state(strategy):
    """A small change of it counts, as that of an array does."""

    def step(reduce, scale, x):
        grad = jax.grad(lambda scale: jnp.mean((scale * x - 1) ** 2))(scale)
        return scale - 1e-6 * reduce(grad, AXIS)

    args = 100.0, *batch_of(strategy, X)
    assert is_right(functools.partial(step, lax.pmean), *args, strategy=strategy)
    found = finding_of(functools.partial(step, lax.psum), *args, strategy=strategy)
    assert "the result differs" in found.text
