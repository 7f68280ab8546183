"""Partial restores, renamed keys, delayed restores, and the list of what does not match."""

import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import CheckpointError


@pytest.fixture
def saved(checkpointer):
    """A checkpoint of a model and a count."""
    model = {"w": jnp.ones((2, 3)), "b": jnp.full(3, 2.0)}
    checkpointer.save(7, {"model": model, "count": jnp.int32(5)})
    return checkpointer


def first_line(error):
    return str(error.value).splitlines()[0].replace(repr_of_directory(error), "DIR")


def repr_of_directory(error):
    return str(error.value).splitlines()[0].split("'")[1]


def test_all_that_does_not_match_is_listed_and_nothing_is_changed(saved, pair):
    with pair.scope():
        count = dj.Variable(jnp.int32(0))
        w, extra = dj.Variable(jnp.zeros((3, 2))), dj.Variable(0.0)
    with pytest.raises(CheckpointError) as error:
        saved.restore({"model": {"w": w, "gain": extra}, "count": count})
    assert first_line(error) == (
        "the checkpoint of step 7 in 'DIR' needs to hold what the tree has, key by key."
    )
    lines = [line.strip() for line in str(error.value).splitlines()]
    at = lines.index("1 missing:")
    assert lines[at : at + 6] == [
        "1 missing:",
        "model/gain: float32[]",
        "1 extra:",
        "model/b: float32[3]",
        "1 different:",
        "model/w: float32[2, 3] in the checkpoint, float32[3, 2] in the tree.",
    ]
    assert int(count.value) == 0, "it fits, and is left as it was all the same"


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("a float for an int", np.zeros((2, 3), np.int32)),
        ("no axes", 0.0),
        ("keys", None),
        ("text", "text"),
    ],
)
def test_values_that_do_not_fit(name, like, saved):
    import jax

    like = jax.random.key(0) if name == "keys" else like
    with pytest.raises(CheckpointError, match="model/w: float32.* in the checkpoint"):
        saved.restore({"model": {"w": like}}, partial=True)


def test_per_replica_values_of_another_number_of_replicas(checkpointer):
    def values(count):
        strategy = dj.VirtualStrategy(count)
        return strategy.distribute_values_from_function(lambda ctx: np.zeros(3, np.float32))

    checkpointer.save(1, {"x": values(2)})
    with pytest.raises(CheckpointError, match=r"x: float32\[3\] on each of 2 replicas in the"):
        checkpointer.restore({"x": values(4)})


def test_many_keys_are_counted(checkpointer):
    checkpointer.save(1, {"x": 1})
    with pytest.raises(CheckpointError, match="and 10 more"):
        checkpointer.restore({f"y{i}": 1 for i in range(60)})


def test_a_partial_restore_leaves_the_rest_alone(saved):
    restored = saved.restore(
        {"model": {"w": jnp.zeros((2, 3))}, "new": jnp.float32(3.0)}, partial=True
    )
    np.testing.assert_array_equal(restored["model"]["w"], np.ones((2, 3)))
    assert float(restored["new"]) == 3.0


def test_a_partial_restore_of_nothing(saved):
    with pytest.raises(CheckpointError) as error:
        saved.restore({"weights": jnp.zeros((2, 3))}, partial=True)
    assert first_line(error).startswith("a partial restore needs a key that both the tree and the ")


def test_keys_and_beginnings_of_keys_can_be_renamed(saved):
    tree = {"net": {"kernel": jnp.zeros((2, 3)), "b": jnp.zeros(3)}, "count": jnp.int32(0)}
    restored = saved.restore(tree, rename={"model": "net", "model/w": "net/kernel"})
    np.testing.assert_array_equal(restored["net"]["kernel"], np.ones((2, 3)))
    np.testing.assert_array_equal(restored["net"]["b"], np.full(3, 2.0))
    assert int(restored["count"]) == 5


def test_a_rename_of_nothing(saved):
    with pytest.raises(CheckpointError) as error:
        saved.restore({}, partial=True, rename={"mod": "net"})
    assert first_line(error) == "rename needs keys of the checkpoint of step 7 in 'DIR'."


def test_a_rename_that_makes_two_keys_one(saved):
    with pytest.raises(CheckpointError, match="^rename needs to leave one value at 'model/b' of"):
        saved.restore({}, rename={"model/w": "model/b"})


def test_a_delayed_restore_keeps_what_does_not_fit(saved):
    later = saved.delayed(7, rename={"count": "steps"})
    assert later.remaining == ("steps", "model/b", "model/w")
    with pytest.raises(CheckpointError, match="needs to hold what the tree has, key by key"):
        later.restore({"model": {"w": jnp.zeros(4)}, "steps": 0})
    assert later.restore({"steps": 0}) == {"steps": 5}
    assert later.restore({"steps": 1, "other": 2}) == {"steps": 1, "other": 2}
    with pytest.raises(CheckpointError) as error:
        later.require_all()
    assert str(error.value).startswith("a delayed restore needs trees that take all that was saved")
    assert "no place yet for model/b, model/w" in str(error.value)
