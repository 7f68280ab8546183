"""A restore that is refused changes nothing, and one that is not restores every value exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distjax as dj
from distjax.errors import CheckpointError
from tests.data.test_refused_states import Counting, batches, value

PAIR = dj.VirtualStrategy(2)


def read(source, count):
    iterator = iter(PAIR.distribute_dataset(source))
    for _ in range(count):
        next(iterator)
    return iterator


# -- values out of range -----------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "place"),
    [
        (5_000_000_000, jnp.int32(1)),
        (2**70, jnp.int32(1)),
        (2**70, np.int64(1)),
        (-1, jnp.uint8(1)),
        (np.int64(5_000_000_000), jnp.int32(1)),
        (np.array([1, 5_000_000_000]), jnp.ones(2, jnp.int32)),
        (jnp.uint32(4_000_000_000), jnp.int32(1)),
        (jnp.array([300, -1]), jnp.ones(2, jnp.uint8)),
        (jnp.float32(1e6), jnp.float16(1)),
        (np.float64(-1e300), jnp.float32(1)),
        (1e300, jnp.bfloat16(1)),
        (jnp.int32(70_000), jnp.float16(1)),
        (np.complex128(1e300j), jnp.complex64(1)),
        (10**400, 1.0),
    ],
)
def test_values_out_of_range(checkpointer, saved, place):
    """Neither the array, nor what comes before and after it."""
    w = dj.Variable(jnp.ones(3))
    checkpointer.save(1, {"a": w, "data": read(batches(), 2), "n": saved, "z": w})
    for n in (place, *([] if isinstance(place, float) else [dj.Variable(place)])):
        a, data = dj.Variable(jnp.zeros(3)), read(batches(), 1)
        with pytest.raises(CheckpointError) as error:
            checkpointer.restore({"a": a, "data": data, "n": n, "z": a})
        text = str(error.value)
        assert text.startswith("'n' of the checkpoint of step 1 in ") and " can hold.\n" in text
        assert "Nothing has been changed" in text
        assert a.value.tolist() == [0, 0, 0] and value(next(data)) == 1


NARROW = [jnp.int8, jnp.uint8, jnp.int16, jnp.uint16, jnp.int32, jnp.float16, jnp.bfloat16]


@settings(max_examples=60, deadline=None)
@given(
    given_dtype=st.sampled_from([*NARROW, jnp.int64, jnp.uint32, jnp.float32, jnp.float64]),
    dtype=st.sampled_from([*NARROW, jnp.float32]),
    numbers=st.lists(st.integers(-(2**33), 2**33), min_size=1, max_size=3),
)
def test_law_what_is_restored_is_equal_or_refused(tmp_path_factory, given_dtype, dtype, numbers):
    """Up to rounding: an integer to the bit, a float to its precision, never infinite."""
    with np.errstate(all="ignore"):
        saved = np.asarray(numbers, np.float64).astype(given_dtype)
    if not np.all(np.isfinite(saved.astype(np.float64))):
        return
    with dj.checkpoint.Checkpointer(tmp_path_factory.mktemp("law")) as checkpointer:
        checkpointer.save(1, {"x": saved})
        try:
            restored = checkpointer.restore({"x": jnp.zeros(len(numbers), dtype)})["x"]
        except CheckpointError:
            exact = saved.astype(np.float64)
            info = jnp.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype)
            is_lower = jnp.issubdtype(dtype, jnp.integer) > jnp.issubdtype(given_dtype, jnp.integer)
            assert is_lower or exact.max() > float(info.max) or exact.min() < float(info.min)
            return
    error = 0 if jnp.issubdtype(dtype, jnp.integer) else 2 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(restored, np.float64), saved.astype(np.float64), error)


def test_infinities_and_nan_are_values(checkpointer):
    saved = np.array([np.inf, -np.inf, np.nan])
    checkpointer.save(1, {"x": saved})
    restored = checkpointer.restore({"x": jnp.zeros(3, jnp.float16)})["x"]
    np.testing.assert_array_equal(np.asarray(restored, np.float64), saved)


def test_arrays_without_elements(checkpointer):
    key = jax.random.split(jax.random.key(0), 3)[:0]
    empty = {"key": key, "x": jnp.zeros((0, 2), jnp.int8), "y": jnp.zeros(0)}
    checkpointer.save(1, empty)
    restored = checkpointer.restore(empty)
    assert restored["key"].shape == (0,) and restored["key"].dtype == key.dtype
    assert restored["x"].shape == (0, 2) and restored["x"].dtype == jnp.int8


# -- positions in the data -----------------------------------------------------------


def test_two_iterators_of_which_one_refuses(checkpointer):
    """Over generators nothing can be read again, so that nothing may be read at all."""
    generator = lambda: (batch for batch in batches())
    checkpointer.save(1, {"a": read(generator(), 2), "b": read(batches(), 5)})
    a, b = read(generator(), 0), read(batches(3), 1)
    with pytest.raises(CheckpointError) as error:
        checkpointer.restore({"a": a, "b": b})
    assert "'b' needs to take the state" in str(error.value)
    assert "at least 5 elements\n" not in str(error.value)
    assert "at least 5 elements.\n" in str(error.value)
    assert value(next(a)) == 0 and value(next(b)) == 1


class Stubborn:
    """Takes one state, and refuses all others after it has moved."""

    def __init__(self, at):
        self.at, self.taken = at, 0

    def get_state(self):
        return self.at

    def set_state(self, state):
        self.at, self.taken = state, self.taken + 1
        if self.taken > 1 or state == 3:
            raise ValueError("not this one")


def test_an_object_that_cannot_go_back_is_named(checkpointer):
    checkpointer.save(1, {"a": Stubborn(2), "b": Stubborn(3)})
    a, b = Stubborn(0), Stubborn(1)
    with pytest.raises(
        CheckpointError, match="Nothing but 'a', 'b', which cannot go back, has been"
    ):
        checkpointer.restore({"a": a, "b": b})


class Trainer:
    def __init__(self, count):
        self.loader = Counting(20)
        self.dataset = PAIR.distribute_dataset(self.loader)
        self.iterator = iter(self.dataset)
        for _ in range(count):
            next(self.iterator)


@pytest.mark.parametrize("name", ["a_loader", "loader"])
def test_a_source_beside_its_iterator(checkpointer, name):
    """It was read ahead of the loop: the iterator has the position, whatever comes first."""
    trainer = Trainer(3)
    checkpointer.save(1, {"trainer": trainer, name: trainer.loader, "data": trainer.iterator})
    resumed = Trainer(0)
    checkpointer.restore({"trainer": resumed, name: resumed.loader, "data": resumed.iterator})
    assert value(next(resumed.iterator)) == 3


def test_a_refused_restore_of_a_source_beside_its_iterator(checkpointer):
    trainer = Trainer(3)
    checkpointer.save(1, {"data": trainer.iterator, "loader": trainer.loader, "w": Stubborn(3)})
    other = Trainer(5)
    with pytest.raises(CheckpointError, match="'w' needs to take the state"):
        checkpointer.restore({"data": other.iterator, "loader": other.loader, "w": Stubborn(0)})
    assert [value(next(other.iterator)) for _ in range(4)] == [5, 6, 7, 8]


def test_a_dataset_has_no_position(checkpointer):
    with pytest.raises(CheckpointError, match="^'data' needs to be something that a checkpoint"):
        checkpointer.save(1, {"data": Trainer(0).dataset})


# -- arguments -------------------------------------------------------------------------


class Model:
    def __init__(self, parts):
        self.parts = parts


def test_two_variables_of_an_object_at_one_path(checkpointer):
    first, second = dj.Variable(1.0), dj.Variable(2.0)
    with pytest.raises(CheckpointError, match="(?s)several leaves at model/parts/enc/w"):
        checkpointer.save(1, {"model": Model({"enc/w": first, "enc": {"w": second}})})


@pytest.mark.parametrize("rename", [5, {"m": 5}, {3: "m"}, {"m": ""}, {"": "m"}])
@pytest.mark.parametrize("method", ["restore", "delayed"])
def test_what_is_no_rename(checkpointer, method, rename):
    checkpointer.save(1, {"m": 1})
    call = {
        "restore": lambda: checkpointer.restore({"m": 1}, rename=rename),
        "delayed": lambda: checkpointer.delayed(rename=rename),
    }
    with pytest.raises(TypeError, match="^rename needs to map keys of the checkpoint to names"):
        call[method]()


@pytest.mark.parametrize("metrics", [5, {"a": 1j}, {"a": jnp.complex64(1)}, {"a": "x"}])
def test_what_are_no_metrics(checkpointer, metrics):
    with pytest.raises(ValueError, match="^save: metrics needs numbers by name"):
        checkpointer.save(1, {"m": 1}, metrics=metrics)
    assert checkpointer.all_steps() == []


def test_no_step_is_the_best_by_a_metric_that_none_has(tmp_path):
    with dj.checkpoint.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"m": 1}, metrics={"loss": 1.0})
    with dj.checkpoint.Checkpointer(tmp_path, best_metric="accuracy") as checkpointer:
        assert checkpointer.best_step() is None
        checkpointer.save(2, {"m": 1}, metrics={"accuracy": 0.5})
        checkpointer.save(3, {"m": 1}, metrics={"accuracy": 0.25})
        assert checkpointer.best_step() == 2
