"""Where modules live: made in place, moved in place, and never mixed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distjax as dj
from distjax.errors import StrategyMismatchError
from distjax.flax.create import make_initializer
from tests.flax.image_loop import Classifier, values

PLACES = {
    "one_device": lambda: dj.OneDeviceStrategy(jax.devices()[1]),
    "mirrored": lambda: dj.MirroredStrategy(),
    "virtual": lambda: dj.VirtualStrategy(3),
    "sharded": lambda: dj.ShardedStrategy(partition="parameters"),
    "central": lambda: dj.CentralStorageStrategy(),
}


class Wide(nnx.Module):
    """A parameter that eight replicas divide, and all other types of variables."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(16, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(3, use_scale=False, use_bias=False, rngs=rngs)


def build():
    model = Wide(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param), nnx.metrics.Average()


@pytest.mark.parametrize("name", list(PLACES))
def test_what_is_created_equals_what_is_built(name):
    strategy = PLACES[name]()
    with strategy.scope():
        created = dj.flax.create(build)
        moved = dj.flax.place(build())
    for ours, theirs, plain in zip(*map(values, (created, moved, build())), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-6)
        np.testing.assert_array_equal(theirs, plain)
    for ours, theirs in zip(
        *(jax.tree.leaves(nnx.state(x)) for x in (created, moved)), strict=True
    ):
        assert ours.sharding == theirs.sharding


def test_each_type_lives_where_the_strategy_puts_it():
    kinds = {}
    for name, make in PLACES.items():
        strategy = make()
        with strategy.scope():
            model, optimizer, metric = dj.flax.create(build)
        moments = optimizer.opt_state[0].mu["linear"]["kernel"]
        variables = (model.linear.kernel, moments, model.norm.mean, metric.total)
        arrays = [v.get_raw_value() for v in variables]
        kinds[name] = [(a.sharding.shard_shape(a.shape), a.sharding.memory_kind) for a in arrays]
    small = [((3,), "device"), ((), "device")]
    whole = [((16, 8), "device"), ((16, 8), "device"), *small]
    assert kinds["one_device"] == kinds["mirrored"] == kinds["virtual"] == whole
    assert kinds["sharded"] == [((2, 8), "device"), ((2, 8), "device"), *small]
    assert kinds["central"] == [((2, 8), "pinned_host"), ((2, 8), "pinned_host"), *small]


def test_creation_compiles_to_a_shard_on_each_device():
    strategy = dj.ShardedStrategy(partition="parameters")
    make = lambda: nnx.Linear(1024, 512, use_bias=False, rngs=nnx.Rngs(0))
    program, _ = make_initializer(make, strategy)
    analysis = program.lower().compile().memory_analysis()
    table = 8 * 16  # one pointer for each output
    assert analysis.output_size_in_bytes <= 1024 * 512 * 4 / 8 + table


def test_without_a_strategy_nothing_changes():
    model = dj.flax.create(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    assert dj.flax.place(model) is model
    assert model.kernel[...].devices() == {jax.devices()[0]}


def test_the_first_run_places(mirrored, how):
    model = nnx.Linear(2, 4, rngs=nnx.Rngs(0))
    with mirrored.scope():
        how(lambda m: mirrored.run(lambda m: m.bias[...].sum(), args=(m,)))(model)
    assert len(model.kernel[...].devices()) == 2


def test_a_module_of_another_strategy(pair):
    model = nnx.Linear(2, 4, rngs=nnx.Rngs(0))
    other = dj.VirtualStrategy(3)
    with other.scope():
        dj.flax.place(model)
    text = "Linear needs to be placed for the strategy that uses it"
    with pytest.raises(StrategyMismatchError, match=text):
        pair.run(lambda m: m.bias[...], args=(model,))
    with pytest.raises(StrategyMismatchError, match=text):
        pair.run(lambda box: box[0].bias[...], args=(nnx.List([model]),))
    with pytest.raises(StrategyMismatchError, match=text):
        dj.jit(lambda m: pair.run(lambda m: m.bias[...], args=(m,)))(model)
    with pair.scope(), pytest.raises(StrategyMismatchError, match=text):
        dj.flax.place(model)
    assert other.run(lambda m: m.bias[...], args=(model,)).shape == (4,)


def test_a_module_of_a_strategy_that_was_made_twice(pair):
    """As in a notebook, when the cell that makes the strategy is run again."""
    model, again = nnx.Linear(2, 4, rngs=nnx.Rngs(0)), dj.VirtualStrategy(3)
    with dj.VirtualStrategy(3).scope() as former:
        dj.flax.place(model)
    with pytest.raises(StrategyMismatchError) as info:
        again.run(lambda m: m.bias[...], args=(model,))
    assert "Got: one that was placed for another strategy of this description" in str(info.value)
    with pytest.raises(StrategyMismatchError) as info:
        pair.run(lambda m: m.bias[...], args=(model,))
    assert f"Got: one that was placed for {former!r}" in str(info.value)


def test_a_part_of_another_strategy_that_a_module_gains_later(pair):
    """Whatever the module was placed for before."""
    model, head = nnx.List([nnx.Linear(2, 4, rngs=nnx.Rngs(0))]), nnx.Linear(4, 1, rngs=nnx.Rngs(1))
    step = lambda model: sum(layer.bias[...].sum() for layer in model)
    pair.run(step, args=(model,))
    with dj.VirtualStrategy(3).scope():
        dj.flax.place(head)
    model.append(head)
    for _ in range(2):
        with pytest.raises(StrategyMismatchError, match="Linear needs to be placed for"):
            pair.run(step, args=(model,))
    model.pop()
    pair.run(step, args=(model,))


def test_nothing_to_place(pair):
    with pair.scope():
        with pytest.raises(ValueError, match="place needs NNX objects"):
            dj.flax.place({"w": jnp.ones(3)})
        with pytest.raises(ValueError, match="create needs NNX objects"):
            dj.flax.create(lambda: jnp.ones(3))


def test_a_larger_model_is_created_whole():
    strategy = PLACES["mirrored"]()
    with strategy.scope():
        model = dj.flax.create(lambda: Classifier(rngs=nnx.Rngs(0), rate=0.5))
    assert model(jnp.ones((2, 6, 6, 1))).shape == (2, 10)
    assert int(model.dropout.rngs.count[...]) == 1
