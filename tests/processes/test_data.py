"""Input over several processes: the same batches on all, files of their own, unequal lengths."""

import warnings
from typing import NamedTuple

import jax
import numpy as np
import pytest

import distjax as dj
from distjax._src.cluster import joining
from distjax._src.cluster.job import job
from tests.processes import groups

pytestmark = pytest.mark.multiprocess

OWN = dj.InputOptions(shard="own", partial="pad")


@pytest.fixture
def group():
    return groups.group(2, 2)


def total_of(strategy, batch):
    """The sum over all replicas, of the examples that count."""
    if isinstance(batch, dj.Batch):
        masked = strategy.run(lambda b: (b.data * b.mask).sum(), args=(batch,))
        return float(strategy.reduce("sum", masked))
    return float(strategy.reduce("sum", batch, axis=0))


def totals(dataset, options=None):
    strategy = dj.MultiWorkerMirroredStrategy()
    return [total_of(strategy, b) for b in strategy.distribute_dataset(dataset, options)]


# -- own data that is equal everywhere --------------------------------------------


def own_batches(seed, *, steps=None):
    rng = np.random.default_rng(seed)
    batches = [rng.normal(size=(4, 2)).astype(np.float32) for _ in range(2)]
    data = dj.MultiWorkerMirroredStrategy().distribute_dataset(batches, OWN)
    return list(data) if steps is None else iter(data).take(steps)


def from_function(of_seed):
    strategy = dj.MultiWorkerMirroredStrategy()

    def make(context):
        rng = np.random.default_rng(of_seed(context))
        return [rng.normal(size=2).astype(np.float32) for _ in range(4)]

    return list(strategy.distribute_datasets_from_function(make))


def constant_batches(of):
    batches = [np.full(4, of, np.float32), np.arange(4, dtype=np.float32)]
    return list(dj.MultiWorkerMirroredStrategy().distribute_dataset(batches, OWN))


EQUAL = {
    "of one seed": lambda: own_batches(0),
    "of one seed, in a loop of steps": lambda: own_batches(0, steps=2),
    "of a function that ignores its context": lambda: from_function(lambda context: 0),
}
OTHERS = {
    "of other seeds": lambda: own_batches([0, job().process_id]),
    "of other seeds, in a loop of steps": lambda: own_batches([0, job().process_id], steps=2),
    "of a function": lambda: from_function(lambda context: context.input_pipeline_id),
    "of constants": lambda: constant_batches(0.0),
    "of other constants": lambda: constant_batches(job().process_id),
}


def warned_of(row):
    joining._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (EQUAL | OTHERS)[row]()
    return [str(w.message) for w in caught if w.category is dj.errors.ClusterWarning]


@pytest.mark.parametrize("row", EQUAL)
def test_own_data_that_begins_alike_everywhere_is_told(group, row):
    for texts in group.call(warned_of, row):
        (text,) = texts
        assert text.startswith(
            "data that each process has of its own should differ, and the first element is equal "
            "on all processes.\n  Got: the same values on 2 processes.\n"
        )
        assert "np.random.default_rng([seed, jax.process_index()])" in text


@pytest.mark.parametrize("row", OTHERS)
def test_own_data_without_a_false_alarm(group, row):
    assert group.call(warned_of, row) == [[], []]


# -- the same global batches ------------------------------------------------------


def global_batches(prefetch):
    batches = [np.arange(8, dtype=np.float32) + i for i in range(5)]
    return totals(batches, dj.InputOptions(prefetch=prefetch))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_each_process_keeps_its_rows_of_the_global_batch(group, prefetch):
    expected = [float(np.arange(8).sum() + 8 * i) for i in range(5)]
    assert group.call(global_batches, prefetch) == [expected] * 2


def rows_here():
    strategy = dj.MultiWorkerMirroredStrategy()
    (batch,) = strategy.distribute_dataset([np.arange(8)])
    return [x.tolist() for x in strategy.local_results(batch)]


def test_rows_go_to_their_replicas(group):
    assert group.call(rows_here) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def in_one_loop():
    strategy = dj.MultiWorkerMirroredStrategy()
    with strategy.scope():
        total = dj.Variable(np.float32(0.0), aggregation=dj.VariableAggregation.SUM)

    def step(context, x):
        strategy.run(lambda x: total.assign_add(x.sum()), args=(x,))

    data = iter(strategy.distribute_dataset([np.arange(8, dtype=np.float32)] * 6))
    strategy.extended.run_steps_on_iterator(step, data, iterations=4)
    return float(total.value)


def test_steps_in_one_loop(group):
    assert group.call(in_one_loop) == [112.0] * 2


# -- what differs -----------------------------------------------------------------


def shuffled_without_a_seed(me):
    totals([np.random.default_rng(me).permutation(8).astype(np.float32) for _ in range(2)])


