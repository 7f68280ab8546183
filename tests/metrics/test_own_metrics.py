"""Metrics of one's own, and the odd rows r317-r323 of the table of cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from tests.replicas import ids, per_replica


class MeanTensor(dj.metrics.Metric):
    """The mean of each element over all batches [k]."""

    def __init__(self, size):
        total = jax.ShapeDtypeStruct((size,), jnp.float32)
        super().__init__("mean_tensor", {"total": total, "count": total})

    def measure(self, values):
        return {"total": values, "count": jnp.ones_like(values)}

    def compute(self, total, count):
        return total / jnp.maximum(count, 1)


class Confusion(dj.metrics.Metric):
    """How many examples are (false, true) x (negative, positive)."""

    def __init__(self):
        count = jax.ShapeDtypeStruct((), jnp.int32)
        super().__init__("confusion", dict.fromkeys(("FN", "TN", "FP", "TP"), count))

    def measure(self, labels, predictions):
        cells = {"FN": (1, 0), "TN": (0, 0), "FP": (0, 1), "TP": (1, 1)}
        return {
            key: jnp.sum((labels == label) & (predictions == predicted), dtype=jnp.int32)
            for key, (label, predicted) in cells.items()
        }

    def compute(self, **counts):
        return counts


def in_batches(strategy, numbers, size):
    """Yields one PerReplica after the other: `size` numbers for each replica."""
    count = strategy.num_replicas_in_sync
    for start in range(0, len(numbers), count * size):
        yield per_replica(strategy, numbers[start : start + count * size].reshape(count, size))


def test_r317_mean_over_batches_of_four(strategy):
    """After k batches of 4 of 0, 1, 2, ... the mean is 2k - 0.5."""
    with strategy.scope():
        mean = dj.metrics.Mean()
    count = strategy.num_replicas_in_sync
    for k, x in enumerate(in_batches(strategy, np.arange(16.0 * count, dtype=np.float32), 4), 1):
        strategy.run(mean.update, args=(x,))
        assert float(mean.result()) == 2 * k * count - 0.5


def test_r319_mean_of_tensors(strategy):
    """After k batches [4k-4, ..., 4k-1] the mean is [2k-2, 2k-1, 2k, 2k+1]."""
    with strategy.scope():
        mean = MeanTensor(4)
    count = strategy.num_replicas_in_sync
    for step, x in enumerate(in_batches(strategy, np.arange(16 * count, dtype=np.float32), 4), 1):
        strategy.run(mean.update, args=(x,))
        k = step * count
        np.testing.assert_allclose(
            mean.result(), [2 * k - 2, 2 * k - 1, 2 * k, 2 * k + 1], rtol=1e-6
        )


def test_r321_confusion_counts(strategy):
    """Labels and predictions whose counts after 1 to 4 steps are those of the row."""
    with strategy.scope():
        confusion = Confusion()
    # Each step has the examples that the row's counts grow by.
    added = {"FN": [1, 0, 1, 1], "TN": [0, 1, 1, 1], "FP": [1, 1, 0, 1], "TP": [1, 1, 1, 0]}
    cells = {"FN": (1, 0), "TN": (0, 0), "FP": (0, 1), "TP": (1, 1)}
    seen = []
    for step in range(4):
        examples = [cells[key] for key, counts in added.items() for _ in range(counts[step])]
        labels, predictions = np.array(examples).T
        strategy.run(confusion.update, args=(labels, predictions))
        seen.append({key: int(value) for key, value in confusion.result().items()})
    count = strategy.num_replicas_in_sync
    expected = {"FN": [1, 1, 2, 3], "TN": [0, 1, 2, 3], "FP": [1, 2, 2, 3], "TP": [1, 2, 3, 3]}
    for key, numbers in expected.items():
        assert [s[key] for s in seen] == [count * n for n in numbers]


def test_r323_metric_declared_outside_updated_in_cross_replica_context(strategy, how):
    """The scope of another strategy: the metric's variables are plain, each value counts once."""
    mean = dj.metrics.Mean()
    update = how(lambda x: mean.update(x))
    with strategy.scope():
        for i in range(10):
            update(np.float32(i))
    assert float(mean.result()) == 4.5


def test_totals_that_measure_does_not_return(pair):
    class Wrong(MeanTensor):
        def measure(self, values):
            return {"total": values}

    class Worse(MeanTensor):
        def measure(self, values):
            return values

    for kind, got in ((Wrong, r"\['total'\]"), (Worse, r"float32\[2\]")):
        with pair.scope():
            metric = kind(2)
        with pytest.raises(ValueError, match=f"needs to return its totals, by name(.|\n)*{got}"):
            pair.run(metric.update, args=(jnp.ones(2),))


def test_a_metric_without_measure_and_compute_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        dj.metrics.Metric("name", {})


def test_keyword_arguments_reach_measure(pair):
    with pair.scope():
        confusion = Confusion()
    confusion.update(labels=ids(pair), predictions=1.0)
    assert {k: int(v) for k, v in confusion.result().items()} == {
        "FN": 0,
        "TN": 0,
        "FP": 1,
        "TP": 1,
    }
