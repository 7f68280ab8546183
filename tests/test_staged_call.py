"""A traced step is called by one equation where its types are those of the trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

import distjax as dj
from distjax._src import jax_compat
from distjax._src.traces import stage_call

TABLE = np.arange(3, dtype=np.float32)


def code(x):
    """Results that are computed, an operand, a literal, and the first once more."""
    y = x * x + TABLE
    return y, x, 2.0, y


JAXPR, CONSTS = jax_compat.open_jaxpr(jax.make_jaxpr(code)(jnp.ones(3)))


def call(x):
    return stage_call(JAXPR, CONSTS, (x,), "square")


def staged(fn, *args):
    """The jaxpr that `fn` stages."""
    return jax_compat.open_jaxpr(jax.make_jaxpr(fn)(*args))[0]


def names(jaxpr):
    return [eqn.primitive.name for eqn in jaxpr.eqns]


def mesh_of_three(kind):
    return jax.make_mesh((3,), ("x",), axis_types=(kind,), devices=jax.devices()[:3])


def test_the_call_holds_the_equations_of_the_trace():
    (eqn,) = staged(call, jnp.ones(3)).eqns
    assert (eqn.primitive.name, eqn.params["name"]) == ("jit", "square")
    inner, _ = jax_compat.called_jaxpr(eqn)
    assert all(a is b for a, b in zip(inner.eqns, JAXPR.eqns, strict=True))


def test_a_result_that_is_an_operand_is_none_of_the_call():
    jaxpr = staged(call, jnp.ones(3))
    (computed,) = jaxpr.eqns[0].outvars
    first, second, _, last = jaxpr.outvars
    assert (first, second, last) == (computed, jaxpr.invars[0], computed)


@pytest.mark.parametrize(
    "way", ["eager", "jit", "disabled jit", "vmap", "disabled jit of vmap", "grad", "jit of grad"]
)
def test_a_call_gives_what_the_code_gives(way):
    ways = {
        "eager": lambda fn: fn,
        "jit": jax.jit,
        "disabled jit": jax.jit,
        "vmap": jax.vmap,
        "disabled jit of vmap": lambda fn: jax.jit(jax.vmap(fn)),
        "grad": lambda fn: jax.grad(lambda x: fn(x).sum()),
        "jit of grad": lambda fn: jax.jit(jax.grad(lambda x: fn(x).sum())),
    }
    x = jnp.ones((2, 3)) if "vmap" in way else jnp.arange(3.0)
    with jax.disable_jit(way.startswith("disabled jit")):
        called = ways[way](lambda x: call(x)[0])(x)
        np.testing.assert_array_equal(called, ways[way](lambda x: code(x)[0])(x))


# -- where types may differ from those of the trace, the code is evaluated -----------------------


def test_an_operand_with_an_explicit_axis_is_evaluated():
    split = NamedSharding(mesh_of_three(AxisType.Explicit), PartitionSpec("x"))
    x = jax.device_put(jnp.arange(3.0), split)
    assert names(staged(call, x)) == ["mul", "add"]
    assert jax.jit(call)(x)[0].sharding == split


def test_an_operand_in_host_memory_is_evaluated():
    x = jax.device_put(
        jnp.ones(3), SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    )
    identity, _ = jax_compat.open_jaxpr(jax.make_jaxpr(lambda x: x.reshape(3, 1))(jnp.ones(3)))
    jaxpr = staged(lambda x: stage_call(identity, (), (x,), "reshape"), x)
    assert names(jaxpr) == ["reshape"]
    assert jaxpr.outvars[0].aval.memory_space == jax.memory.Space.Host


def test_a_mutable_operand_is_evaluated():
    jaxpr, _ = jax_compat.open_jaxpr(jax.make_jaxpr(lambda ref: ref[...])(jax.new_ref(jnp.ones(3))))
    read = lambda ref: stage_call(jaxpr, (), (ref,), "read")
    assert names(staged(read, jax.new_ref(jnp.ones(3)))) == ["get"]


def test_within_a_shard_map_the_code_is_evaluated():
    square, _ = jax_compat.open_jaxpr(jax.make_jaxpr(lambda x: x * x)(jnp.ones(3)))
    call = lambda x: stage_call(square, (), (x,), "square")[0]
    split = PartitionSpec("x")
    mesh = mesh_of_three(AxisType.Auto)
    mapped = jax.shard_map(call, mesh=mesh, in_specs=split, out_specs=split)
    (eqn,) = staged(mapped, jnp.ones(9)).eqns
    assert names(jax_compat.called_jaxpr(eqn)[0]) == ["mul"]


# -- in whole programs ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_step_is_staged_as_one_call(num_replicas):
    strategy = dj.MirroredStrategy(jax.devices()[:num_replicas])
    with strategy.scope():
        total = dj.Variable(jnp.zeros(()), aggregation=dj.VariableAggregation.SUM)

    def replica_step(x):
        total.assign_add(x.sum())
        return x * 2

    @dj.jit
    def step(x):
        return strategy.run(replica_step, args=(x,))

    lowered = step.lower(jnp.ones(4))
    assert lowered.as_text().count("func.func private @step") == 1
