"""An `nnx.State` is a value, as in JAX; an object that comes twice is one object."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distjax as dj

X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(8, 2)


@pytest.fixture
def mirrored():
    return dj.MirroredStrategy(jax.devices()[:2])


#: How a step is called; the same with `nnx.jit` gives the values to compare with.
PROGRAMS = {
    "run": lambda strategy, step: lambda *args, **kwargs: strategy.run(step, args, kwargs),
    "dj.jit": lambda strategy, step: dj.jit(step),
    "run_in_jit": lambda strategy, step: dj.jit(
        lambda *args, **kwargs: strategy.run(step, args, kwargs)
    ),
    "strategy.jit": lambda strategy, step: strategy.jit(step),
}


# -- states --------------------------------------------------------------------

STATES = (nnx.State, nnx.statelib.FlatState)
TREES = {
    "state": lambda state: state,
    "in_a_tree": lambda state: {"a": (jnp.ones(1), [state])},
    "flat": nnx.to_flat_state,
}


def values(tree):
    leaves = jax.tree.leaves(nnx.state(tree) if isinstance(tree, nnx.Pytree) else tree)
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in leaves]


def require_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("tree", TREES)
def test_law_a_state_is_not_changed(mirrored, program, tree):
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    argument = TREES[tree](state)
    before, of_model = values(argument), values(model)

    def step(tree, x):
        leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, STATES))
        (state,) = [x for x in leaves if isinstance(x, STATES)]
        if isinstance(state, nnx.statelib.FlatState):
            state = nnx.from_flat_state(state)
        model = nnx.merge(graphdef, state)
        out = model(x).sum()
        model.layers[0].kernel[...] += 1
        return nnx.state(model), out

    call = PROGRAMS[program](mirrored, step)
    for _ in range(2):  # traced, and not
        after, out = call(argument, X)
        require_equal(values(argument), before)
        require_equal(values(model), of_model)  # `nnx.split` handed out its own variables
        kernel = np.asarray(after["layers"][0]["kernel"][...])
        np.testing.assert_array_equal(kernel, np.asarray(state["layers"][0]["kernel"][...]) + 1)
        want = jax.jit(step)(argument, X)
        np.testing.assert_allclose(out, want[1], rtol=1e-5)
    assert jax.tree.structure(after) == jax.tree.structure(want[0])


def test_the_best_state_is_kept(mirrored):
    """As early stopping does: the steps after the best one write to other variables."""
    model = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.6), wrt=nnx.Param)
    graphdef, state = nnx.split((model, optimizer))

    def step(state, x):
        model, optimizer = nnx.merge(graphdef, state)
        grads = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, dj.get_replica_context().all_reduce("mean", grads))
        return nnx.state((model, optimizer))

    kernels, states = [], [state]
    for _ in range(3):
        states.append(mirrored.run(step, args=(states[-1], np.ones((4, 1), np.float32))))
        kernels.append(float(states[-1][0]["kernel"][0, 0]))
    assert [float(s[0]["kernel"][0, 0]) for s in states[1:]] == kernels
    np.testing.assert_allclose(np.divide(kernels[1:], kernels[:-1]), 1 - 2 * 0.6, rtol=1e-4)
    assert float(model.kernel[0, 0]) == float(state[0]["kernel"][0, 0])


# -- one object, several times -------------------------------------------------


def linear():
    return nnx.Linear(2, 2, rngs=nnx.Rngs(0))


def difference(online, target, x):
    return jnp.mean((online(x) - target(1.1 * x)) ** 2)


def count(first, second):
    first["n"][...] += 1
    second["n"][...] += 2
    return first["n"][...] * 1


TWICE = {
    "modules": (lambda m: ((m, m, X), {}), linear, difference),
    "keywords": (lambda m: ((), {"online": m, "target": m, "x": X}), linear, difference),
    "deep": (
        lambda m: (({"a": m, "b": [m]}, X), {}),
        linear,
        lambda tree, x: difference(tree["a"], tree["b"][0], x),
    ),
    "written": (
        lambda v: (({"n": v}, {"n": v}), {}),
        lambda: nnx.Variable(jnp.float32(0)),
        count,
    ),
    "rngs": (
        lambda rngs: ((rngs, rngs), {}),
        lambda: nnx.Rngs(params=0),
        lambda a, b: jnp.stack([jax.random.uniform(a.params()), jax.random.uniform(b.params())]),
    ),
    "states": (
        lambda m: ((nnx.state(m), nnx.state(m)), {}),
        linear,
        lambda a, b: (a["kernel"][...] * 2 + b["kernel"][...]).sum(),
    ),
    "lbfgs": (  # its state has each parameter twice
        lambda m: ((optax.lbfgs(memory_size=2).init(nnx.state(m)),), {}),
        linear,
        lambda state: sum(jnp.sum(x) for x in jax.tree.leaves(state)),
    ),
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("case", TWICE)
def test_law_an_object_may_come_twice(mirrored, program, case):
    arguments, make, step = TWICE[case]
    ours, theirs = make(), make()
    call, reference = PROGRAMS[program](mirrored, step), nnx.jit(step)
    for _ in range(2):
        args, kwargs = arguments(ours)
        found = call(*args, **kwargs)
        args, kwargs = arguments(theirs)
        np.testing.assert_allclose(found, reference(*args, **kwargs), rtol=1e-6)
    require_equal(values(ours), values(theirs))
