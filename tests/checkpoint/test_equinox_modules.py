"""In a module of Equinox, arrays are saved; what is not an array stays as it is in the tree."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distjax as dj
from distjax.errors import CheckpointError

STRATEGIES = {
    "virtual": lambda: dj.VirtualStrategy(2),
    "mirrored": lambda: dj.MirroredStrategy(jax.devices()[:2]),
}


class Model(eqx.Module):
    """What a module may have for leaves."""

    layers: eqx.nn.MLP
    dropout: eqx.nn.Dropout
    norm: eqx.nn.BatchNorm
    table: dict

    def __init__(self, key, rate=0.1):
        self.layers = eqx.nn.MLP(3, "scalar", 4, 2, key=key)
        self.dropout = eqx.nn.Dropout(rate)
        self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")
        self.table = {"scale": np.float32(rate), "name": "x", "sizes": (3, jnp.zeros(0)), "f": abs}


def training(seed, rate=0.1, place=lambda tree: tree):
    model, state = place(eqx.nn.make_with_state(Model)(jax.random.key(seed), rate))
    moments = optax.adam(0.1).init(eqx.filter(model, eqx.is_array))
    return {"model": model, "state": state, "moments": moments}


@pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)
def test_a_model_comes_back_into_a_model(make, checkpointer):
    saved = training(0, place=make().extended.broadcast_to)
    checkpointer.save(1, saved)
    restored = checkpointer.restore(training(1, rate=0.2))
    assert jax.tree.structure(restored) == jax.tree.structure(training(1, rate=0.2))
    was, now = (jax.tree.leaves(eqx.filter(tree, eqx.is_array)) for tree in (saved, restored))
    for a, b in zip(was, now, strict=True):
        np.testing.assert_array_equal(a, b)
    model = restored["model"]
    assert (model.dropout.p, model.table["name"], model.table["f"]) == (0.2, "x", abs)
    assert model.table["scale"] == np.float32(0.1)  # an array, of numpy
    x = np.ones(3, np.float32)
    assert float(model.layers(x)) == float(saved["model"].layers(x))


def test_its_arrays_alone_fit_a_whole_model_and_back(checkpointer):
    model, other = (eqx.nn.MLP(3, 1, 4, 2, key=jax.random.key(i)) for i in range(2))
    checkpointer.save(1, {"model": eqx.filter(model, eqx.is_array)})
    assert eqx.tree_equal(checkpointer.restore({"model": other})["model"], model)
    checkpointer.save(2, model)
    struct = eqx.filter_eval_shape(lambda: other)
    assert eqx.tree_equal(checkpointer.restore(struct), model)


def test_variables_and_objects_in_a_module_are_restored_in_place(checkpointer):
    class Counting(eqx.Module):
        count: dj.Variable
        mean: dj.metrics.Mean
        rate: float

    module = Counting(dj.Variable(1), dj.metrics.Mean(), 0.5)
    module.mean.update(np.float32(3))
    checkpointer.save(1, module)
    module.count.assign(7)
    module.mean.reset()
    restored = checkpointer.restore(module)
    assert restored.count is module.count and restored.mean is module.mean
    assert (int(module.count.value), float(module.mean.result()), restored.rate) == (1, 3, 0.5)


def test_a_function_outside_of_a_module_is_refused(checkpointer):
    tree = {"model": eqx.nn.MLP(3, 1, 4, 2, key=jax.random.key(0)), "activation": abs}
    with pytest.raises(CheckpointError, match="'activation' needs to be something that a checkp"):
        checkpointer.save(1, tree)


def test_an_array_of_objects_in_a_module_is_refused(checkpointer):
    class Words(eqx.Module):
        words: np.ndarray

    with pytest.raises(CheckpointError, match="'model/words' needs to be something that"):
        checkpointer.save(1, {"model": Words(np.array(["a"], object))})
