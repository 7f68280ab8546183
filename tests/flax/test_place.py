"""Where modules live: made in place, moved in place, and never mixed."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distjax as dj
from distjax._src.flax.create import make_initializer
from distjax.errors import LocalityError, StrategyMismatchError, TraceLeakError
from tests.flax.image_loop import Classifier, values

PLACES = {
    "one_device": lambda: dj.OneDeviceStrategy(jax.devices()[1]),
    "mirrored": lambda: dj.MirroredStrategy(),
    "virtual": lambda: dj.VirtualStrategy(3),
    "sharded": lambda: dj.ShardedStrategy(partition="parameters", min_split_bytes=0),
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
    strategy = dj.ShardedStrategy(partition="parameters", min_split_bytes=0)
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
    assert other.run(lambda m: m.bias[...], args=(model,)).shape == (4,)


def step(model, optimizer, metric, x):
    grads = nnx.grad(lambda m: m.linear(x).mean())(model)
    optimizer.update(model, dj.get_replica_context().all_reduce("mean", grads))
    metric.update(values=x)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "run") for name in PLACES),
        *(("sharded", w) for w in ("jit", "strategy.jit", "place")),
    ],
)
def test_an_equal_strategy_takes_modules_over(name, way):
    """As in a notebook, when the cell that makes the strategy is run again."""
    strategies = [PLACES[name](), PLACES[name]()]  # both live on
    objects = build()
    x = np.ones((24, 16), np.float32)
    for number, strategy in enumerate((*strategies, strategies[0]), 1):
        call = lambda *args: strategy.run(step, args=args)  # noqa: B023
        if way == "place" or number == 1:
            with strategy.scope():
                dj.flax.place(objects)
        call = {"jit": dj.jit(call), "strategy.jit": strategy.jit(step)}.get(way, call)
        (batch,) = strategy.distribute_dataset([x])
        call(*objects, batch)
        assert int(objects[1].step[...]) == number
        assert int(objects[2].count[...]) == number * x.size
        if way in ("run", "place"):
            assert "Wide.linear.kernel" in {v.name for v in strategy.describe().variables}


UNEQUAL = {
    "devices": lambda: dj.MirroredStrategy(jax.devices()[4:]),
    "axis": lambda: dj.MirroredStrategy(jax.devices()[:4], axis_name="batch"),
    "options": lambda: dj.MirroredStrategy(
        jax.devices()[:4], communication=dj.CommunicationOptions(bytes_per_pack=1)
    ),
    "class": lambda: dj.ShardedStrategy(jax.devices()[:4], min_split_bytes=0),
    "number": lambda: dj.MirroredStrategy(jax.devices()[:2]),
}


@pytest.mark.parametrize("name", list(UNEQUAL))
def test_another_strategy_does_not_and_place_moves_them(name):
    former, strategy, objects = dj.MirroredStrategy(jax.devices()[:4]), UNEQUAL[name](), build()
    with former.scope():
        dj.flax.place(objects)
    former.run(lambda model, optimizer, metric: None, args=objects)
    before = values(objects)
    (batch,) = strategy.distribute_dataset([np.ones((24, 16), np.float32)])
    with pytest.raises(StrategyMismatchError) as info:
        strategy.run(step, args=(*objects, batch))
    assert "Fix: use one strategy, or move the object" in str(info.value)
    text = "Got: one that was placed for another strategy of this description, with other devices"
    assert (text in str(info.value)) == (name in ("devices", "options"))
    with strategy.scope():
        assert dj.flax.place(objects) is objects
    for ours, own in zip(values(objects), before, strict=True):
        np.testing.assert_array_equal(ours, own)
    strategy.run(step, args=(*objects, batch))
    assert int(objects[1].step[...]) == 1
    with pytest.raises(StrategyMismatchError):
        former.run(lambda m: m.linear.kernel[...], args=(objects[0],))


def test_place_moves_from_any_strategy_to_any():
    model, fresh = build(), {}
    for name, make in PLACES.items():
        with make().scope():
            fresh[name] = jax.tree.leaves(nnx.state(dj.flax.place(build())))
    for pair in itertools.permutations(PLACES, 2):
        for name in pair:
            with PLACES[name]().scope():
                dj.flax.place(model)
            for moved, own in zip(jax.tree.leaves(nnx.state(model)), fresh[name], strict=True):
                assert moved.sharding == own.sharding
                np.testing.assert_array_equal(moved, own)


def test_values_per_replica_are_not_moved_to_other_replicas():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    former, strategy = dj.VirtualStrategy(2), dj.VirtualStrategy(3)

    def sow(model, x):
        model.seen = nnx.Intermediate(x)

    former.run(sow, args=(model, former.per_replica(jnp.arange(2.0))))
    with dj.VirtualStrategy(2).scope():  # an equal one has these replicas
        dj.flax.place(model)
    with strategy.scope(), pytest.raises(LocalityError) as info:
        dj.flax.place(model)
    assert str(info.value).startswith("Linear.seen needs one value to be moved to VirtualStrategy")
    assert "Got: a Intermediate with a value for each replica of Topology(R=2" in str(info.value)
    assert former.run(lambda m: m.seen[...], args=(model,)).stacked.tolist() == [0, 1]
    nnx.pop(model, nnx.Intermediate)  # the fix
    with strategy.scope():
        dj.flax.place(model)


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


class Around(nnx.Module):
    """A module around something that may have been made elsewhere."""

    def __init__(self, part):
        self.part, self.own = nnx.data(part), nnx.Linear(2, 2, rngs=nnx.Rngs(0))


RNGS, LINEAR, PARAM = nnx.Rngs(0), nnx.Linear(2, 2, rngs=nnx.Rngs(1)), nnx.Param(jnp.ones(2))
KEY = jax.random.key(3)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: nnx.Linear(2, 2, rngs=RNGS), "Got: an nnx.RngCount that was made outside of it."),
        (
            lambda: Around(RNGS),
            "Got: an nnx.RngCount that was made outside of it, at part.default.count of the result",
        ),
        (
            lambda: Around(LINEAR),
            "Got: an nnx.Param that was made outside of it, at part.bias of the result",
        ),
        (
            lambda: Around(PARAM),
            "Got: an nnx.Param that was made outside of it, at part of the result",
        ),
        (lambda: LINEAR, "Got: an nnx.Param that was made outside of it, at bias of the result"),
    ],
    ids=["draws", "rngs", "module", "variable", "itself"],
)
def test_what_create_captures_is_refused_and_place_takes_it(pair, make, text):
    """A module or variable from outside was copied in silence: two of what the user has once."""
    with pair.scope():
        with pytest.raises(TraceLeakError, match=text) as info:
            dj.flax.create(make)
        assert str(info.value).startswith("create needs a constructor that makes what it uses")
        assert "dj.flax.place(Model(rngs=rngs))" in str(info.value)
        placed = dj.flax.place(make())  # the fix: shared with what is outside
        dj.flax.create(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
        dj.flax.create(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(KEY)))  # a key is a value
    assert getattr(placed, "part", LINEAR) in (LINEAR, PARAM, RNGS)


def test_a_larger_model_is_created_whole():
    strategy = PLACES["mirrored"]()
    with strategy.scope():
        model = dj.flax.create(lambda: Classifier(rngs=nnx.Rngs(0), rate=0.5))
    assert model(jnp.ones((2, 6, 6, 1))).shape == (2, 10)
    assert int(model.dropout.rngs.count[...]) == 1
