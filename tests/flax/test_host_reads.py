"""Modules that central storage keeps in host memory, read by code outside of `run`."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distjax as dj

X = jnp.ones((3, 2))


class Model(nnx.Module):
    """A layer with a kernel that the replicas divide, and one whose bias they do not."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(2, 4, rngs=rngs)
        self.last = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(self.first(x))


def train_step(model, optimizer, x):
    grads = nnx.grad(lambda model: model(x).sum())(model)
    optimizer.update(model, dj.get_replica_context().all_reduce("mean", grads))


@pytest.fixture
def central():
    return dj.CentralStorageStrategy(jax.devices()[:2])


@pytest.fixture
def model(central):
    """A module after a step under central storage."""
    model = Model()
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    central.run(train_step, args=(model, optimizer, X))
    return model


@pytest.fixture
def expected():
    """The same module after the same step, in plain NNX."""
    model = Model()
    grads = nnx.grad(lambda model: model(X).sum())(model)
    nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param).update(model, grads)
    return model


def memory_of(variable):
    return variable.get_raw_value().sharding.memory_kind


def test_a_call_of_the_module(model, expected):
    for call in (lambda m, x: m(x), nnx.jit(lambda m, x: m(x))):
        np.testing.assert_allclose(call(model, X), expected(X), rtol=1e-6)
    graphdef, state = nnx.split(model)
    in_jax = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))(state, X)
    np.testing.assert_allclose(in_jax, expected(X), rtol=1e-6)
    assert memory_of(model.first.kernel) == "pinned_host"
    assert model.first.kernel[...].sharding.memory_kind == "device"


def test_what_is_created(central):
    with central.scope():
        model = dj.flax.create(Model)
    np.testing.assert_allclose(model(X), Model()(X), rtol=1e-6)
    assert memory_of(model.first.kernel) == "pinned_host"


@pytest.mark.parametrize(
    "how", [lambda fn: fn, nnx.jit, dj.jit], ids=["eager", "nnx.jit", "dj.jit"]
)
def test_a_moving_average_of_the_parameters(model, expected, how):
    ema, plain = nnx.EMA(Model(), decay=0.9), nnx.EMA(Model(), decay=0.9)
    for _ in range(2):
        how(lambda ema, model: ema.update(model))(ema, model)
        plain.update(expected)
    np.testing.assert_allclose(ema.apply_to(model)(X), plain.apply_to(expected)(X), rtol=1e-6)


def test_an_optimizer_of_a_placed_model_is_made_without_a_warning(central, model, expected):
    for strategy, each in ((central, model), (dj.get_strategy(), expected)):
        with warnings.catch_warnings(action="error"):
            optimizer = nnx.Optimizer(each, optax.adam(0.5), wrt=nnx.Param)
        strategy.run(train_step, args=(each, optimizer, X))
    np.testing.assert_allclose(model(X), expected(X), rtol=1e-6)


def test_a_write_is_in_host_memory_after_the_next_step(central, model):
    model.first.kernel[...] = 2 * model.first.kernel[...]
    central.run(lambda model: model.first.kernel[...].sum(), args=(model,))
    assert memory_of(model.first.kernel) == "pinned_host"


def test_a_hook_of_the_users_and_a_variable_that_a_step_adds(central):
    model, traces = Model(), []
    doubled = lambda variable, value: 2 * value
    model.last.kernel.set_metadata(on_get_value=doubled)

    def step(model):
        traces.append("once")
        return model(X).sum()

    for _ in range(2):
        central.run(step, args=(model,))
    assert traces == ["once"]
    central.run(lambda model: setattr(model, "new", nnx.Param(jnp.ones(2))), args=(model,))
    np.testing.assert_allclose(model(X), 2 * Model()(X), rtol=1e-6)
    assert memory_of(model.new) == "pinned_host"


@pytest.mark.parametrize("wrap", ["outside", "around"])
def test_a_module_that_was_placed_inside_a_program(central, wrap):
    """Only the program knows the strategy; what is read of it afterwards is on the devices."""
    model = Model()
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    step = lambda model, optimizer, x: central.run(train_step, args=(model, optimizer, x))
    step = dj.jit(step) if wrap == "around" else step
    for _ in range(2):
        step(model, optimizer, X)
        assert model(X).shape[0] == len(X) and nnx.jit(lambda m: m(X))(model) is not None
    assert memory_of(model.first.kernel).endswith("host")