def of_another_shape(me):
    totals([np.zeros(8 + 4 * me, np.float32)])


def of_another_length(me):
    totals([np.zeros(8, np.float32)] * (2 + me))


def own_batches_of_another_shape(me):
    totals([np.zeros((4, 1 + me), np.float32)], dj.InputOptions(shard="own"))


DIFFERENT = {
    shuffled_without_a_seed: (dj.errors.AgreementError, "values of checksum"),
    of_another_shape: (dj.errors.AgreementError, "float32[4, 3]"),
    of_another_length: (dj.errors.AgreementError, "the end of the data on process 0"),
    own_batches_of_another_shape: (dj.errors.AgreementError, "float32[2, 2]"),
}


def refuse(do, kind):
    with pytest.raises(kind) as caught:
        do(job().process_id)
    return str(caught.value)


@pytest.mark.parametrize("do", DIFFERENT, ids=lambda do: do.__name__)
def test_data_that_differ_are_the_same_error_on_all(group, do):
    kind, text = DIFFERENT[do]
    first, second = group.call(refuse, do, kind)
    assert first == second
    assert first.startswith("the next element of a dataset needs to be ")
    assert text in first


def fail_on_one():
    def source():
        yield np.zeros(8, np.float32)
        if job().process_id == 1:
            raise OSError("disk gone")
        yield np.zeros(8, np.float32)

    with pytest.raises((OSError, dj.errors.PeerLostError)) as caught:
        totals(source())
    return type(caught.value).__name__, str(caught.value).splitlines()[:2]


def test_an_error_of_one_source_is_known_to_all(group):
    (other, text), own = group.call(fail_on_one)
    assert own == ("OSError", ["disk gone"])
    assert other == "PeerLostError"
    assert "an error of the data source on process 1" in text[1]
    assert "OSError: disk gone" in text[1]


# -- data of their own ------------------------------------------------------------


def own_counts(lengths, partial):
    """Counts examples, each of which is 1, in batches of 4 for the two replicas of a process."""
    examples = np.ones(lengths[job().process_id], np.float32)
    batches = [examples[i : i + 4] for i in range(0, len(examples), 4)]
    return totals(batches, dj.InputOptions(shard="own", partial=partial))


