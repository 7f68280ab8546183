"""Splits of batches, values from functions, partitioners, as TensorFlow has them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax._src.variables import partitioners
from distjax.errors import BatchError
from tests.golden.distjax_side import make_strategy, plain
from tests.golden.records import Ruling, check, difference, load, outcome_of

RECORDS = load("inputs")
OF_DATA = [r for r in RECORDS if r.case["what"] in ("split", "from_function", "unbatched")]


def num_replicas(record):
    name = record.case["strategy"]
    return int(name[-1]) if name[-1].isdigit() else 1


def sizes_of_batches(record):
    """Returns the sizes of the batches that reach distjax."""
    count, size = record.case["num_examples"], record.case["batch_size"]
    keeps_rest = count % size and not record.case.get("drop")
    return [size] * (count // size) + [count % size] * bool(keeps_rest)


def some_replica_gets_less(record):
    r, sizes = num_replicas(record), sizes_of_batches(record)
    if record.case["what"] == "split":
        return any(size % r for size in sizes)
    return r > 1 and (len(sizes) % r > 0 or len(set(sizes)) > 1)


RULINGS = [
    Ruling("split/*", 16, BatchError, where=some_replica_gets_less),
    Ruling("from_function/*", 16, BatchError, where=some_replica_gets_less),
    Ruling("unbatched/mirrored8/6", 16, BatchError),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.id)
def test_as_recorded(record):
    check(record, ask, RULINGS)


@pytest.mark.parametrize("record", OF_DATA, ids=lambda r: r.id)
def test_padded_input_keeps_the_same_examples(record):
    """Decision 16: nothing is lost, and no example changes its step."""
    if record.case.get("drop"):
        options = dj.InputOptions(partial="drop")
    else:
        options = dj.InputOptions(partial="pad")
    got = outcome_of(lambda: ask(record.case, options))
    expected = refilled(record)
    assert difference(expected, got, rtol=0) is None, difference(expected, got, rtol=0)


def refilled(record):
    """Returns the recorded steps; a smaller last batch fills replicas of the full size in turn."""
    r, size = num_replicas(record), record.case.get("batch_size")
    is_split = record.case["what"] == "split"
    if is_split and record.case["drop"] and some_replica_gets_less(record):
        return BatchError
    if record.id == "unbatched/mirrored8/6":
        return [list(range(6))]  # TensorFlow loses a last step that not all replicas share in
    if not is_split:
        return record.outcome
    share = -(-size // r)
    blocks = lambda xs: [xs[i * share : (i + 1) * share] for i in range(r)]
    return [blocks(list(itertools.chain(*step))) for step in record.outcome]


def ask(case, options=None):
    arguments = {key: value for key, value in case.items() if key != "what"}
    if options is not None:
        arguments["options"] = options
    return globals()[f"ask_{case['what']}"](**arguments)


def elements_of(strategy, dataset):
    """Returns for each step what each replica gets, without the padding."""
    return [parts_of(strategy, element) for element in dataset]


def parts_of(strategy, element):
    if isinstance(element, dj.Batch):
        masks = [np.asarray(m) for m in strategy.local_results(element.mask)]
        parts = [np.asarray(x) for x in strategy.local_results(element.data)]
        if masks[0].ndim == 0:  # elements without axes are there or not
            return [plain(x) for x, m in zip(parts, masks, strict=True) if m]
        return [plain(x[m]) for x, m in zip(parts, masks, strict=True)]
    return [plain(x) for x in strategy.local_results(element)]


def batches(num_examples, batch_size, drop=False):
    stop = num_examples - num_examples % batch_size if drop else num_examples
    return [
        np.arange(i, min(i + batch_size, stop), dtype=np.int32) for i in range(0, stop, batch_size)
    ]


def ask_split(strategy, num_examples, batch_size, drop, options=None):
    strategy = make_strategy(strategy)
    drop = drop and options is None  # else by the option
    data = strategy.distribute_dataset(batches(num_examples, batch_size, drop), options)
    return elements_of(strategy, data)


def ask_from_function(strategy, num_examples, batch_size, options=None):
    strategy = make_strategy(strategy)
    data = batches(num_examples, batch_size)
    made = strategy.distribute_datasets_from_function(lambda context: data, options)
    return elements_of(strategy, made)


def ask_unbatched(strategy, num_examples, options=None):
    strategy = make_strategy(strategy)
    data = list(np.arange(num_examples, dtype=np.int32))
    made = strategy.distribute_datasets_from_function(lambda context: data, options)
    return elements_of(strategy, made)


def ask_values(strategy, kind):
    strategy = make_strategy(strategy)

    def value(context):
        number = jnp.asarray(10.0 + context.replica_id_in_sync_group)
        return {
            "scalar": number,
            "nest": {"a": number, "b": [number * 2]},
            "equal": jnp.asarray(1.5),
        }[kind]

    made = strategy.distribute_values_from_function(value)
    return [jax.tree.map(plain, x) for x in strategy.local_results(made)]


def ask_context(strategy):
    strategy = make_strategy(strategy)
    values, inputs = [], []

    def value(context):
        values.append([context.replica_id_in_sync_group, context.num_replicas_in_sync])
        return jnp.asarray(0.0)

    def dataset(context):
        inputs.append(
            [context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync]
        )
        inputs.append(outcome_of(lambda: context.get_per_replica_batch_size(24)))
        inputs.append(outcome_of(lambda: context.get_per_replica_batch_size(25)))
        return list(np.arange(24))

    strategy.distribute_values_from_function(value)
    strategy.distribute_datasets_from_function(dataset)
    return {"values": values, "inputs": inputs}


def ask_partitions(kind, sizes, shape, bits):
    partitioner = getattr(partitioners, kind)(*sizes)
    return partitioner(tuple(shape), {32: jnp.float32, 16: jnp.float16}[bits])
