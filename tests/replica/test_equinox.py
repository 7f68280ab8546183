"""Equinox modules: trees whose numbers and functions are no inputs, found without an import.

The rule is tested on a stand-in for the class; where Equinox is installed, on its own layers.
"""

import dataclasses
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distjax as dj
from tests.replicas import counted, local


class Module:
    """What `eqx.Module` is to a tree: a dataclass whose fields are children."""

    def __init_subclass__(cls):
        dataclasses.dataclass(frozen=True)(cls)
        names = [field.name for field in dataclasses.fields(cls)]
        jax.tree_util.register_dataclass(cls, data_fields=names, meta_fields=[])


class Noisy(Module):
    w: jax.Array
    rate: float
    inference: bool
    activation: object

    def __call__(self, x, key):
        if self.inference or self.rate == 0:
            return self.activation(self.w * x)
        keep = jax.random.bernoulli(key, 1 - self.rate, x.shape)
        return self.activation(jnp.where(keep, self.w * x, 0))


class Stack(Module):
    layers: list


@pytest.fixture
def stand_in(monkeypatch):
    """Puts the stand-in where Equinox would be imported."""
    library = types.ModuleType("equinox")
    library.Module = Module
    monkeypatch.setitem(sys.modules, "equinox", library)


KEY = jax.random.key(0)


def call(module, x, key=KEY):
    return module.layers[0](x, key)


def make(rate=0.5, inference=False, activation=jnp.tanh):
    return Stack([Noisy(jnp.ones(3), rate, inference, activation)])


def test_what_is_no_array_in_a_module_is_a_value_of_python(strategy, how, stand_in):
    step = how(lambda module, x: strategy.run(call, (module, x)))
    modules = make(), make(inference=True), make(inference=True, activation=jnp.sin), make(rate=0)
    for module in modules:
        np.testing.assert_allclose(step(module, jnp.ones(3)), call(module, jnp.ones(3)), rtol=1e-6)


def test_a_module_comes_back_as_it_was_and_compiles_nothing(pair, stand_in):
    def step(module, counter):
        return jax.tree.map(lambda x: x + 1 if isinstance(x, jax.Array) else x, module), counter + 1

    step = counted(step)
    module, counter = pair.extended.broadcast_to((make(), 0))
    for _ in range(3):
        module, counter = pair.run(step, args=(module, counter))
    assert step.calls == 1 and int(counter) == 3
    (layer,) = module.layers
    assert (layer.rate, layer.inference, layer.activation) == (0.5, False, jnp.tanh)
    assert layer.w.tolist() == [4, 4, 4]


def test_a_number_of_a_module_is_part_of_the_program(pair, stand_in):
    step = counted(call)
    for rate in (0.25, 0.5, 0.25):
        pair.run(step, args=(make(rate), jnp.ones(3)))
    assert step.calls == 2


def test_values_per_replica_in_a_module(pair, stand_in):
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]) if hasattr(x, "shape") else x, make(0))
    out = pair.run(call, args=(pair.per_replica(stacked), jnp.ones(3)))
    np.testing.assert_allclose(local(pair, out), np.tanh([[1, 1, 1], [2, 2, 2]]), rtol=1e-6)


def test_a_module_after_calls_without_one(pair, stand_in):
    step = lambda module, x: x if module is None else call(module, x)
    assert pair.run(step, args=(None, jnp.ones(3))).tolist() == [1, 1, 1]
    assert pair.run(step, args=(make(0), jnp.ones(3))).shape == (3,)


def test_the_reference_interpreter_leaves_modules_as_they_are(stand_in):
    out = dj.testing.ReferenceStrategy(2).run(call, args=(make(), jnp.ones(3)))
    np.testing.assert_allclose(out, call(make(), jnp.ones(3)), rtol=1e-6)


def test_what_cannot_be_hashed_in_a_module_is_named(pair, stand_in):
    with pytest.raises(ValueError) as info:
        pair.run(call, args=(make(activation={1, 2}), jnp.ones(3)))
    assert str(info.value).splitlines()[0] == (
        "argument module.layers[0].activation needs an array, a number or a hashable object."
    )


def test_without_equinox_numbers_are_inputs(pair):
    with pytest.raises(jax.errors.TracerBoolConversionError):
        pair.run(call, args=(make(), jnp.ones(3)))


