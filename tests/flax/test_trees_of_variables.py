"""A step may give a variable a value of another tree: a strategy keeps it, as nnx.jit does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import distjax as dj

ONE, TWO = jnp.float32(1), jnp.arange(2.0)


class Net(nnx.Module):
    """A parameter, and a variable that a step gives values of any tree."""

    def __init__(self, value):
        self.weight = nnx.Param(jnp.ones(()))
        self.held = nnx.Variable(value)


#: Name -> the values at the start, and what a step makes of its value, number and weight.
CHANGES = {
    "none_to_array": (None, lambda x, w: w * 1 if x is None else 0.9 * x + 0.1 * w),
    "none_to_the_parameter": (None, lambda x, w: w),
    "array_to_none": (ONE, lambda x, w: None),
    "tree_to_none": ({"a": ONE, "b": TWO}, lambda x, w: None),
    "none_and_back": (ONE, lambda x, w: w if x is None else None),
    "array_to_an_empty_tuple": (ONE, lambda x, w: ()),
    "empty_dict_to_empty_tuple": ({}, lambda x, w: ()),
    "tuple_that_grows": ((), lambda x, w: (*x, w * len(x))),
    "tuple_that_shrinks": ((ONE, TWO), lambda x, w: x[:1]),
    "dict_with_a_new_last_key": ({"a": ONE}, lambda x, w: {**x, f"b{len(x)}": w * 2}),
    "dict_with_a_new_first_key": ({"b": ONE}, lambda x, w: {**x, "a": w * 2}),
    "dict_with_another_key": ({"a": ONE}, lambda x, w: {"b": jax.tree.leaves(x)[0]}),
    "tuple_to_dict": ((ONE, TWO), lambda x, w: dict(zip("ab", jax.tree.leaves(x), strict=True))),
    "array_into_a_tuple": (ONE, lambda x, w: (x,)),
    "none_inside_a_tree": ({"a": ONE, "b": TWO}, lambda x, w: {**x, "b": None}),
    "unchanged": ((ONE, None), lambda x, w: x),
}

STRATEGIES = {
    "mirrored": lambda: dj.MirroredStrategy(jax.devices()[:2]),
    "virtual": lambda: dj.VirtualStrategy(2),
    "one_device": lambda: dj.OneDeviceStrategy(),
    "sharded": lambda: dj.ShardedStrategy(
        jax.devices()[:2], partition="parameters", min_split_bytes=0
    ),
}


def require_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@functools.cache
def values_of_plain_nnx(change):
    """Returns what `nnx.jit` makes of the value in three steps."""
    start, change = CHANGES[change]
    step = nnx.jit(lambda net: net.held.set_value(change(net.held.get_value(), net.weight[...])))
    net, values = Net(start), []
    for _ in range(3):
        step(net)
        values.append(jax.tree.map(np.asarray, net.held.get_value()))
    return values


@pytest.mark.pairwise
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("with_new_attribute", [False, True], ids=["", "and_new_attribute"])
def test_a_value_of_another_tree(name, change, with_new_attribute, how):
    expected = values_of_plain_nnx(change)
    start, change = CHANGES[change]

    def step(net):
        net.held.set_value(change(net.held.get_value(), net.weight[...]))
        if with_new_attribute and not hasattr(net, "empty"):
            net.empty, net.last = nnx.Variable(None), nnx.Variable(net.weight + 1)

    strategy, net = STRATEGIES[name](), Net(start)
    in_run = how(lambda net: strategy.run(step, args=(net,)))
    for value in expected:
        in_run(net)
        require_equal(net.held.get_value(), value)
    if with_new_attribute:
        assert net.empty.get_value() is None and net.last[...] == 2


@pytest.mark.parametrize("change", CHANGES)
def test_without_a_strategy(change):
    expected = values_of_plain_nnx(change)
    start, change = CHANGES[change]
    step = dj.jit(lambda net: net.held.set_value(change(net.held.get_value(), net.weight[...])))
    net = Net(start)
    for value in expected:
        step(net)
        require_equal(net.held.get_value(), value)


class Watched(nnx.Module):
    """Keeps something of each of its calls."""

    def __call__(self, x):
        self.sow(nnx.Intermediate, "seen", x.mean())
        return x


def test_sown_values_of_all_steps(pair, how):
    """Each replica's own, in the order of the steps."""
    model, expected = Watched(), Watched()
    step = how(lambda model, x: pair.run(lambda m, x: m(x), args=(model, x)))
    batches = [np.arange(4, dtype=np.float32) + i for i in range(3)]
    for i, batch in enumerate(pair.distribute_dataset(batches)):
        step(model, batch)
        nnx.jit(lambda m, x: m(x))(expected, batches[i])
    seen = model.seen.get_value()
    assert len(seen) == len(expected.seen.get_value()) == 3
    for value, batch in zip(seen, batches, strict=True):
        np.testing.assert_allclose(value.stacked, batch.reshape(2, 2).mean(1))


def test_what_differs_in_a_new_tree_is_refused(pair):
    """A value of another tree has the rule of its variable, as any other has."""

    class Plain(nnx.Module):
        def __init__(self):
            self.held = nnx.Param({"a": ONE})

    def step(model):
        number = dj.get_replica_context().replica_id_in_sync_group
        model.held.set_value({**model.held.get_value(), "b": jnp.float32(number)})

    model = Plain()
    with pytest.raises(dj.errors.LocalityError, match=r"^Plain\.held needs a value that is equal"):
        pair.run(step, args=(model,))
    require_equal(model.held.get_value(), {"a": ONE})


def test_donated_objects_that_a_step_gives_an_attribute(pair):
    """What the step leaves unchanged is handed back, too: its former array is gone."""

    def step(net):
        net.new = nnx.Variable(net.held + 1)

    net = Net(jnp.arange(2.0))
    dj.jit(lambda net: pair.run(step, args=(net,)), donate_argnums=0)(net)
    assert net.weight[...] == 1
    np.testing.assert_array_equal(net.new - net.held, [1, 1])
