"""Batch normalization: R replicas compute what one device does with the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import distjax as dj
from distjax.errors import BatchError
from tests.replicas import per_replica

EPSILON = 1e-3
G, C = 24, 3


def images(seed=0):
    """Returns [G, 2, C] with a large mean, which a one-pass variance would lose."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(G, 2, C)) * [1, 2, 3] + [100, -5, 0]).astype(np.float32)


def split(strategy, array):
    count = strategy.num_replicas_in_sync
    return per_replica(strategy, array.reshape(count, len(array) // count, *array.shape[1:]))


def whole(strategy, value):
    """Returns the replicas' results as one batch."""
    return np.concatenate([np.asarray(v) for v in strategy.local_results(value)])


def expected(x, kept=slice(None)):
    x64 = x.astype(np.float64)
    flat = x64[kept].reshape(-1, C)
    mean, variance = flat.mean(axis=0), flat.var(axis=0)
    return (x64 - mean) / np.sqrt(variance + EPSILON), mean, variance


def make(strategy, **options):
    with strategy.scope():
        return dj.layers.BatchNormalization(C, epsilon=EPSILON, **options)


# -- values -------------------------------------------------------------------


@pytest.mark.api_row("distribution-aware layers")
def test_equals_the_whole_batch_on_one_device(strategy, how):
    norm, x = make(strategy, momentum=0.9), images()
    step = how(lambda x: strategy.run(lambda x: norm(x, training=True), args=(x,)))
    y, mean, variance = expected(x)
    np.testing.assert_allclose(whole(strategy, step(split(strategy, x))), y, atol=1e-4)
    np.testing.assert_allclose(norm.moving_mean.value, 0.1 * mean, rtol=1e-5)
    np.testing.assert_allclose(norm.moving_variance.value, 0.9 + 0.1 * variance, rtol=1e-4)


def test_by_the_moving_statistics(strategy, how):
    norm, x = make(strategy), images()
    norm.moving_mean.assign(np.array([100, -5, 0], np.float32))
    norm.moving_variance.assign(np.array([1, 4, 9], np.float32))
    norm.gamma.assign(np.full(C, 2, np.float32))
    norm.beta.assign(np.full(C, 1, np.float32))
    infer = how(lambda x: strategy.run(lambda x: norm(x, training=False), args=(x,)))
    y = 2 * (x - np.array([100, -5, 0])) / np.sqrt(np.array([1, 4, 9]) + EPSILON) + 1
    np.testing.assert_allclose(whole(strategy, infer(split(strategy, x))), y, atol=1e-4)
    np.testing.assert_array_equal(norm.moving_mean.value, [100, -5, 0])


def test_a_mask_says_which_examples_count(strategy):
    norm, x = make(strategy), images()
    kept = np.arange(G) % 3 != 1
    y, mean, variance = expected(x, kept)
    masked = np.where(kept[:, None, None], x, np.nan)

    def step(x, mask):
        y, statistics = norm.normalize(x, mask)
        return y, tuple(statistics)

    out, statistics = strategy.run(step, args=(split(strategy, masked), split(strategy, kept)))
    np.testing.assert_allclose(whole(strategy, out)[kept], y[kept], atol=1e-4)
    np.testing.assert_allclose(statistics[0], mean, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(statistics[1], variance, rtol=1e-4)


def test_a_mask_that_keeps_nothing_gives_finite_numbers(pair):
    norm = make(pair)
    mask = np.zeros(G, bool)
    y = pair.run(lambda x, m: norm(x, training=True, mask=m), args=(images(), mask))
    assert np.isfinite(whole(pair, y)).all()
    np.testing.assert_array_equal(norm.moving_mean.value, np.zeros(C))


@pytest.mark.pairwise
@pytest.mark.parametrize("synchronized", [True, False])
def test_a_batch_of_padding_alone_keeps_the_moving_statistics(strategy, how, synchronized):
    """As after a filter of the data: of the batch, and of each replica's part of it."""
    norm = make(strategy, momentum=0.5, synchronized=synchronized)
    call = lambda x, mask: norm(x, training=True, mask=mask)
    step = how(lambda *args: strategy.run(call, args=args))
    x = split(strategy, images())
    step(x, split(strategy, np.ones(G, bool)))
    before = [np.asarray(m.value) for m in (norm.moving_mean, norm.moving_variance)]
    assert (before[1] > 1).any()
    y = step(x, split(strategy, np.zeros(G, bool)))
    assert np.isfinite(whole(strategy, y)).all()
    after = [np.asarray(m.value) for m in (norm.moving_mean, norm.moving_variance)]
    np.testing.assert_array_equal(after, before)


def test_a_batch_without_examples_keeps_the_moving_statistics():
    norm = dj.layers.BatchNormalization(C)
    assert norm(np.ones((0, C), np.float32), training=True).shape == (0, C)
    np.testing.assert_array_equal(norm.moving_variance.value, np.ones(C))


def test_statistics_say_over_how_many_values_they_are(strategy):
    mask = np.arange(G) % 3 != 1
    x = split(strategy, images())
    step = lambda x, mask: dj.layers.batch_statistics(x, mask)
    assert float(strategy.run(step, args=(x, split(strategy, mask))).count) == 2 * mask.sum()
    assert float(strategy.run(dj.layers.batch_statistics, args=(x,)).count) == 2 * G


def test_statistics_of_your_own_move_the_moving_ones():
    norm = dj.layers.BatchNormalization(C, momentum=0.5)
    norm.update(dj.layers.Statistics(jnp.full(C, 4.0), jnp.full(C, 3.0)))
    np.testing.assert_array_equal(norm.moving_mean.value, np.full(C, 2.0))
    np.testing.assert_array_equal(norm.moving_variance.value, np.full(C, 2.0))


@pytest.mark.parametrize("training", [True, False])
def test_without_implicit_promotion_of_ranks(pair, training):
    norm, x = make(pair), images()
    mask = split(pair, np.ones(G, bool))
    with jax.numpy_rank_promotion("raise"):
        call = lambda x, mask: norm(x, training=training, mask=mask)
        y = pair.run(call, args=(split(pair, x), mask))
    if training:
        np.testing.assert_allclose(whole(pair, y), expected(x)[0], atol=1e-4)


def test_not_synchronized_each_replica_has_its_own_statistics(strategy, how):
    norm, x = make(strategy, synchronized=False, momentum=0.0), images()
    step = how(lambda x: strategy.run(lambda x: norm(x, training=True), args=(x,)))
    out = step(split(strategy, x))
    count = strategy.num_replicas_in_sync
    parts = [expected(part) for part in x.reshape(count, -1, 2, C)]
    np.testing.assert_allclose(
        whole(strategy, out), np.concatenate([p[0] for p in parts]), atol=1e-3
    )
    for component, (_, mean, _) in zip(norm.moving_mean.local_results(), parts, strict=False):
        np.testing.assert_allclose(component, mean, rtol=1e-4, atol=1e-5)
    means = np.mean([p[1] for p in parts], axis=0)
    np.testing.assert_allclose(norm.moving_mean.value, means, rtol=1e-4, atol=1e-5)


def test_a_replica_with_padding_alone_keeps_its_statistics(pair):
    with pair.scope():
        layer = dj.layers.BatchNormalization(1, synchronized=False, momentum=0.5)
    x = per_replica(pair, [np.full((3, 1), 10.0, np.float32)] * 2)
    masks = per_replica(pair, [np.array([True, True, False]), np.zeros(3, bool)])
    pair.run(lambda x, mask: layer(x, training=True, mask=mask), args=(x, masks))
    assert [x.tolist() for x in layer.moving_mean.local_results()] == [[5.0], [0.0]]
    assert [x.tolist() for x in layer.moving_variance.local_results()] == [[0.5], [1.0]]


def test_dtype_is_kept_and_statistics_are_float32(pair):
    norm = make(pair)
    x = jnp.asarray(images(), jnp.bfloat16)
    y, statistics = pair.run(lambda x: norm.normalize(x), args=(x,))
    assert y.dtype == jnp.bfloat16
    assert statistics.mean.dtype == jnp.float32
    assert pair.run(lambda: norm(np.ones((4, C), np.int32), training=False)).dtype == jnp.float32


# -- contexts -----------------------------------------------------------------


@pytest.mark.api_row("distribution-aware layers")
def test_cross_replica_context_on_per_replica_values(strategy, how):
    norm, x = make(strategy, momentum=0.9), images()
    call = how(lambda x: norm(x, training=True))
    y, mean, _ = expected(x)
    with strategy.scope():
        out = call(split(strategy, x))
    np.testing.assert_allclose(whole(strategy, out), y, atol=1e-4)
    np.testing.assert_allclose(norm.moving_mean.value, 0.1 * mean, rtol=1e-5)
    infer = how(lambda x: norm(x, training=False))
    assert whole(strategy, infer(split(strategy, x))).shape == x.shape


def test_cross_replica_context_on_a_plain_array(strategy, how):
    norm, x = make(strategy, momentum=0.9), images()
    y, mean, _ = expected(x)
    with strategy.scope():
        out = how(lambda x: norm(x, training=True))(x)
    assert isinstance(out, jax.Array)
    np.testing.assert_allclose(out, y, atol=1e-4)
    np.testing.assert_allclose(norm.moving_mean.value, 0.1 * mean, rtol=1e-5)


@pytest.mark.api_row("code with no knowledge of strategies", "distribution-aware layers")
def test_with_no_strategy_in_sight():
    norm, x = dj.layers.BatchNormalization(C, epsilon=EPSILON), images()
    np.testing.assert_allclose(norm(x, training=True), expected(x)[0], atol=1e-4)


def test_not_synchronized_in_cross_replica_context(pair):
    norm, x = make(pair, synchronized=False, momentum=0.0), images()
    norm(split(pair, x), training=True)
    means = [expected(part)[1] for part in x.reshape(2, -1, 2, C)]
    for component, mean in zip(norm.moving_mean.local_results(), means, strict=True):
        np.testing.assert_allclose(component, mean, rtol=1e-4, atol=1e-5)


# -- derivatives --------------------------------------------------------------


def objective(y, weights):
    return jnp.sum(weights * jnp.tanh(y))


def test_gradients_equal_those_of_the_whole_batch(strategy, how):
    """Of the sum of the replicas' losses, by parameters and by inputs."""
    norm, x = make(strategy), images()
    weights = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
    parameters = {"gamma": jnp.full(C, 1.5), "beta": jnp.full(C, 0.5)}

    def replica_step(x, weights):
        def loss(parameters, x):
            y, statistics = norm.normalize(x, parameters=parameters)
            return objective(y, weights), statistics

        (by_parameters, by_x), statistics = jax.grad(loss, (0, 1), has_aux=True)(parameters, x)
        norm.update(statistics)
        return dj.get_replica_context().all_reduce("sum", by_parameters), by_x

    def on_one_device(parameters, x):
        mean = x.mean(axis=(0, 1))
        variance = jnp.square(x - mean).mean(axis=(0, 1))
        y = (x - mean) * jax.lax.rsqrt(variance + EPSILON)
        return objective(parameters["gamma"] * y + parameters["beta"], weights)

    step = how(lambda *args: strategy.run(replica_step, args=args))
    by_parameters, by_x = step(split(strategy, x), split(strategy, weights))
    want_parameters, want_x = jax.grad(on_one_device, (0, 1))(parameters, x)
    for key in parameters:
        np.testing.assert_allclose(by_parameters[key], want_parameters[key], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(whole(strategy, by_x), want_x, atol=2e-3)
    assert (np.asarray(norm.moving_mean.value) != 0).all()


def test_derivative_of_the_statistics():
    x = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
    check_grads(lambda x: dj.layers.batch_statistics(x).variance, (x,), order=1, atol=1e-2)


# -- where and what it costs --------------------------------------------------


def test_variables(pair):
    norm = make(pair, name="bn")
    assert {k: v.name for k, v in norm.parameters.items()} == {
        "gamma": "bn/gamma",
        "beta": "bn/beta",
    }
    assert norm.gamma.trainable
    assert norm.beta.trainable
    for moving in (norm.moving_mean, norm.moving_variance):
        assert not moving.trainable
        assert moving.synchronization is dj.VariableSynchronization.ON_READ


@pytest.mark.parametrize(
    ("training", "synchronized", "count"), [(True, True, 2), (True, False, 0), (False, True, 0)]
)
def test_collectives(mirrored, training, synchronized, count):
    norm = make(mirrored, synchronized=synchronized)
    x = split(mirrored, images())
    lowered = dj.jit(lambda x: mirrored.run(lambda x: norm(x, training=training), args=(x,))).lower(
        x
    )
    assert lowered.as_text().count('"stablehlo.all_reduce"') == count


def test_statistics_are_mirrored(pair):
    norm = make(pair)
    _, statistics = pair.run(lambda x: norm.normalize(x), args=(split(pair, images()),))
    assert isinstance(statistics.mean, jax.Array)
    assert dj.locality(statistics.mean) == dj.locality(norm.gamma)


# -- errors -------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(C,), (4, C + 1), ()])
def test_another_number_of_features(pair, shape):
    norm = make(pair)
    with pytest.raises(BatchError, match=r"^BatchNormalization needs \[B, ..., 3\] per replica"):
        pair.run(lambda: norm(np.ones(shape, np.float32), training=True))


@pytest.mark.parametrize("count", [0, -3, 2.0, True, None, (3,)])
def test_what_is_no_number_of_features(count):
    with pytest.raises(ValueError, match="^BatchNormalization: num_features needs an int of 1"):
        dj.layers.BatchNormalization(count)


@pytest.mark.parametrize("momentum", [-0.1, 1.01, np.float32("nan"), np.float32(2), None, "0.9"])
def test_what_is_no_momentum(momentum):
    with pytest.raises(ValueError, match="^BatchNormalization: momentum needs a number from 0 to"):
        dj.layers.BatchNormalization(C, momentum=momentum)


@pytest.mark.parametrize("momentum", [0, 1, np.float32(0.9), jnp.float32(0.9)])
def test_numbers_of_any_kind_may_be_a_momentum(momentum):
    norm = dj.layers.BatchNormalization(np.int64(C), momentum=momentum)
    assert norm(images(), training=True).shape == images().shape


@pytest.mark.parametrize("mask", [np.ones(4), np.ones(3, bool), np.ones((4, C), bool)])
def test_a_mask_that_does_not_fit(pair, mask):
    norm = make(pair)
    with pytest.raises(BatchError, match="^batch_statistics: mask needs bool values of shape .4,"):
        pair.run(lambda: norm(np.ones((4, C), np.float32), training=True, mask=mask))


def test_a_write_inside_grad_says_what_to_do(pair):
    norm = make(pair)

    def step(x):
        return jax.grad(lambda x: jnp.sum(norm(x, training=True)))(x)

    with pytest.raises(dj.errors.TraceLeakError, match="batch_norm/moving_mean(.|\n)*jax.grad"):
        pair.run(step, args=(jnp.ones((4, C)),))


def test_as_text():
    layer = dj.layers.BatchNormalization(3, synchronized=False)
    assert repr(layer) == "BatchNormalization(3, synchronized=False)"
