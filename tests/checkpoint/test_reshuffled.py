"""A position stands behind one element: a resume that would go on elsewhere is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import CheckpointError
from tests.data.test_epochs import Shuffled, firsts

PAIR = dj.VirtualStrategy(2)
OTHER_R = dj.VirtualStrategy(4)


class Anew:
    """Shuffles by a generator of its own, which goes on from epoch to epoch."""

    def __init__(self, seed=0):
        self.random = np.random.default_rng(seed)

    def __iter__(self):
        for i in self.random.permutation(8):
            yield {"x": np.full((4, 3), i), "constant": np.ones(4)}


class Large(Anew):
    """The same in large arrays, of which a checksum reads a part."""

    def __iter__(self):
        rows = self.random.permutation(64)
        images = np.zeros((64, 40, 40))
        images[np.arange(64), 20, 20] = 1.0
        images[np.arange(64), :, 3] += np.arange(64)[:, None]
        for start in range(0, 64, 16):
            yield images[rows[start : start + 16]]


class Refilled(Anew):
    """The same through one buffer."""

    def __iter__(self):
        buffer = np.zeros((4, 3))
        for i in self.random.permutation(8):
            buffer[:] = i
            yield buffer


def a_generator(seed=0):
    return iter(Anew(seed))


def by_function(s, source, options):
    return s.distribute_datasets_from_function(lambda context: source, options)


def by_batch(s, source, options):
    return s.distribute_dataset(source, options)


DISTRIBUTED = pytest.mark.parametrize("distribute", [by_batch, by_function])


def advanced(dataset, epochs, taken):
    for _ in range(epochs):
        for _ in dataset:
            pass
    iterator = iter(dataset)
    for _ in range(taken):
        next(iterator)
    return iterator


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("make", [Anew, Large, Refilled])
@DISTRIBUTED
def test_a_dataset_that_shuffles_anew_is_refused(checkpointer, distribute, make, prefetch):
    options = dj.InputOptions("pad", prefetch)
    saved, w = advanced(distribute(PAIR, make(), options), 1, 1), dj.Variable(jnp.ones(3))
    checkpointer.save(1, {"data": saved, "w": w})
    w.assign(jnp.zeros(3))
    data = iter(distribute(PAIR, make(), options))
    with pytest.raises(CheckpointError) as error:
        checkpointer.restore({"data": data, "w": w})
    text = str(error.value)
    assert text.startswith("'data' needs to take the state that the checkpoint of step 1 in ")
    assert "gives the same elements again: element " in text and "has other values now" in text
    assert "Nothing has been changed" in text and "set_epoch(epoch)" in text
    assert w.value.tolist() == [0, 0, 0]
    assert data.get_state()["consumed"] == 0
    assert next(data) is not None


@DISTRIBUTED
def test_its_first_epoch_is_resumed(checkpointer, distribute):
    saved = advanced(distribute(PAIR, Anew(), None), 0, 2)
    checkpointer.save(1, {"data": saved})
    data = iter(distribute(PAIR, Anew(), None))
    checkpointer.restore({"data": data})
    assert firsts(PAIR, (x["x"] for x in data)) == firsts(PAIR, (x["x"] for x in saved))


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("s", [PAIR, OTHER_R, dj.OneDeviceStrategy(), dj.get_strategy()])
def test_a_dataset_with_epochs_is_resumed_in_any(checkpointer, s, prefetch):
    """On another number of replicas too."""
    options = dj.InputOptions("pad", prefetch)
    saved = advanced(PAIR.distribute_dataset(Shuffled(), options), 2, 3)
    checkpointer.save(1, {"data": saved})
    dataset = s.distribute_dataset(Shuffled(), options)
    data = iter(dataset)
    checkpointer.restore({"data": data})
    left = [firsts(s, [x.data]) for x in data] + [firsts(s, [x.data]) for x in dataset]
    expected = [x for epoch in (2, 3) for x in np.random.default_rng(epoch).permutation(8)]
    assert [x for (x,) in left] == expected[3:]


def test_steps_of_a_loop(checkpointer):
    saved = iter(PAIR.distribute_dataset(Anew(1)))
    saved.take(3)
    checkpointer.save(1, {"data": saved})
    with pytest.raises(CheckpointError, match="element 2, the last one taken"):
        checkpointer.restore({"data": iter(PAIR.distribute_dataset(Anew(2)))})
    data = iter(PAIR.distribute_dataset(Anew(1)))
    checkpointer.restore({"data": data})
    assert data.take(9).arrays["x"][:, 0, 0, 0].tolist() == [
        int(x["x"].stacked[0, 0, 0]) for x in saved
    ]


def test_a_generator_is_compared_when_it_is_first_read(checkpointer):
    saved = advanced(PAIR.distribute_dataset(a_generator(1)), 0, 2)
    checkpointer.save(1, {"data": saved})
    data = iter(PAIR.distribute_dataset(a_generator(2)))
    checkpointer.restore({"data": data})
    with pytest.raises(ValueError, match="element 1, the last one taken, has other values now"):
        next(data)
    data = iter(PAIR.distribute_dataset(a_generator(1)))
    checkpointer.restore({"data": data})
    assert firsts(PAIR, (x["x"] for x in data)) == firsts(PAIR, (x["x"] for x in saved))


def test_a_position_of_a_version_before(checkpointer):
    """It has no checksum."""

    class Former:
        def get_state(self):
            return {"delivered": 2, "consumed": 2, "full_size": 4}

        def set_state(self, state): ...

    checkpointer.save(1, {"data": Former()})
    data = iter(PAIR.distribute_dataset(Anew()))
    checkpointer.restore({"data": data})
    assert data.get_state()["consumed"] == 2 and len(list(data)) == 6
