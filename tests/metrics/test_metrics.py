"""Mean, Sum and Accuracy: closed forms, masks, contexts, cost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import BatchError, LocalityError, StrategyMismatchError
from tests.interrupts import in_packages, interrupted
from tests.replicas import ids, local, per_replica


@pytest.fixture
def make(strategy):
    def in_scope(kind, *args, **kwargs):
        with strategy.scope():
            return kind(*args, **kwargs)

    return in_scope


def batches(strategy, size=4):
    """Returns [R, size] of 0, 1, 2, ... on the replicas, and the numbers."""
    count = strategy.num_replicas_in_sync
    numbers = np.arange(count * size, dtype=np.float32)
    return per_replica(strategy, numbers.reshape(count, size)), numbers


# -- values -------------------------------------------------------------------


def test_mean_and_sum_over_all_examples(strategy, make, how):
    mean, total = make(dj.metrics.Mean), make(dj.metrics.Sum)
    x, numbers = batches(strategy)

    def step(x):
        mean.update(x)
        total.update(x)

    run = how(lambda x: strategy.run(step, args=(x,)))
    for _ in range(3):
        run(x)
    assert float(mean.result()) == numbers.mean()
    assert float(total.result()) == 3 * numbers.sum()


def test_a_mask_says_which_examples_count(strategy, make):
    """As many examples on replica r as its number says; the rest is NaN."""
    mean, total = make(dj.metrics.Mean), make(dj.metrics.Sum)
    x, numbers = batches(strategy, 8)

    def step(x):
        mask = jnp.arange(8) < dj.get_replica_context().replica_id_in_sync_group
        x = jnp.where(mask, x, jnp.nan)
        mean.update(x, mask=mask)
        total.update(x, mask)

    strategy.run(step, args=(x,))
    kept = [row[:r] for r, row in enumerate(numbers.reshape(-1, 8))]
    kept = np.concatenate(kept)
    assert float(total.result()) == kept.sum()
    np.testing.assert_allclose(mean.result(), kept.mean() if len(kept) else 0.0, rtol=1e-6)


def test_a_mask_of_examples_with_several_values(strategy, make):
    mean = make(dj.metrics.Mean)
    x = np.array([[1, 2, 3], [10, 20, 30]], np.float32)
    strategy.run(lambda: mean.update(x, mask=np.array([True, False])))
    assert float(mean.result()) == 2.0


def test_a_weighted_mean(strategy, make, how):
    mean = make(functools.partial(dj.metrics.Mean, weighted=True))
    x, numbers = batches(strategy, 8)

    def step(x):
        weights = jnp.arange(8) % 3
        mean.update(x, weights=weights)
        mean.update(jnp.stack([x, x], 1), jnp.arange(8) < 4, weights=weights.astype(jnp.float32))

    how(lambda x: strategy.run(step, args=(x,)))(x)
    rows = numbers.reshape(-1, 8)
    weights = np.tile(np.arange(8) % 3, (len(rows), 1)) * (1 + 2 * (np.arange(8) < 4))
    np.testing.assert_allclose(mean.result(), np.average(rows, weights=weights), rtol=1e-6)


def test_weights_for_a_mean_that_has_some():
    plain, weighted = dj.metrics.Mean("loss"), dj.metrics.Mean("loss", weighted=True)
    with pytest.raises(TypeError, match="^metric 'loss' needs to be weighted to take weights"):
        plain.update(np.ones(2), weights=np.ones(2))
    with pytest.raises(TypeError, match="^weighted metric 'loss' needs weights"):
        weighted.update(np.ones(2))
    with pytest.raises(BatchError, match="^weighted metric 'loss' needs weights of a leading part"):
        weighted.update(np.ones((2, 3)), weights=np.ones(3))


def test_accuracy(strategy, make, how):
    """Replica r has r of 8 labels right."""
    accuracy = make(dj.metrics.Accuracy)
    logits = np.eye(8, dtype=np.float32)

    def step(i):
        labels = jnp.where(jnp.arange(8) < i, jnp.arange(8), (jnp.arange(8) + 1) % 8)
        accuracy.update(logits, labels)

    how(lambda i: strategy.run(step, args=(i,)))(ids(strategy, np.int32))
    count = strategy.num_replicas_in_sync
    np.testing.assert_allclose(accuracy.result(), (count - 1) / 2 / 8, rtol=1e-6)


def test_accuracy_of_sequences_with_a_mask(strategy, make):
    accuracy = make(dj.metrics.Accuracy)
    logits = np.zeros((2, 3, 4), np.float32)
    logits[..., 1] = 1
    labels = np.array([[1, 1, 0], [0, 0, 0]])
    strategy.run(lambda: accuracy.update(logits, labels, mask=np.array([True, False])))
    np.testing.assert_allclose(accuracy.result(), 2 / 3, rtol=1e-6)


def test_nothing_divided_by_nothing_is_zero(strategy, make):
    mean, accuracy = make(dj.metrics.Mean), make(dj.metrics.Accuracy)
    assert float(mean.result()) == 0.0
    assert float(accuracy.result()) == 0.0
    strategy.run(lambda: mean.update(np.full(3, np.nan), mask=np.zeros(3, bool)))
    assert float(mean.result()) == 0.0
    seen = strategy.run(lambda: mean.result())
    assert float(seen) == 0.0


def test_dtypes_of_values(strategy, make):
    means = {dtype: make(dj.metrics.Mean) for dtype in ("int32", "bfloat16", "bool")}
    values = {dtype: jnp.asarray([1, 0, 0, 1] * 100, dtype) for dtype in means}
    strategy.run(lambda: [mean.update(values[dtype]) for dtype, mean in means.items()])
    for dtype, mean in means.items():
        # A GPU divides to the last bit but one.
        assert float(mean.result()) == pytest.approx(0.5, rel=1e-7), dtype
        assert mean.result().dtype == jnp.float32, dtype


def test_a_mean_in_half_precision_divides_by_all_values(strategy, make):
    """float16 ends at 65504: a larger count would be infinite, and the mean 0."""
    mean = make(dj.metrics.Mean, dtype=jnp.float16)
    strategy.run(lambda: mean.update(jnp.full(80_000, 2**-5, jnp.float16)))
    result = mean.result()
    assert float(result) == pytest.approx(2**-5, rel=1e-2)
    assert result.dtype == jnp.float16


def test_an_integer_sum_stays_exact(strategy, make):
    total = make(dj.metrics.Sum, dtype=jnp.int32)
    strategy.run(lambda: total.update(jnp.int32(2**24 + 1)))
    assert int(total.result()) == strategy.num_replicas_in_sync * (2**24 + 1)
    with pytest.raises(TypeError, match="needs a value of dtype int32"):
        strategy.run(lambda: total.update(jnp.float32(0.5)))


# -- contexts -----------------------------------------------------------------


def test_result_in_a_replica_context_is_that_of_all_replicas(strategy, make, how):
    mean = make(dj.metrics.Mean)
    x, numbers = batches(strategy)

    def step(x):
        mean.update(x)
        return mean.result()

    seen = how(lambda x: strategy.run(step, args=(x,)))(x)
    assert isinstance(seen, jax.Array)
    assert float(seen) == numbers.mean()


def test_update_in_cross_replica_context_goes_component_by_component(strategy, make, how):
    mean = make(dj.metrics.Mean)
    x, numbers = batches(strategy)
    how(lambda x: mean.update(x))(x)
    assert float(mean.result()) == numbers.mean()
    expected = numbers.reshape(-1, 4).sum(axis=1).tolist()
    assert local(strategy, mean.variables["total"]) == expected


def test_a_mask_in_cross_replica_context(strategy, make):
    total = make(dj.metrics.Sum)
    x, numbers = batches(strategy)
    with strategy.scope():
        total.update(x, mask=np.array([True, False, False, False]))
    assert float(total.result()) == numbers[::4].sum()


@pytest.mark.parametrize("value", [3, 3.0, np.float32(3), np.array([1.0, 2.0])])
def test_host_values_in_cross_replica_context_count_once(strategy, make, value):
    total, mean = make(dj.metrics.Sum), make(dj.metrics.Mean)
    with strategy.scope():
        total.update(value)
        total.update(value)
        mean.update(value)
    assert float(total.result()) == 6.0
    assert float(mean.result()) == np.mean(value)
    assert int(mean.variables["count"].value) == np.size(value)


def test_a_mirrored_value_counts_as_r_equal_ones(strategy, make, how):
    """Proving more changes no value: T or M, a step's result adds R times."""
    total = make(dj.metrics.Sum)
    step = how(lambda: total.update(strategy.run(lambda: jnp.float32(2))))
    step()
    assert float(total.result()) == 2.0 * strategy.num_replicas_in_sync


