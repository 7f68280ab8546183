"""Mean and accuracy over batches: by hand as TensorFlow ran them, and those of dj.metrics."""

import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from tests.golden.closed_form import labeled
from tests.golden.distjax_side import make_strategy, make_variable, plain
from tests.golden.records import Ruling, check, difference, load

RECORDS = load("metrics")
PAD = dj.InputOptions(partial="pad")


def fills_in_turn(record):
    """Returns the outcome with the last, smaller batch in blocks of the full size."""
    case, r = record.case, int(record.case["strategy"][-1])
    share = -(-case["batch_size"] // r)
    logits, labels = labeled(case["num_examples"])
    hits = logits.argmax(-1) == labels
    index = np.arange(case["num_examples"]) % case["batch_size"] // share
    mine = [index == i for i in range(r)]
    components = {
        "total": [float(logits[m].sum()) for m in mine],
        "count": [float(logits[m].size) for m in mine],
        "hits": [float(hits[m].sum()) for m in mine],
        "seen": [float(m.sum()) for m in mine],
    }
    return {**record.outcome, "components": components}


def splits_otherwise(record):
    """A smaller batch fills the first replicas; TensorFlow deals it out anew by its own size."""
    size, r = record.case["batch_size"], int(record.case["strategy"][-1])
    rest = record.case["num_examples"] % size
    return min(rest, -(-size // r)) != -(-rest // r)


RULINGS = [Ruling("mirrored*", 16, fills_in_turn, where=splits_otherwise)]


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.id)
def test_by_hand_as_recorded(record):
    check(record, lambda case: by_hand(**case), RULINGS)


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.id)
def test_library_metrics_give_the_same_results(record):
    got = by_library(**record.case)
    assert difference(record.outcome["steps"], got, rtol=1e-6) is None


def input_of(strategy, num_examples, batch_size):
    logits, labels = labeled(num_examples)
    starts = range(0, num_examples, batch_size)
    batches = [(logits[i : i + batch_size], labels[i : i + batch_size]) for i in starts]
    return strategy.distribute_dataset(batches, PAD)


def by_hand(strategy, num_examples, batch_size):
    strategy = make_strategy(strategy)
    with strategy.scope():
        names = ("total", "count", "hits", "seen")
        state = {n: make_variable(0.0, name=n, sync="ON_READ", aggregation="SUM") for n in names}

    def step(batch):
        (logits, labels), mask = batch.data, batch.mask
        state["total"].assign_add(jnp.sum(logits * mask[:, None]))
        state["count"].assign_add(jnp.sum(mask) * 3.0)
        state["hits"].assign_add(jnp.sum((logits.argmax(-1) == labels) & mask) * 1.0)
        state["seen"].assign_add(jnp.sum(mask) * 1.0)

    def results():
        mean = state["total"].value / state["count"].value
        return {"mean": plain(mean), "accuracy": plain(state["hits"].value / state["seen"].value)}

    def components():
        return {name: [plain(c) for c in v.local_results()] for name, v in state.items()}

    steps = []
    for batch in input_of(strategy, num_examples, batch_size):
        strategy.run(step, (batch,))
        steps.append(results())
    after = components()
    for v in state.values():
        v.assign(0.0)
    return {"steps": steps, "components": after, "after_reset": components()}


def by_library(strategy, num_examples, batch_size):
    strategy = make_strategy(strategy)
    with strategy.scope():
        mean, accuracy = dj.metrics.Mean(), dj.metrics.Accuracy()

    def step(batch):
        logits, labels = batch.data
        mean.update(logits, mask=batch.mask)
        accuracy.update(logits, labels, mask=batch.mask)

    steps = []
    for batch in input_of(strategy, num_examples, batch_size):
        strategy.run(step, (batch,))
        steps.append({"mean": plain(mean.result()), "accuracy": plain(accuracy.result())})
    for metric in (mean, accuracy):
        metric.reset()
        assert metric.result() == 0
    return steps
