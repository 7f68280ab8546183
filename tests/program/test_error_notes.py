"""What errors of JAX in a step say of the step: its name, and hints of distjax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import LocalityError


def notes_of(error):
    return "\n".join(note for note in error.__notes__ if "distjax" in note or "dj." in note)


def test_a_collective_over_another_axis():
    strategy = dj.VirtualStrategy(2)
    with pytest.raises(NameError, match="unbound axis name: batch") as caught:
        strategy.run(lambda x: jax.lax.pmean(x, "batch"), args=(1.0,))
    assert notes_of(caught.value) == (
        f"The replica axis of {strategy!r} is named 'replica'.\n"
        "  Fix: dj.MirroredStrategy(axis_name='batch'), dj.pmap(fn, 'batch'), or "
        "dj.get_replica_context().all_reduce('mean', x)"
    )


def test_a_collective_with_no_strategy():
    with pytest.raises(NameError, match="unbound axis name: batch") as caught:
        dj.get_strategy().run(lambda x: jax.lax.pmean(x, "batch"), args=(1.0,))
    assert notes_of(caught.value).startswith(
        "The replica axis of DefaultStrategy() has no name.\n"
        "  Fix: dj.MirroredStrategy(axis_name='batch')"
    )


def test_a_variable_in_place_of_its_value():
    strategy = dj.VirtualStrategy(2)
    with strategy.scope():
        v = dj.Variable(jnp.ones(2))
    with pytest.raises(ValueError, match="__jax_array__") as caught:
        strategy.run(lambda x: jax.grad(lambda v: (x * v).sum())(v), args=(1.0,))
    assert notes_of(caught.value) == (
        "A distjax.Variable stands where JAX wants an array.\n"
        "  Fix: v.value in place of v, and jax.grad of a function of values"
    )


def test_an_error_of_jax_names_the_step():
    def step(x):
        return 1 if x.sum() > 0 else 0

    with pytest.raises(
        jax.errors.TracerBoolConversionError, match="function step at .*test_error_notes"
    ):
        dj.VirtualStrategy(2).run(step, args=(np.ones(2),))


def test_an_array_on_more_devices_than_the_replicas_of_a_compiled_function(mirrored):
    x = np.arange(8, dtype=np.float32)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("a",))
    split = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a")))
    with mirrored.scope():
        w = dj.Variable(np.zeros(8, np.float32), aggregation=dj.VariableAggregation.MEAN)

    def add(x):
        return mirrored.run(w.assign_add, args=(x,))

    dj.jit(add)(split)  # moved, as `run` moves it
    plus_one = dj.jit(lambda x: mirrored.run(lambda x: x + 1, args=(x,)))
    np.testing.assert_array_equal(plus_one(split), x + 1)
    add(split)
    dj.jit(add)(mirrored.extended.broadcast_to(split))
    np.testing.assert_array_equal(w.value, 3 * x)


def test_variables_and_runs_of_two_sets_of_devices(mirrored):
    """As it says: a `dj.jit` for each, and the value of a variable as an argument."""
    away, x = dj.MirroredStrategy(jax.devices()[6:]), jnp.ones(3)
    with mirrored.scope():
        v = dj.Variable(jnp.ones(3))
    with away.scope():
        w = dj.Variable(jnp.ones(3))
    add = lambda x, y: mirrored.run(lambda: v.value + x + y)
    virtual = dj.VirtualStrategy(2)
    wrong = [
        lambda x: add(x, 0) + w.value,
        lambda x: (add(x, 0), away.run(lambda: w.value)),
        lambda x: (add(x, 0), virtual.run(jnp.negative, args=(x,))),
    ]
    for step in wrong:
        message = (
            r"(?s)needs all its variables, and all strategies that it runs.*"
            r"argument read\[0\] of .*a dj\.jit for each"
        )
        with pytest.raises(LocalityError, match=message):
            dj.jit(step)(x)
    assert dj.jit(add)(x, np.asarray(w.value)).tolist() == [3] * 3
    assert dj.jit(lambda x: virtual.run(jnp.negative, args=(x,)))(x).tolist() == [-1] * 3