def test_reset_in_either_context(strategy, make, how):
    mean = make(dj.metrics.Mean)
    x, numbers = batches(strategy)
    strategy.run(lambda x: mean.update(x), args=(x,))
    how(lambda: mean.reset())()
    assert float(mean.result()) == 0.0

    def start_again(x):
        mean.reset()
        mean.update(x)

    for _ in range(2):
        how(lambda x: strategy.run(start_again, args=(x,)))(x)
    assert float(mean.result()) == numbers.mean()


def test_inside_a_merge_function(pair):
    with pair.scope():
        total = dj.metrics.Sum()

    def step(i):
        dj.get_replica_context().merge_call(lambda s, i: total.update(i), args=(i + 1,))
        return total.result()

    assert float(pair.run(step, args=(ids(pair),))) == 3.0
    assert local(pair, total.variables["total"]) == [1.0, 2.0]


def test_created_in_a_replica_function(pair):
    made = []

    def step(i):
        if not made:
            made.append(dj.metrics.Sum())
        made[0].update(i + 1)

    pair.run(step, args=(ids(pair),))
    pair.run(step, args=(ids(pair),))
    assert float(made[0].result()) == 6.0


# -- where and what it costs --------------------------------------------------


def test_totals_are_sync_on_read(pair):
    with pair.scope():
        mean = dj.metrics.Mean("loss")
    assert repr(mean).startswith("Mean('loss', of ")
    for key, variable in mean.variables.items():
        assert variable.name == f"loss/{key}"
        assert variable.synchronization is dj.VariableSynchronization.ON_READ
        assert variable.aggregation is dj.VariableAggregation.SUM
        assert not variable.trainable


