"""Arrays that live elsewhere than a strategy's devices, given to `dj.jit` around its `run`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import distjax as dj
from tests.faults.four_parts import is_explained


def on_four(kind):
    """Returns [0, ..., 7] sharded over four devices."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType[kind],))
    return jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("d")))


ARRAYS = {
    "sharded_by_auto_axes": lambda: on_four("Auto"),
    "on_one_device": lambda: jax.device_put(jnp.arange(8.0), jax.devices()[5]),
}


def summed(x):
    return dj.get_replica_context().all_reduce("sum", x)


@pytest.mark.parametrize("where", ARRAYS)
def test_an_argument_of_dj_jit_is_moved_or_the_error_says_how_to_move_it(pair, where):
    step = dj.jit(lambda x: pair.run(summed, args=(x,)))
    try:
        result = step(ARRAYS[where]())
    except Exception as error:
        assert is_explained(error), error
    else:
        np.testing.assert_array_equal(result, 2 * np.arange(8.0))


@pytest.mark.parametrize("where", ["sharded_by_auto_axes", "on_one_device"])
def test_an_argument_of_run_is_moved(pair, where):
    result = pair.run(summed, args=(ARRAYS[where](),))
    np.testing.assert_array_equal(result, 2 * np.arange(8.0))


def test_an_argument_of_run_that_is_sharded_by_explicit_axes_is_moved(mirrored):
    result = mirrored.run(summed, args=(on_four("Explicit"),))
    np.testing.assert_array_equal(result, 2 * np.arange(8.0))
