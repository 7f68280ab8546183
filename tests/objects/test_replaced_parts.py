"""A step may replace, add and remove parts of a module: it has them then, as after `nnx.jit`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import distjax as dj


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))
        self.sub = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.layers = nnx.List([nnx.Param(jnp.ones(2)), nnx.Param(jnp.zeros(2))])
        self.plain = nnx.Dropout(0.5)
        self.offset = nnx.data(jnp.ones(2))
        self.stat = nnx.BatchStat(jnp.zeros(2))


def variable(m):
    m.w = nnx.Param(m.w[...] + 1)


def variable_of_the_same_value(m):
    m.w = nnx.Param(m.w[...])


def variable_of_another_type(m):
    m.w = nnx.BatchStat(m.w[...] + 1)


def submodule(m):
    m.sub = nnx.Linear(2, 2, rngs=nnx.Rngs(params=1))


def submodule_without_variables(m):
    m.plain = nnx.Dropout(0.5)


def list_element(m):
    m.layers[0] = nnx.Param(m.layers[1][...] + 5)


def swap(m):
    m.layers[0], m.layers[1] = m.layers[1], m.layers[0]
    m.layers[0][...] += 1


def swap_with_a_new_one(m):
    m.layers[0], m.layers[1] = m.layers[1], nnx.Param(m.layers[0][...] + 1)


def deleted(m):
    del m.w


def deleted_element(m):
    del m.layers[0]


def added(m):
    m.new = nnx.Param(m.w[...] * 2)


def added_module(m):
    m.new = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(params=2)), m.sub])


def shared(m):
    m.layers[1] = m.w
    m.w[...] += 1


def kept_elsewhere(m):
    m.layers.append(m.w)
    m.w = nnx.Param(m.w[...] + 1)


def bare_array(m):
    m.offset = m.offset + 1


def replaced_after_a_write(m):
    m.w[...] += 1
    m.w = nnx.Param(m.w[...] * 3)


CHANGES = [
    variable,
    variable_of_the_same_value,
    variable_of_another_type,
    submodule,
    submodule_without_variables,
    list_element,
    swap,
    swap_with_a_new_one,
    deleted,
    deleted_element,
    added,
    added_module,
    shared,
    kept_elsewhere,
    bare_array,
    replaced_after_a_write,
]
STRATEGY = dj.MirroredStrategy(jax.devices()[:2])
HOWS = {
    "run": lambda fn: lambda m: STRATEGY.run(fn, args=(m,)),
    "jit": lambda fn: dj.jit(lambda m: STRATEGY.run(fn, args=(m,))),
    "strategy.jit": STRATEGY.jit,
    "global": dj.jit,
}


def outcome(call):
    """Returns values and identities after a step: which parts are those of before, and where."""
    model = Model()
    before = {id(node): path for path, node in nnx.iter_graph(model)}
    held = [node for _, node in nnx.iter_graph(model)]
    call(model)
    places = [
        (path, type(node).__name__, before.get(id(node)))
        for path, node in nnx.iter_graph(model)
        if isinstance(node, (nnx.Module, nnx.Variable))
    ]
    arrays = [np.asarray(x).tolist() for x in jax.tree.leaves(nnx.state(model))]
    old = [np.asarray(v[...]).tolist() for v in held if isinstance(v, nnx.Variable)]
    return sorted(map(repr, places)), arrays, old


@functools.cache
def expected(change):
    return outcome(nnx.jit(change))


@pytest.mark.parametrize("how", list(HOWS))
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_parts_are_replaced_as_by_nnx_jit(change, how):
    assert outcome(HOWS[how](change)) == expected(change)


def test_a_step_that_replaces_again_and_again():
    model, call = Model(), STRATEGY.jit(variable)
    held = [model.w]
    for _ in range(3):
        call(model)
        held.append(model.w)
    assert [float(v[0]) for v in held] == [1, 2, 3, 4]


def test_a_metric_that_a_step_makes_anew_counts_all_replicas():
    model = nnx.List([nnx.metrics.Average()])

    def step(model, x):
        model[0] = nnx.metrics.Average()
        model[0].update(values=x)

    for _ in range(2):
        STRATEGY.run(step, args=(model, STRATEGY.per_replica(jnp.arange(4.0).reshape(2, 2))))
        assert float(model[0].compute()) == 1.5
        assert int(model[0].count[...]) == 4