def test_update_communicates_nothing_and_result_once_per_total(mirrored):
    with mirrored.scope():
        mean = dj.metrics.Mean()

    def collectives(fn, *args):
        return dj.jit(fn).lower(*args).as_text().count('"stablehlo.all_reduce"')

    x = ids(mirrored)
    assert collectives(lambda x: mirrored.run(lambda x: mean.update(x), args=(x,)), x) == 0
    assert collectives(lambda x: mean.update(x), x) == 0
    assert collectives(lambda: mirrored.run(lambda: mean.reset())) == 0
    assert collectives(lambda: mean.reset()) == 0
    assert collectives(lambda: mirrored.run(lambda: mean.result())) == 2
    assert collectives(lambda: mean.result()) == 2


# -- errors -------------------------------------------------------------------


def test_a_jax_array_that_is_on_no_replica(mirrored):
    with mirrored.scope():
        total = dj.metrics.Sum("hits")
    with pytest.raises(ValueError, match="^update of metric 'hits' in cross-replica context needs"):
        total.update(jnp.float32(1))
    total.update(mirrored.extended.broadcast_to(jnp.float32(1)))
    assert float(total.result()) == 2.0


@pytest.mark.parametrize("mask", [np.ones(3), np.ones(2, bool), np.ones((4, 3), bool)])
def test_a_mask_that_does_not_fit(pair, mask):
    with pair.scope():
        mean = dj.metrics.Mean()
    with pytest.raises(BatchError, match="^a metric's mask needs bool values of shape .3,"):
        pair.run(lambda: mean.update(np.ones(3), mask=mask))


