"""What differs between versions and modes of JAX."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax._src import jax_compat
from distjax.errors import ContextError, TraceLeakError


@pytest.fixture(params=[False, True], ids=["32 bits", "64 bits"])
def bits(request):
    with jax.enable_x64(request.param):
        yield


@pytest.mark.usefixtures("bits")
def test_staging():
    found = {}

    def look(name):
        def fn(x):
            found[name] = jax_compat.staging()
            return x

        return fn

    jax.jit(look("jit"))(1.0)
    jax.grad(look("grad"))(1.0)
    jax.vmap(look("vmap"))(jnp.ones(2))
    jax.jit(jax.grad(look("jit of grad")))(1.0)
    look("eager")(1.0)
    with jax.disable_jit():
        jax.jit(look("disabled jit"))(1.0)
    assert [name for name, is_staging in found.items() if is_staging] == ["jit", "jit of grad"]


@pytest.mark.usefixtures("bits")
def test_a_variable_in_derivatives_and_batches_of_jax(pair):
    with pair.scope():
        v = dj.Variable(np.float32(3))
    assert float(jax.grad(lambda x: v.value * x)(2.0)) == 3
    assert jax.vmap(lambda x: v.value * x)(jnp.arange(2.0)).tolist() == [0, 3]
    with pytest.raises(TraceLeakError, match="variable 'Variable"):
        jax.jit(lambda x: v.value * x)(2.0)


@pytest.mark.usefixtures("bits")
def test_the_derivative_of_a_run_that_reads_a_variable(pair):
    with pair.scope():
        v = dj.Variable(np.float32(3), aggregation=dj.VariableAggregation.MEAN)

    def step(x):
        return dj.get_replica_context().all_reduce("mean", v.value * x)

    assert float(jax.grad(lambda x: pair.run(step, args=(x,)))(2.0)) == 3


@pytest.mark.usefixtures("bits")
def test_an_element_of_a_dataset_in_a_derivative(pair):
    iterator = iter(pair.distribute_dataset([np.full(2, 3, np.float32)] * 2))
    total = lambda batch: pair.reduce("mean", batch, axis=0)
    assert float(jax.grad(lambda x: total(next(iterator)) * x)(2.0)) == 3
    with pytest.raises(ContextError, match="needs to be called outside of traced functions"):
        jax.jit(lambda x: total(next(iterator)) * x)(2.0)
    iterator.close()


def test_one_process_has_no_coordination_client():
    """What the client of a job can do is asked in tests/processes."""
    assert jax_compat.coordination_client() is None


def test_the_line_that_first_used_a_backend_is_known():
    assert jax.devices()
    assert ".py:" in jax_compat.first_use_of_a_backend()


def test_temporaries_are_what_is_allocated_for_them():
    """Recorded: a program whose temporaries are two arrays of 256 MiB and two tables of 512 bytes.

    Each begins at a multiple of 16 KiB; libtpu counts the gaps twice.
    """
    recorded = types.SimpleNamespace(
        argument_size_in_bytes=4 * 2**28,
        output_size_in_bytes=3 * 2**28 + 512,
        alias_size_in_bytes=0,
        temp_size_in_bytes=2 * 2**28 + 2 * (2**15 - 512),
        total_allocation_bytes=9 * 2**28 + 512 + 2**15,
    )
    assert jax_compat.temporary_bytes(recorded) == 2 * 2**28 + 2**15
    del recorded.total_allocation_bytes  # as before JAX 0.12
    assert jax_compat.temporary_bytes(recorded) == recorded.temp_size_in_bytes


def test_temporaries_on_a_cpu():
    compiled = jax.jit(lambda x: jnp.sin(x @ x) @ x).lower(jnp.ones((300, 300))).compile()
    stats = compiled.memory_analysis()
    assert jax_compat.temporary_bytes(stats) == stats.temp_size_in_bytes > 0
