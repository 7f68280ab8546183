"""The graph of NNX objects: flattened once, and anew after every change that a program must see."""

import gc
import weakref

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import distjax as dj
from distjax._src.flax import graphs


@pytest.fixture
def num_flattenings(monkeypatch):
    """Returns a function that says how many flattenings there have been."""
    made = []

    class Counted(graphs.FlatGraph):
        def __init__(self, objects):
            made.append(objects)
            super().__init__(objects)

    monkeypatch.setattr(graphs, "FlatGraph", Counted)
    return lambda: len(made)


class Settings:
    """A static value whose hash says what is in it."""

    def __init__(self, scale):
        self.scale = scale

    def __hash__(self):
        return hash(self.scale)

    def __eq__(self, other):
        return self.scale == other.scale


class Model(nnx.Module):
    def __init__(self):
        self.scale = 2.0
        self.settings = Settings(1.0)
        self.kernel = nnx.Param(jnp.float32(3.0))
        self.layers = nnx.List([nnx.Linear(1, 1, rngs=nnx.Rngs(0))])

    def __call__(self):
        return self.scale * self.settings.scale * self.kernel[...]


STRATEGY = dj.VirtualStrategy(2)


def value(model):
    return float(STRATEGY.run(lambda model: model(), args=(model,)))


def test_objects_are_walked_once(num_flattenings):
    model = Model()
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    rngs = nnx.Rngs(0)

    def step(model, optimizer, rngs):
        noise = rngs.normal()
        grads = nnx.grad(lambda model: model() * noise)(model)
        grads = dj.get_replica_context().all_reduce("mean", grads)
        optimizer.update(model, grads)

    for _ in range(3):
        STRATEGY.run(step, args=(model, optimizer, rngs))
    first = num_flattenings()
    for _ in range(3):
        STRATEGY.run(step, args=(model, optimizer, rngs))
    assert num_flattenings() == first
    assert int(optimizer.step[...]) == 6


def set_attribute(model):
    model.scale = 4.0


def set_attribute_twice(model):  # the second object may get the memory of the first
    model.scale = float("3.5")
    model.scale = float("4.0")


def change_in_place(model):
    model.settings.scale = 2.0


def replace_variable(model):
    model.kernel = nnx.Param(jnp.float32(6.0))


def set_value(model):
    model.kernel.set_raw_value(jnp.float32(6.0))


@pytest.mark.parametrize(
    "change",
    [set_attribute, set_attribute_twice, change_in_place, replace_variable, set_value],
)
def test_changes_are_seen(change):
    model = Model()
    assert [value(model), value(model)] == [6.0, 6.0]
    change(model)
    assert [value(model), value(model)] == [12.0, 12.0]


def test_metadata_are_seen():
    model = Model()
    value(model)
    names = []
    step = lambda model: names.append(model.kernel.get_metadata().get("name"))
    for name in ("a", "a", "b"):
        model.kernel.set_metadata(name=name)
        STRATEGY.run(step, args=(model,))
    assert names[-1] == "b"
    assert set(names) == {"a", "b"}


def test_a_module_in_another_place_is_seen():
    model = Model()
    read = lambda model: len(model.layers)
    assert STRATEGY.run(read, args=(model,)) == 1
    assert STRATEGY.run(read, args=(model,)) == 1
    model.layers.append(nnx.Linear(1, 1, rngs=nnx.Rngs(1)))
    assert STRATEGY.run(read, args=(model,)) == 2


def test_a_tree_that_changes_in_place_is_seen():
    model = Model()
    model.table = nnx.data({"a": nnx.Param(jnp.float32(1.0))})
    total = lambda model: sum(v[...] for v in model.table.values())
    for _ in range(2):
        assert float(STRATEGY.run(total, args=(model,))) == 1.0
    model.table["b"] = nnx.Param(jnp.float32(2.0))
    for _ in range(2):
        assert float(STRATEGY.run(total, args=(model,))) == 3.0


@pytest.mark.parametrize("empty", [list, dict, lambda: ([], 1.0), lambda: ([1.0],)])
def test_an_empty_container_may_be_filled_between_calls(pair, empty):
    """It is not hashed with the static values: it can gain parts in place."""
    module = nnx.Module()
    module.parts = nnx.data(empty())
    step = lambda module, x: sum(jax.tree.leaves(nnx.state(module, nnx.Param)), x)
    for _ in range(2):
        assert float(pair.run(step, args=(module, jnp.float32(1)))) == 1
    if isinstance(module.parts, tuple):
        module.parts[0].append(nnx.Param(jnp.float32(2)))
    elif isinstance(module.parts, dict):
        module.parts["a"] = nnx.Param(jnp.float32(2))
    else:
        module.parts.append(nnx.Param(jnp.float32(2)))
    assert float(pair.run(step, args=(module, jnp.float32(1)))) == 3


def test_one_variable_in_two_places_is_seen():
    model = Model()
    model.other = nnx.Param(jnp.float32(1.0))
    is_one = lambda model: model.other is model.kernel
    for _ in range(2):
        assert STRATEGY.run(is_one, args=(model,)) is False
    model.other = model.kernel
    for _ in range(2):
        assert STRATEGY.run(is_one, args=(model,)) is True


def test_an_array_as_an_attribute_is_read_at_each_call():
    model = Model()
    model.bias = nnx.data(jnp.float32(1.0))
    read = lambda model: model.bias
    assert float(STRATEGY.run(read, args=(model,))) == 1.0
    model.bias = jnp.float32(2.0)
    assert float(STRATEGY.run(read, args=(model,))) == 2.0


@pytest.mark.usefixtures("collect_garbage")
def test_objects_die_with_the_user():
    model = Model()
    value(model)
    module, array = weakref.ref(model), weakref.ref(model.kernel[...])
    del model
    gc.collect()
    assert module() is None
    assert array() is None


@pytest.mark.usefixtures("collect_garbage")
def test_what_a_static_attribute_closes_over_dies_with_its_module():
    strategy, refs = dj.VirtualStrategy(2), []

    class Held:
        """Something that a static attribute refers to."""

    def place():
        held = Held()
        refs.append(weakref.ref(held))
        with strategy.scope():
            dj.flax.place(nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), lambda x, _=held: x))

    for _ in range(3):
        place()
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


@pytest.mark.usefixtures("collect_garbage")
def test_equal_modules_that_die_between_calls_share_one_trace():
    strategy, traces = dj.VirtualStrategy(2), []

    def step(model):
        traces.append(1)
        return model(jnp.ones((1, 2)))

    for seed in range(3):
        strategy.run(step, args=(nnx.Linear(2, 2, rngs=nnx.Rngs(seed)),))
        gc.collect()
    assert len(traces) == 1
