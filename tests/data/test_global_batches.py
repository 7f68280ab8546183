"""distribute_dataset: batches [G, ...] become [G / R, ...] on each replica."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import BatchError, ContextError, StrategyMismatchError
from tests.replicas import local

ERROR, DROP, PAD = (dj.InputOptions(partial=p) for p in ("error", "drop", "pad"))
DEFAULT = dj.get_strategy()


class Sized:
    """A dataset with a length and items, that counts how often it is iterated."""

    def __init__(self, batches):
        self.batches = batches
        self.iterations = 0

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]

    def __iter__(self):
        self.iterations += 1
        return iter(self.batches)


class SizedWithoutItems(Sized):
    __getitem__ = None


def batches_of(count, size, dtype=np.int32):
    """What range(count).batch(size) gives."""
    return [np.arange(i, min(i + size, count), dtype=dtype) for i in range(0, count, size)]


def elements(strategy, dataset, options=None):
    return [local(strategy, x) for x in strategy.distribute_dataset(dataset, options)]


# -- values --------------------------------------------------------------------


@pytest.mark.api_row("data parallelism")
def test_every_replica_gets_its_slice(strategy):
    r = strategy.num_replicas_in_sync
    batches = [np.arange(4 * r).reshape(2 * r, 2) + i for i in range(3)]
    assert elements(strategy, batches) == [b.reshape(r, 2, 2).tolist() for b in batches]


def test_trees_keep_their_structure(strategy):
    r = strategy.num_replicas_in_sync
    batch = {"x": np.zeros((r, 3), np.float32), "y": (np.zeros(r, np.int32), [np.ones(r, bool)])}
    (element,) = strategy.distribute_dataset([batch])
    leaf = lambda x: isinstance(x, dj.PerReplica)
    assert jax.tree.structure(element, is_leaf=leaf) == jax.tree.structure(batch)
    shapes = strategy.run(
        lambda e: [str(x.dtype) + str(x.shape) for x in jax.tree.leaves(e)], args=(element,)
    )
    assert shapes == ["float32(1, 3)", "int32(1,)", "bool(1,)"]


@pytest.mark.parametrize("partial", ["error", "pad"])
def test_where_elements_live(strategy, partial):
    """T on the replicas; bare on the one device where R is 1 (the default strategy: as it came)."""
    r = strategy.num_replicas_in_sync
    (x,) = strategy.distribute_dataset([np.zeros((2 * r, 3))], dj.InputOptions(partial))
    for leaf in [x] if partial == "error" else [x.data, x.mask]:
        if r > 1:
            assert isinstance(leaf, dj.PerReplica)
            assert leaf.shape[:1] == (2,)
            assert dj.locality(leaf) == dj.Locality(
                "per_replica", strategy.extended.topology.per_replica
            )
            assert leaf.stacked.sharding.is_equivalent_to(
                strategy.extended.topology.per_replica, leaf.stacked.ndim
            )
        elif strategy is not DEFAULT:
            assert isinstance(leaf, jax.Array)
            assert leaf.shape[0] == 2
            assert leaf.sharding == strategy.extended.topology.mirrored
        else:
            assert isinstance(leaf, jax.Array if partial == "pad" else np.ndarray)


def test_one_device_strategy_places_on_its_device():
    device = jax.devices()[3]
    (x,) = dj.OneDeviceStrategy(device).distribute_dataset([np.arange(3)])
    assert x.devices() == {device}


def test_model_axes_share_their_replicas_batch():
    strategy = dj.MirroredStrategy(model_axes={"model": 4})
    assert elements(strategy, [np.arange(4)]) == [[[0, 1], [2, 3]]]
    (x,) = strategy.distribute_dataset([np.arange(4)])
    assert x.stacked.sharding.shard_shape(x.stacked.shape) == (1, 2)


def test_default_strategy_returns_the_dataset_itself():
    dataset = [object()]
    assert DEFAULT.distribute_dataset(dataset) is dataset
    assert DEFAULT.distribute_dataset(dataset, ERROR) is dataset
    (padded, rest) = DEFAULT.distribute_dataset(batches_of(3, 2), PAD)
    assert rest.mask.tolist() == [True, False]
    assert not rest.mask.committed and padded.data.tolist() == [0, 1]
    assert [x.tolist() for x in DEFAULT.distribute_dataset(batches_of(3, 2), DROP)] == [[0, 1]]


def test_iterable_again_if_the_dataset_is(pair):
    dataset = pair.distribute_dataset(batches_of(8, 4))
    first = [local(pair, x) for x in dataset]
    assert first == [local(pair, x) for x in dataset] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_two_iterators_do_not_disturb_each_other(pair):
    dataset = pair.distribute_dataset(batches_of(8, 4))
    pairs = [(local(pair, a), local(pair, b)) for a, b in zip(dataset, dataset, strict=True)]
    assert all(a == b for a, b in pairs) and len(pairs) == 2


@pytest.mark.api_row("iterator.get_next")
def test_get_next(pair):
    iterator = iter(pair.distribute_dataset([np.arange(2)]))
    assert iter(iterator) is iterator
    assert local(pair, iterator.get_next()) == [[0], [1]]
    for _ in range(2):
        with pytest.raises(StopIteration):
            iterator.get_next()


def test_an_empty_dataset(strategy):
    dataset = strategy.distribute_dataset([], DROP)
    assert list(dataset) == [] and len(dataset) == 0 and dataset


def test_as_text(pair):
    text = repr(pair.distribute_dataset([np.arange(2)]))
    assert text == (
        "DistributedDataset(list, GlobalBatches(num_replicas=2, partial='error'), prefetch=2)"
    )
    iterator = iter(pair.distribute_dataset([np.arange(2)] * 2))
    next(iterator)
    assert repr(iterator) == "DistributedIterator(delivered=1, num_replicas=2)"


# -- partial batches, decision 16 ----------------------------------------------


def test_error_passes_a_smaller_batch_that_divides(pair):
    assert elements(pair, batches_of(10, 4))[-1] == [[8], [9]]
    assert elements(pair, [np.arange(2), np.arange(4)])[-1] == [[0, 1], [2, 3]]
    assert elements(pair, [np.arange(2), np.arange(0)])[-1] == [[], []]


@pytest.mark.parametrize("make", [list, iter])
@pytest.mark.parametrize("where", [0, 1])
def test_error_raises_for_any_other(pair, make, where):
    batches = [np.arange(4), np.arange(4)]
    batches[where] = np.arange(3)
    name = f"batch {where} of 2" if make is list else f"batch {where}"
    with pytest.raises(BatchError, match=f"^{name} needs a number of examples that 2") as e:
        list(pair.distribute_dataset(make(batches)))
    assert "Got: 3 examples: 1 per replica and 1 left over" in str(e.value)
    assert "partial='pad'" in str(e.value)
    other = "batches of 4 examples" if where == 0 else "dj.InputOptions(partial='drop')"
    assert other in str(e.value)


def test_error_is_raised_before_the_first_element_where_the_dataset_tells(pair):
    dataset = Sized([{"x": np.zeros((n, 2))} for n in (4, 4, 3)])
    with pytest.raises(BatchError, match="^batch 2 of 3 needs"):
        pair.distribute_dataset(dataset)
    assert dataset.iterations == 0


def test_a_dataset_that_does_not_tell_raises_in_the_loop(pair):
    for dataset in (SizedWithoutItems(batches_of(7, 4)), iter(batches_of(7, 4))):
        iterator = iter(pair.distribute_dataset(dataset))
        assert local(pair, next(iterator)) == [[0, 1], [2, 3]]
        with pytest.raises(BatchError, match="^batch 1 needs"):
            next(iterator)
        with pytest.raises(StopIteration):
            next(iterator)


def test_a_dataset_whose_items_raise_is_not_asked_again(pair):
    class Broken(Sized):
        def __getitem__(self, index):
            raise OSError("no such file")

    assert len(elements(pair, Broken(batches_of(8, 4)))) == 2


@pytest.mark.parametrize("options", [None, DROP, PAD])
def test_a_dataset_whose_length_raises_is_read_as_one_without(pair, options):
    class Stream(Sized):
        def __len__(self):
            raise NotImplementedError("a stream")

    dataset = pair.distribute_dataset(Stream(batches_of(8, 4)), options)
    assert sum(1 for _ in dataset) == 2
    with pytest.raises(NotImplementedError, match="a stream"):
        len(dataset)
    of_each = pair.distribute_datasets_from_function(lambda _: Stream(batches_of(8, 4)), options)
    assert sum(1 for _ in of_each) == 1


def test_drop(strategy):
    r = strategy.num_replicas_in_sync
    batches = [np.arange(2 * r), np.arange(r), np.arange(2 * r), np.arange(2 * r - 1)]
    dataset = strategy.distribute_dataset(batches, DROP)
    assert [np.concatenate(local(strategy, x)).tolist() for x in dataset] == [
        list(range(2 * r)),
        list(range(2 * r)),
    ]
    assert len(dataset) == 2


def test_drop_needs_a_full_size_that_divides(pair):
    with pytest.raises(BatchError, match="^batch 0 needs a number of examples that 2") as e:
        list(pair.distribute_dataset([np.arange(5)], DROP))
    assert "or batches of 6 examples" in str(e.value)


def test_pad(pair):
    """Decision 16: every element is a Batch of the full size rounded up to a multiple of R."""
    batches = [{"x": np.arange(n, dtype=np.int32), "y": np.ones((n, 2))} for n in (5, 5, 2, 0)]
    out = list(pair.distribute_dataset(batches, PAD))
    assert [local(pair, b.mask) for b in out] == [
        [[True, True, True], [True, True, False]],
        [[True, True, True], [True, True, False]],
        [[True, True, False], [False, False, False]],
        [[False] * 3, [False] * 3],
    ]
    assert [local(pair, b.data["x"]) for b in out[1:]] == [
        [[0, 1, 2], [3, 4, 4]],  # filled up with the last example
        [[0, 1, 1], [1, 1, 1]],
        [[1, 1, 1], [1, 1, 1]],  # with the last one of an earlier batch
    ]
    assert out[0].data["y"].shape == (3, 2)


@pytest.mark.parametrize("options", [DROP, PAD])
def test_a_larger_batch_than_the_first(pair, options):
    with pytest.raises(BatchError, match="^batch 1 needs at most 2 examples") as e:
        list(pair.distribute_dataset([np.arange(2), np.arange(4)], options))
    assert "the first batch sets the full size" in str(e.value)


def test_length(pair):
    def length(dataset, options):
        return len(pair.distribute_dataset(dataset, options))

    assert length(batches_of(10, 4), ERROR) == 3
    for kind in (list, Sized):
        assert length(kind(batches_of(10, 4)), PAD) == 3
        assert length(kind(batches_of(10, 4)), DROP) == 2
        assert length(kind(batches_of(8, 4)), DROP) == 2
    with pytest.raises(TypeError, match="tells its batch sizes"):
        length(SizedWithoutItems(batches_of(8, 4)), DROP)
    with pytest.raises(TypeError, match="has no len"):
        length(iter(batches_of(8, 4)), ERROR)
    assert len(list(pair.distribute_dataset(SizedWithoutItems(batches_of(10, 4)), DROP))) == 2


# -- what cannot be split ------------------------------------------------------


def refused(strategy, batch):
    with pytest.raises(BatchError) as e:
        list(strategy.distribute_dataset([np.zeros(4), batch]))
    return str(e.value)


def test_leaves_that_disagree(pair):
    text = refused(pair, {"x": np.zeros((4, 3)), "y": [np.zeros(3)]})
    assert text.startswith("batch 1 needs arrays with one common leading dimension.")
    assert "['x'] has 4, ['y'][0] has 3" in text
    assert "Fix: batch the examples first" in text


@pytest.mark.parametrize("scalar", [1.0, np.float32(1), jnp.float32(1)])
def test_scalar_leaves(pair, scalar):
    assert "['y'] has none (a scalar)" in refused(pair, {"x": np.zeros(4), "y": scalar})
    assert "(the element itself) has none (a scalar)" in refused(pair, scalar)


@pytest.mark.parametrize("empty", [{}, (), None, {"x": None}])
def test_empty_trees(pair, empty):
    assert refused(pair, empty).startswith("batch 1 needs at least one array.")


@pytest.mark.parametrize(
    "leaf",
    [np.array(["a", "b"]), "text", object(), np.array([object()] * 2), b"bytes"],
    ids=["strings", "str", "object", "objects", "bytes"],
)
def test_leaves_that_are_no_numbers(pair, leaf):
    text = refused(pair, {"x": leaf})
    assert text.startswith("batch 1 needs arrays of numbers, leaf ['x'] is not an array.")


class Encoded(collections.UserDict):
    """As tokenizers return: a mapping that JAX takes for a leaf."""


def test_containers_that_jax_does_not_look_into(pair):
    """Each fix, as code, works."""

    @dataclasses.dataclass
    class Example:
        x: np.ndarray

    x = np.arange(4)
    fix = "  Fix: a dict in its place, in the dataset: dict(batch)"
    assert refused(pair, Encoded(x=x)).endswith(fix)
    (element,) = pair.distribute_dataset([dict(Encoded(x=x))])
    assert local(pair, element["x"]) == [[0, 1], [2, 3]]
    fix = "  Fix: make it a pytree, once: jax.tree_util.register_dataclass(Example)"
    assert refused(pair, Example(x)).endswith(fix)
    jax.tree_util.register_dataclass(Example)
    (element,) = pair.distribute_dataset([Example(x)])
    assert local(pair, element.x) == [[0, 1], [2, 3]]


def test_leaves_whose_conversion_fails_keep_the_cause(pair):
    distributed = pair.distribute_values_from_function(lambda ctx: np.zeros(2))
    for leaf in (distributed, jax.random.split(jax.random.key(0))):
        with pytest.raises(BatchError, match="needs arrays of numbers") as e:
            list(pair.distribute_dataset([leaf]))
        assert isinstance(e.value.__cause__, TypeError)


def test_keys_are_refused_and_their_data_is_not(pair):
    keys = jax.random.split(jax.random.key(3), 4)
    assert refused(pair, {"key": keys}).endswith(
        "  Fix: jax.random.key_data(keys) in the dataset, and jax.random.wrap_key_data(data) in "
        "the step; or a key beside the batch, and dj.get_replica_context().fold_in(key) in the step"
    )
    draw = lambda data: jax.vmap(jax.random.normal)(jax.random.wrap_key_data(data))
    (data,) = pair.distribute_dataset([jax.random.key_data(keys)])
    drawn = pair.gather(pair.run(draw, args=(data,)), axis=0)
    np.testing.assert_array_equal(drawn, jax.vmap(jax.random.normal)(keys))


@pytest.mark.parametrize("dataset", [{"x": np.zeros(4)}, 3, "text"])
def test_what_is_no_dataset(pair, dataset):
    with pytest.raises(TypeError, match="^distribute_dataset needs an iterable of batches"):
        pair.distribute_dataset(dataset)


def test_a_mapping_is_named_by_its_keys(pair):
    with pytest.raises(TypeError, match=r"Got: a dict with keys \['x'\]"):
        pair.distribute_dataset({"x": np.zeros(4)})


# -- contexts (decision 18) ----------------------------------------------------


def test_legal_in_scope_and_refused_elsewhere(pair):
    with pair.scope():
        assert elements(pair, [np.arange(2)]) == [[[0], [1]]]
    other = dj.VirtualStrategy(2)
    for name in ("distribute_dataset", "distribute_datasets_from_function"):
        method = getattr(pair, name)
        with other.scope(), pytest.raises(StrategyMismatchError, match=f"^{name} of"):
            method([])
        with pytest.raises(ContextError, match=f"^{name} needs cross-replica context"):
            pair.run(lambda method=method: method([]))
        with pair.scope(), pytest.raises(StrategyMismatchError, match=f"^{name} of"):
            getattr(DEFAULT, name)([])


def test_r313_next_in_a_replica_function(pair):
    """One element was asked for before, so that the background thread runs."""
    iterator = iter(pair.distribute_dataset(batches_of(12, 4)))
    next(iterator)
    message = "^next.iterator. should be called from outside of replica_fn"
    for get in (lambda: next(iterator), iterator.get_next):
        with pytest.raises(ContextError, match=message):
            pair.run(get)
    with pytest.raises(ContextError, match="^iterator.take should be called from outside"):
        pair.run(lambda: iterator.take(2))
    assert local(pair, next(iterator)) == [[4, 5], [6, 7]]


def test_next_in_a_trace_would_be_a_constant(pair):
    iterator = iter(pair.distribute_dataset(batches_of(8, 4)))
    merge = lambda strategy: next(iterator)
    for attempt in (
        lambda: dj.jit(lambda: next(iterator))(),
        lambda: jax.jit(lambda: next(iterator))(),
        lambda: pair.run(lambda: dj.get_replica_context().merge_call(merge)),
    ):
        with pytest.raises(ContextError, match="called outside of traced functions"):
            attempt()
    assert local(pair, next(iterator)) == [[0, 1], [2, 3]]


def test_next_in_the_default_strategys_run(pair):
    """It traces nothing, and other strategies work inside it (r023)."""
    iterator = iter(pair.distribute_dataset(batches_of(8, 4)))
    assert local(pair, DEFAULT.run(lambda: next(iterator))) == [[0, 1], [2, 3]]


def test_the_rows_of_an_array_are_its_batches(pair):
    with pytest.raises(dj.errors.BatchError) as info:
        pair.distribute_dataset(np.ones((4, 3), np.float32))
    assert str(info.value).endswith(
        "or batches of 4 examples; [x] in place of an array x, of which each row is a batch"
    )
    assert len(pair.distribute_dataset([np.ones((4, 3), np.float32)])) == 1


def test_a_dataset_is_distributed_once(pair):
    once = pair.distribute_dataset([np.ones((4, 3), np.float32)])
    with pytest.raises(dj.errors.BatchError, match="as it is: it is distributed already$"):
        next(iter(pair.distribute_dataset(once)))