SHORT = [(1, 8), (12, 1), (2, 9), (0, 1)]  # the first batch of a process is its last
LENGTHS = [(15, 23), (23, 15), (4, 4), (8, 4), (0, 7), (9, 0), (0, 0), *SHORT]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_every_example_counts_once(group, lengths):
    first, second = group.call(own_counts, lengths, "pad")
    assert first == second
    assert sum(first) == sum(lengths)
    assert len(first) == -(-max(lengths) // 4)


def own_counts_in_loops(lengths, partial, steps):
    """The same in loops of several steps; shifted by 1, so that copies would be seen."""
    strategy = dj.MultiWorkerMirroredStrategy()
    with strategy.scope():
        total = dj.Variable(np.float32(0.0), aggregation=dj.VariableAggregation.SUM)

    def step(context, batch):
        if isinstance(batch, dj.Batch):
            strategy.run(lambda b: total.assign_add((b.data["x"] * b.mask).sum()), args=(batch,))
        else:
            strategy.run(lambda b: total.assign_add(b["x"].sum()), args=(batch,))

    me = job().process_id
    examples = np.arange(lengths[me], dtype=np.float32) + 100 * me + 1
    batches = [{"x": examples[i : i + 4]} for i in range(0, len(examples), 4)]
    options = dj.InputOptions(shard="own", partial=partial)
    data = iter(strategy.distribute_dataset(batches, options))
    while True:
        try:
            strategy.extended.run_steps_on_iterator(step, data, iterations=steps)
        except (StopIteration, dj.errors.BatchError) as error:
            return float(total.value), type(error).__name__


@pytest.mark.parametrize("lengths", LENGTHS)
def test_every_example_counts_once_in_loops_of_several_steps(group, lengths):
    first, second = group.call(own_counts_in_loops, lengths, "pad", 3)
    assert first == second
    expected = sum(np.arange(n).sum() + n * (100 * i + 1) for i, n in enumerate(lengths))
    assert first[0] == expected


def test_loops_of_several_steps_stop_where_the_first_ends(group):
    expected = float(np.arange(8).sum() + 8 + np.arange(8).sum() + 8 * 101)
    for total, _ in group.call(own_counts_in_loops, (8, 20), "drop", 3):
        assert total == expected


def test_all_stop_where_the_first_ends(group):
    assert group.call(own_counts, (8, 16), "drop") == [[8.0, 8.0]] * 2


def test_unequal_lengths_need_a_word(group):
    for text in group.call(refuse_uneven, (8, 4)):
        assert "the end of the data on process 1" in text
        assert "dj.InputOptions(partial='pad')" in text


class Pair(NamedTuple):
    x: np.ndarray
    y: np.ndarray


def tell_a_class():
    own = [Pair(np.ones(4), np.ones(4))] * job().process_id
    with pytest.raises(dj.errors.BatchError) as caught:
        totals(own, OWN)
    return str(caught.value)


def test_an_example_of_another_class_cannot_be_told(group):
    first, second = group.call(tell_a_class)
    assert first == second
    assert first.startswith("the next element of a dataset needs to be there on all processes, or ")


def take_before_another_shape(partial):
    """How many steps there are before the shape differs, and the error that says so."""
    strategy = dj.MultiWorkerMirroredStrategy()
    later = np.ones((4, 3 if job().process_id else 2))
    options = dj.InputOptions(shard="own", partial=partial)
    iterator = iter(strategy.distribute_dataset([np.ones((4, 3))] * 2 + [later] * 3, options))
    num_steps = 0
    with pytest.raises(dj.errors.AgreementError) as caught:
        while True:
            num_steps += iterator.take(4).num_steps
    return num_steps, str(caught.value)


@pytest.mark.parametrize(("partial", "num_steps"), [("drop", 2), ("pad", 4)])
def test_another_shape_on_one_process_is_no_end_of_the_data(group, partial, num_steps):
    first, second = group.call(take_before_another_shape, partial)
    assert first == second
    assert first[0] == num_steps
    assert first[1].startswith("the next element of a dataset needs to be equal on all processes")


def position_after_the_first_end():
    strategy = dj.MultiWorkerMirroredStrategy()
    options = dj.InputOptions(shard="own", partial="drop")
    data = [np.ones(4)] * (2 + 3 * job().process_id)
    iterator = iter(strategy.distribute_dataset(data, options))
    return iterator.take(4).num_steps, iterator.get_state()["consumed"]


def test_what_the_others_have_no_more_of_does_not_count_as_delivered(group):
    assert group.call(position_after_the_first_end) == [(2, 2)] * 2


def take_other_numbers(numbers, partial):
    """Of data of its own; "drop" took the first end of one process for that of all."""
    strategy = dj.MultiWorkerMirroredStrategy()
    options = dj.InputOptions(shard="own", partial=partial)
    iterator = iter(strategy.distribute_dataset([np.ones(4)] * 6, options))
    with pytest.raises(dj.errors.AgreementError) as caught:
        number = numbers[job().process_id]
        iterator.take(number) if number else next(iterator)
    return str(caught.value)


@pytest.mark.parametrize("partial", ["drop", "pad"])
@pytest.mark.parametrize(
    ("numbers", "got"),
    [
        ((2, 0), "'the next element of a dataset' on process 1; 'the next 2 steps of a dataset' "),
        ((2, 3), "'the next 3 steps of a dataset' on process 1; 'the next 2 steps of a dataset' "),
    ],
)
def test_all_take_as_many_steps(group, numbers, got, partial):
    first, second = group.call(take_other_numbers, numbers, partial)
    assert first == second
    assert f"Got: {got}on process 0" in first


def refuse_uneven(lengths, partial="error"):
    with pytest.raises(dj.errors.BatchError) as caught:
        own_counts(lengths, partial)
    return str(caught.value)


def context_here():
    seen = []

    def make(context):
        seen.append((context.num_input_pipelines, context.input_pipeline_id))
        me = context.input_pipeline_id
        return [np.float32(10 * me + i) for i in range(4)]

    strategy = dj.MultiWorkerMirroredStrategy()
    elements = [
        [float(x) for x in strategy.local_results(element)]
        for element in strategy.distribute_datasets_from_function(make)
    ]
    return seen, elements


def test_a_function_is_told_which_pipeline_it_makes(group):
    first, second = group.call(context_here)
    assert first == ([(2, 0)], [[0.0, 1.0], [2.0, 3.0]])
    assert second == ([(2, 1)], [[10.0, 11.0], [12.0, 13.0]])


def nothing_is_moved_between_processes():
    """Values are placed with no collective: NaN and keys too, and on one thread alone."""
    strategy = dj.MultiWorkerMirroredStrategy()
    with strategy.scope():
        nan = dj.Variable(np.full(3, np.nan, np.float32))
        key = dj.Variable(jax.random.key(3))
    mirrored = strategy.extended.broadcast_to(np.full(2, np.nan, np.float32))
    return np.asarray(nan).tolist(), jax.random.key_data(key.value).tolist(), mirrored.shape


def test_nan_and_keys_are_placed(group):
    key = jax.random.key_data(jax.random.key(3)).tolist()
    for nan, data, shape in group.call(nothing_is_moved_between_processes):
        assert np.isnan(nan).all()
        assert (data, shape) == (key, (2,))