@pytest.mark.parametrize("metric", [dj.metrics.Mean, dj.metrics.Sum])
@pytest.mark.parametrize("values", [None, "a", b"a", {"x": 1.0}])
def test_what_is_no_array_of_numbers(pair, metric, values):
    with pair.scope():
        made = metric("loss")
    for update in (lambda: made.update(values), lambda: pair.run(lambda: made.update(values))):
        with pytest.raises(TypeError, match="^update of metric 'loss' needs an array of numbers"):
            update()


@pytest.mark.parametrize(
    ("logits", "labels"),
    [((4, 2), np.zeros(3, int)), ((4, 2), np.zeros(4)), ((), np.zeros(1, int))],
)
def test_labels_that_do_not_fit(pair, logits, labels):
    with pair.scope():
        accuracy = dj.metrics.Accuracy("hits")
    with pytest.raises(BatchError, match="^metric 'hits' needs logits .B, ..., C. and integer"):
        pair.run(lambda: accuracy.update(np.zeros(logits), labels))


def test_under_another_strategy(pair):
    with pair.scope():
        mean = dj.metrics.Mean()
    other = dj.VirtualStrategy(3)
    with pytest.raises(StrategyMismatchError):
        other.run(lambda: mean.update(1.0))
    with other.scope(), pytest.raises(StrategyMismatchError):
        mean.update(1.0)
    with pytest.raises(LocalityError):
        mean.update(ids(other))


def test_a_metric_of_the_default_strategy_in_a_replica(pair):
    mean = dj.metrics.Mean()
    with pytest.raises(StrategyMismatchError, match="create it under the strategy"):
        pair.run(lambda: mean.update(1.0))


# -- modes of JAX ---------------------------------------------------------------

MODES = {
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "no implicit transfer": lambda: jax.transfer_guard("disallow"),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_jax_that_refuse_what_is_implicit(make, strategy, mode):
    mean, accuracy = make(dj.metrics.Mean), make(dj.metrics.Accuracy)
    count = strategy.num_replicas_in_sync
    x = per_replica(strategy, [jnp.arange(4, dtype=jnp.int32)] * count)
    logits = per_replica(strategy, [jnp.tile(jnp.float32([0.1, 0.9]), (4, 1))] * count)
    mask = per_replica(strategy, [jnp.array([True, True, False, True])] * count)

    def step(x, logits, mask):
        mean.update(x, mask=mask)
        accuracy.update(logits, x, mask=mask)
        return mean.result()

    with MODES[mode]():
        seen = strategy.run(step, args=(x, logits, mask))
        found = mean.result(), accuracy.result()
        mean.reset()
        after = mean.result()
    assert float(seen) == pytest.approx(4 / 3)
    assert [float(v) for v in found] == pytest.approx([4 / 3, 1 / 3])
    assert float(after) == 0


def test_a_count_that_has_wrapped_around_gives_nan(pair):
    """Up to 2**31 - 1 values between two resets."""
    with pair.scope():
        mean = dj.metrics.Mean()
    mean.variables["total"].assign(2.0**31)
    mean.variables["count"].assign(2**31 - 100)
    mean.update(np.ones(50, np.float32))
    assert float(mean.result()) == pytest.approx(1)
    mean.update(np.ones(200, np.float32))
    assert np.isnan(mean.result())


@pytest.mark.parametrize("make_strategy", [dj.get_strategy, lambda: dj.VirtualStrategy(2)])
def test_an_interrupt_leaves_totals_that_belong_together(make_strategy):
    with make_strategy().scope():
        mean = dj.metrics.Mean("loss")
    fill = lambda: mean.update(np.full(2, 3.0))
    frames = in_packages("distjax.metrics", "distjax._src.strategies", "distjax._src.variables")
    for call, before in ((fill, mean.reset), (mean.reset, fill)):
        for _ in range(3):
            before(), call()
        for at in range(1, 500):
            mean.reset()
            if before is fill:
                fill()
            outcome = interrupted(call, at, frames)
            totals = [float(v.value) for v in mean.variables.values()]
            assert sorted(totals) in ([0, 0], [2, 6]), outcome.line
            if outcome.line is None:
                break
        assert 10 < at < 499
