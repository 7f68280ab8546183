"""A metric names the dtypes of its totals, so that JAX is left nothing to promote."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj

pytestmark = pytest.mark.parametrize("where", ["replica", "across"])

STRATEGIES = {
    "default": dj.get_strategy,
    "mirrored": lambda: dj.MirroredStrategy(jax.devices()[:2]),
    "virtual": lambda: dj.VirtualStrategy(2),
}


MASK = np.array([True, True, False])
LOGITS = np.array([[0.1, 0.9], [0.8, 0.2], [0.9, 0.1]], np.float32)


@pytest.fixture(params=STRATEGIES)
def owner(request):
    return STRATEGIES[request.param]()


@pytest.fixture(autouse=True)
def nothing_is_promoted():
    with jax.numpy_dtype_promotion("strict"):
        yield


def updated(owner, make, *args, where, **kwargs):
    """Returns the metric after an update in a replica function, or across replicas."""
    with owner.scope():
        metric = make()
        if where == "across":
            metric.update(*args, **kwargs)
    if where == "replica":
        owner.run(metric.update, args=args, kwargs=kwargs)
    return metric


def num_batches(owner, where):
    """How often a batch counts: on each replica, or once as values of the host."""
    return owner.num_replicas_in_sync if where == "replica" else 1


@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "masked"])
def test_hits_of_an_accuracy(owner, where, mask):
    labels = np.array([1, 0, 1])
    accuracy = updated(owner, dj.metrics.Accuracy, LOGITS, labels, mask=mask, where=where)
    assert float(accuracy.result()) == pytest.approx(1 if mask is not None else 2 / 3)


@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "masked"])
@pytest.mark.parametrize("dtype", [bool, np.int32])
def test_a_sum_of_whole_numbers(owner, where, mask, dtype):
    values = np.array([1, 0, 1], dtype)
    total = updated(owner, dj.metrics.Sum, values, mask=mask, where=where)
    expected = (1 if mask is not None else 2) * num_batches(owner, where)
    assert float(total.result()) == expected


@pytest.mark.parametrize("dtype", [bool, np.float32])
def test_a_masked_mean(owner, where, dtype):
    values = np.array([1, 0, 1], dtype)
    mean = updated(owner, dj.metrics.Mean, values, mask=MASK, where=where)
    assert float(mean.result()) == pytest.approx(1 / 2)


class Share(dj.metrics.Metric):
    """The share of values that a mask keeps: a mask is counted as it is."""

    def __init__(self):
        count = jax.ShapeDtypeStruct((), jnp.int32)
        super().__init__("share", {"kept": count, "all": count})

    def measure(self, mask):
        return {"kept": jnp.any(mask), "all": jnp.ones_like(mask).sum()}

    def compute(self, kept, all):
        return kept


def test_a_mask_as_the_amount_of_a_total(owner, where):
    share = updated(owner, Share, MASK, where=where)
    assert int(share.result()) == num_batches(owner, where)
