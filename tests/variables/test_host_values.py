"""Writes of host values: one transfer, no program, and nothing read back that nobody asked for."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import distjax as dj
from distjax._src.variables import variable

ON_READ, SUM = dj.VariableSynchronization.ON_READ, dj.VariableAggregation.SUM
MEAN = dj.VariableAggregation.MEAN


@pytest.fixture
def strategy():
    return dj.MirroredStrategy(jax.devices()[:4])


@pytest.fixture
def programs(monkeypatch):
    """The names of what the variables' eager code has run on devices."""
    seen = []

    def watch(owner, name):
        real = getattr(owner, name)
        told = lambda *args, **kwargs: (seen.append(name), real(*args, **kwargs))[1]
        monkeypatch.setattr(owner, name, told)

    for owner, name in [
        (variable, "call_compiled"),
        (variable, "_split_on_devices"),
        (jnp, "copy"),
        (jnp, "asarray"),
        (jnp, "broadcast_to"),
        (jax, "device_put"),
    ]:
        watch(owner, name)
    return seen


@pytest.mark.parametrize("value", [0.25, np.float32(0.25), np.array(0.25), [0.25]])
def test_a_number_goes_straight_to_where_the_variable_lives(strategy, programs, value):
    with strategy.scope():
        rate = dj.Variable(np.zeros(np.shape(value), np.float32))
    programs.clear()
    new = rate.assign(value)
    assert programs == []
    assert new.sharding == strategy.extended.topology.mirrored
    assert new.dtype == jnp.float32 and not new.weak_type
    np.testing.assert_array_equal(new, np.full(np.shape(value), 0.25))


def test_a_reset_runs_no_program(strategy, programs):
    with strategy.scope():
        mean = dj.metrics.Mean()
    strategy.run(mean.update, args=(jnp.ones(3),))
    programs.clear()
    mean.reset()
    assert programs == []
    assert float(mean.result()) == 0.0
    assert "call_compiled" in programs, "the watch sees reads"


def test_an_assignment_still_returns_what_a_read_gives(strategy):
    with strategy.scope():
        total = dj.Variable(np.int32(0), synchronization=ON_READ, aggregation=SUM)
        mean = dj.Variable(np.zeros(2, np.float32), synchronization=ON_READ, aggregation=MEAN)
    assert int(total.assign(7)) == 7
    assert [int(x) for x in total.local_results()] == [2, 2, 2, 1]
    with jax.numpy_rank_promotion("raise"):
        np.testing.assert_array_equal(mean.assign([1.0, 2.0]), [1, 2])
        np.testing.assert_array_equal(mean.assign_add(np.ones(2)), [2, 3])


@pytest.mark.parametrize("number", [-7, 0, 1, 100])
@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.float16, ml_dtypes.bfloat16, np.float32])
def test_the_host_splits_a_total_as_the_devices_do(strategy, dtype, number):
    total = np.array([number, 3]).astype(dtype)
    with strategy.scope():
        v = dj.Variable(np.zeros(2, dtype), synchronization=ON_READ, aggregation=SUM)
    v.assign(jnp.asarray(total))
    wanted = v.local_results()
    v.assign(total)
    for ours, theirs in zip(v.local_results(), wanted, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


def test_the_memory_of_an_assigned_array_stays_the_users(strategy):
    """On CPU an array of JAX may lie in numpy's memory, and a step donates the variable's."""
    memory = np.zeros(2**16 + 16, np.float32)
    first = -memory.__array_interface__["data"][0] % 64 // 4
    buffer = memory[first : first + 2**16]  # aligned, as XLA wants it
    with strategy.scope():
        v = dj.Variable(np.zeros(2**16, np.float32))
    add_one = dj.jit(lambda: v.assign_add(jnp.ones(2**16)))
    v.assign(buffer)
    buffer[:] = 5
    add_one()
    add_one()
    for copy in v.local_results():
        np.testing.assert_array_equal(copy, np.full(2**16, 2))
    np.testing.assert_array_equal(buffer, np.full(2**16, 5))


# -- arrays of more bits --------------------------------------------------------


@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
@pytest.mark.parametrize("where", ["across", "in a replica", "in update"])
def test_an_array_of_more_bits_is_not_rounded_in_silence(method, where):
    strategy = dj.VirtualStrategy(2)
    with strategy.scope():
        narrow, wide, count = (
            dj.Variable(jnp.ones(2, dtype), name="v", aggregation=dj.VariableAggregation.MEAN)
            for dtype in (jnp.bfloat16, jnp.float32, jnp.float16)
        )

    def write(v, x):
        if where == "across":
            getattr(v, method)(x)
        elif where == "in update":
            strategy.extended.update(v, lambda v, x: getattr(v, method)(x), args=(x,))
        else:
            strategy.run(lambda x: (getattr(v, method)(x), None)[1], args=(x,))

    for v, x in ((narrow, jnp.ones(2)), (count, jnp.ones(2)), (count, jnp.ones(2, jnp.bfloat16))):
        with pytest.raises(TypeError) as raised:
            write(v, x)
        text = str(raised.value)
        assert text.startswith(
            f"{method} of variable 'v' needs a value of dtype {v.dtype}.\n  Got:"
        )
        cured = text.split("Fix: ")[1].splitlines()[0]
        assert cured == f"v.{method}(jnp.asarray(x).astype(v.dtype))"
        write(v, x.astype(v.dtype))
    exact = [jnp.ones(2, jnp.int8), jnp.ones(2, jnp.bfloat16)]
    if where != "in a replica":  # there an argument is a JAX array, whatever it was
        exact += [np.ones(2), np.ones(2, np.float32)]
    for x in exact:
        write(narrow, x)
    write(wide, jnp.ones(2, jnp.bfloat16))
    assert dj.Variable(jnp.ones(2), dtype=jnp.bfloat16).dtype == jnp.bfloat16  # as asked for


def test_integers_of_more_bits_do_not_wrap_around_in_silence():
    v = dj.Variable(jnp.zeros((), jnp.int8), name="v")
    with pytest.raises(TypeError, match="assign of variable 'v' needs a value of dtype int8"):
        v.assign(jnp.int32(300))
    with pytest.raises(OverflowError):
        v.assign(np.int32(300))
    v.assign(np.int32(30))
    assert int(v.value) == 30


def test_optimizers_and_metrics_round_on_purpose():
    strategy = dj.VirtualStrategy(2)
    with strategy.scope():
        w = dj.Variable(jnp.ones(2, jnp.bfloat16))
        optimizer = dj.optim.Optimizer(optax.adam(0.1))
        optimizer.init([w])
    strategy.run(lambda: optimizer.apply_gradients([(jnp.ones(2, jnp.float32), w)]))
    np.testing.assert_allclose(np.asarray(w.value, np.float32), 0.9, rtol=0.01)
    assert {v.dtype for v in (w, *optimizer.state[0].mu)} == {jnp.dtype(jnp.bfloat16)}
