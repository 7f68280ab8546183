"""Programs in flight: bounded where JAX needs it, and never awaited elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax import jax_compat
from distjax.collectives import eager, throttle
from distjax.program import calls


@pytest.mark.parametrize("how", ["run", "jit", "eager"])
def test_many_steps_that_nobody_awaits(how):
    """Before JAX 0.12 plain JAX hangs here, after about 50 steps."""
    strategy = dj.MirroredStrategy(jax.devices()[:8])
    with strategy.scope():
        w = dj.Variable(jnp.zeros(4), aggregation=dj.VariableAggregation.MEAN)
        r = dj.Variable(
            jnp.zeros(4),
            synchronization=dj.VariableSynchronization.ON_READ,
            aggregation=dj.VariableAggregation.SUM,
        )
    x = strategy.distribute_values_from_function(
        lambda ctx: np.full(4, ctx.replica_id_in_sync_group, np.float32)
    )

    def replica(x):
        w.assign_add(x)
        r.assign_add(x)
        return dj.get_replica_context().all_reduce("sum", x)

    steps = {
        "run": lambda: strategy.run(replica, args=(x,)),
        "jit": dj.jit(lambda: strategy.run(replica, args=(x,))),
        "eager": lambda: (strategy.reduce("sum", x), strategy.gather(x, 0), r.value)[0],
    }
    results = [steps[how]() for _ in range(300)]
    np.testing.assert_array_equal(results[-1], np.full(4, 28.0))
    if how != "eager":
        np.testing.assert_array_equal(w.value, np.full(4, 300 * 3.5))
        np.testing.assert_array_equal(r.value, np.full(4, 300 * 28.0))


class Token:
    """An array that says whether it was awaited."""

    def __init__(self):
        self.awaited = False

    def block_until_ready(self):
        self.awaited = True


@pytest.fixture
def empty_queue(monkeypatch):
    monkeypatch.setattr(throttle, "_in_flight", [])


def test_all_are_awaited_when_too_many_are_in_flight(empty_queue, monkeypatch):
    monkeypatch.setattr(throttle, "is_throttled", lambda: True)
    tokens = [Token() for _ in range(throttle.MAX_IN_FLIGHT + 2)]
    for token in tokens[: throttle.MAX_IN_FLIGHT - 1]:
        throttle.throttle(token)
    assert not any(t.awaited for t in tokens)
    for token in tokens[throttle.MAX_IN_FLIGHT - 1 :]:
        throttle.throttle(token)
    assert [t.awaited for t in tokens] == [True] * throttle.MAX_IN_FLIGHT + [False] * 2


def test_a_program_that_has_failed_stops_no_later_one(empty_queue, monkeypatch):
    monkeypatch.setattr(throttle, "is_throttled", lambda: True)
    tokens = [Token() for _ in range(2 * throttle.MAX_IN_FLIGHT)]

    def fail():
        raise jax.errors.JaxRuntimeError("told to who reads its results")

    tokens[3].block_until_ready = fail
    for token in tokens:
        throttle.throttle(token)
    assert [i for i, t in enumerate(tokens) if not t.awaited] == [3]
    assert not throttle._in_flight


def test_nothing_is_recorded_without_a_token_or_in_a_trace(empty_queue):
    throttle.throttle(None)
    jax.jit(lambda x: (throttle.throttle(x), x)[1])(1.0)
    assert not throttle._in_flight


def test_where_programs_are_throttled():
    assert throttle.is_throttled() == jax_compat.CPU_COLLECTIVES_NEED_THROTTLE
    assert throttle.is_throttled() == (jax_compat.JAX_VERSION < (0, 12))
    token = throttle.make_token()
    assert (token is not None) == throttle.is_throttled()


def test_compiled_once_per_function_and_static_values():
    traces = []

    def fn(arrays, factor):
        traces.append(factor)
        return arrays["x"] * factor

    for factor in (2, 3, 2, 3):
        assert float(eager.call_compiled(fn, {"x": jnp.float32(5)}, factor)) == 5 * factor
    assert traces == [2, 3]
    grad = jax.grad(lambda x: eager.call_compiled(fn, {"x": x}, 4))(1.0)
    assert float(grad) == 4  # in a trace it is part of it


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_only_programs_on_several_devices_are_counted(count, is_compiled):
    strategy = dj.MirroredStrategy(jax.devices()[:count])
    x = strategy.distribute_values_from_function(lambda ctx: np.float32(1))
    step = lambda x: strategy.run(lambda x: x + 1, args=(x,))
    step = dj.jit(step) if is_compiled else step
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "throttle", seen.append)
        step(x)
    assert len(seen) == (1 if count > 1 and throttle.is_throttled() else 0)
