"""A strategy's code, such as a layout's, in a call that names the replica axis otherwise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distjax as dj
from distjax.collectives.replica_axis import call_on_replica
from tests.replicas import ids, local


@jax.custom_jvp
def doubled(x):
    return 2 * x


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2 * tangents[0]))


@jax.custom_vjp
def tripled(x):
    return 3 * x


tripled.defvjp(lambda x: (tripled(x), None), lambda _, g: (3 * g,))


@pytest.mark.parametrize("fn, factor", [(doubled, 2), (tripled, 3)], ids=["jvp", "vjp"])
def test_law_code_with_a_derivative_rule_runs_under_another_name(pair, fn, factor):
    topology = pair.extended.topology
    of_layout = lambda x: lax.psum(fn(x), topology.axis_name)
    step = lambda x: jax.value_and_grad(lambda x: call_on_replica(of_layout, topology, x))(x)
    values, slopes = dj.pmap(step, axis_name="batch", strategy=pair)(np.arange(2, dtype=np.float32))
    assert values.tolist() == [factor, factor]
    assert slopes.tolist() == [2 * factor] * 2


def test_code_under_its_own_name_is_called_as_it_is(pair):
    topology = pair.extended.topology
    total = lambda x: lax.psum(x, topology.axis_name)
    out = pair.run(lambda x: call_on_replica(total, topology, x), args=(ids(pair),))
    assert local(pair, jnp.asarray(out)) == [1, 1]