def test_explain_lists_arrays_only(pair, stand_in):
    found = dj.explain(call, make(), jnp.ones(3), strategy=pair)
    assert found.arguments == {"module.layers[0].w": "M", "x": "M"}


# -- Equinox itself --------------------------------------------------------------------


@pytest.fixture
def eqx():
    return pytest.importorskip("equinox")


def test_layers_with_flags_and_rates(pair, eqx):
    dropout = eqx.nn.Dropout(0.5)
    out = pair.run(lambda d, x: d(x, key=KEY), args=(dropout, jnp.ones(8)))
    np.testing.assert_array_equal(out, dropout(jnp.ones(8), key=KEY))
    attention = eqx.nn.MultiheadAttention(2, 4, key=KEY)
    out = pair.run(lambda a, x: a(x, x, x), args=(attention, jnp.ones((3, 4))))
    np.testing.assert_allclose(out, attention(*[jnp.ones((3, 4))] * 3), rtol=1e-5)


def test_a_module_is_trained_with_filter_jit_and_filter_grad_inside(pair, eqx):
    optimizer = optax.adam(0.1)

    @eqx.filter_jit
    def loss_fn(model, x, y):
        return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)

    def step(model, state, x, y):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, x, y)
        grads = dj.get_replica_context().all_reduce("mean", grads)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(model, updates), state, jax.lax.pmean(loss, pair.axis_name)

    model = pair.extended.broadcast_to(eqx.nn.MLP(3, 1, 8, 2, key=KEY))
    state = pair.extended.broadcast_to(optimizer.init(eqx.filter(model, eqx.is_array)))
    x = np.random.default_rng(0).normal(size=(2, 16, 3)).astype(np.float32)
    y, losses, step = x.sum(-1), [], counted(step)
    for _ in range(5):
        args = (model, state, pair.per_replica(x), pair.per_replica(y))
        model, state, loss = pair.run(step, args=args)
        losses.append(float(loss))
    assert step.calls == 1 and losses[-1] < losses[0]
    pair.assert_mirrored(eqx.filter(model, eqx.is_array))


def test_batch_norm_with_state(pair, eqx):
    axes = ("batch", pair.axis_name)
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, axis_name=axes, mode="batch")

    def step(norm, state, x):
        apply = lambda x, state: norm(x, state)
        return jax.vmap(apply, (0, None), (0, None), axis_name="batch")(x, state)

    x = np.random.default_rng(0).normal(size=(2, 8, 3)).astype(np.float32)
    for _ in range(3):
        out, state = pair.run(step, args=(norm, state, pair.per_replica(x)))
    rows = np.concatenate(local(pair, out))
    np.testing.assert_allclose(rows.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(rows.std(0), 1, atol=1e-2)


def test_the_warning_of_local_statistics_names_the_state_as_the_user_can_write_it(pair, eqx):
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, axis_name="batch", mode="batch")
    step = lambda norm, state, x: jax.vmap(norm, (0, None), (0, None), axis_name="batch")(x, state)
    x = pair.per_replica(np.random.default_rng(0).normal(size=(2, 8, 3)).astype(np.float32))
    with pytest.warns(dj.errors.LocalityWarning, match=r"dj\.expect\(reason, differs=state\)$"):
        pair.run(step, args=(norm, state, x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.run(step, args=(norm, dj.expect("own statistics", differs=state), x))


def test_a_function_of_filter_jit_as_the_step(pair, eqx):
    linear = eqx.nn.Linear(3, 2, key=KEY)
    out = pair.run(eqx.filter_jit(lambda model, x: model(x)), args=(linear, jnp.ones(3)))
    np.testing.assert_allclose(out, linear(jnp.ones(3)), rtol=1e-5)


def test_a_compiled_method_takes_its_module_as_an_argument(eqx):
    calls = []

    class Model(eqx.Module):
        w: jax.Array
        scale: float

        @dj.jit
        def scaled(self, x):
            calls.append(self.scale)
            return self.w * self.scale * x

    assert [float(Model(jnp.float32(w), 2.0).scaled(3.0)) for w in (1, 2, 3)] == [6, 12, 18]
    assert calls == [2.0]
