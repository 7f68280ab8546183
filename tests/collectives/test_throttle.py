"""Programs in flight: bounded where JAX needs it, and never awaited elsewhere."""

import collections
import concurrent.futures
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax._src import jax_compat
from distjax._src.collectives import eager
from distjax._src.program import launch


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


def test_a_step_that_returns_a_constant(pair):
    """Whether a program has completed is asked of an array that it computes."""
    with pair.scope():
        w = dj.Variable(1.0)

    @dj.jit
    def step():
        w.assign(jnp.asarray(2.0))
        return 3.0, jnp.asarray(4.0)

    assert (float(step()[1]), float(w.value)) == (4, 2)


class Token:
    """An array that says whether it was awaited."""

    def __init__(self):
        self.awaited = False

    def block_until_ready(self):
        self.awaited = True

    def is_deleted(self):
        return False


@pytest.fixture
def in_flight(monkeypatch):
    """Nothing is in flight, and programs are throttled."""
    monkeypatch.setattr(eager, "is_throttled", lambda: True)
    monkeypatch.setattr(eager, "_in_flight", collections.deque())
    return eager._in_flight


def test_the_oldest_is_awaited_when_too_many_are_in_flight(in_flight):
    tokens = [Token() for _ in range(3 * eager.MAX_IN_FLIGHT)]
    for number, token in enumerate(tokens, start=1):
        eager.throttle(token)
        done = max(0, number - eager.MAX_IN_FLIGHT)
        assert [i for i, t in enumerate(tokens) if t.awaited] == list(range(done))
        assert len(in_flight) == number - done


def test_of_several_threads_each_awaits_another(in_flight):
    """So one more is in flight for each thread, at most."""
    tokens = [Token() for _ in range(eager.MAX_IN_FLIGHT + 4)]
    ends = threading.Event()
    for token in tokens[:4]:
        token.block_until_ready = lambda token=token: (
            ends.wait(60),
            Token.block_until_ready(token),
        )
    for token in tokens[: eager.MAX_IN_FLIGHT]:
        eager.throttle(token)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = [pool.submit(eager.throttle, t) for t in tokens[eager.MAX_IN_FLIGHT :]]
        assert not concurrent.futures.wait(waiting, timeout=0.2).done
        ends.set()
    assert [t.awaited for t in tokens[:5]] == [True] * 4 + [False]


def test_a_program_that_has_failed_stops_no_later_one(in_flight):
    tokens = [Token() for _ in range(eager.MAX_IN_FLIGHT + 2)]

    def fail():
        raise jax.errors.JaxRuntimeError("told to who reads its results")

    tokens[0].block_until_ready = fail
    for token in tokens:
        eager.throttle(token)
    assert [i for i, t in enumerate(tokens) if t.awaited] == [1]


def test_a_signal_handler_may_launch_while_one_is_awaited(in_flight):
    """It runs in the thread that waits."""
    tokens, later = ([Token() for _ in range(eager.MAX_IN_FLIGHT + 1)] for _ in range(2))
    handlers = [lambda: [eager.throttle(token) for token in later]]
    tokens[0].block_until_ready = lambda: handlers and handlers.pop()()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        pool.submit(lambda: [eager.throttle(token) for token in tokens]).result(60)
    assert len(in_flight) == eager.MAX_IN_FLIGHT


@pytest.mark.parametrize("num_gone", [3, eager.MAX_IN_FLIGHT])
def test_a_result_that_is_donated_since_tells_nothing(in_flight, num_gone):
    """Then what came after it does."""
    tokens = [Token() for _ in range(eager.MAX_IN_FLIGHT + 1)]
    for token in tokens[:num_gone]:
        token.is_deleted = lambda: True
    for token in tokens:
        eager.throttle(token)
    assert [i for i, t in enumerate(tokens) if t.awaited] == [num_gone]


def test_results_that_are_donated_keep_the_bound(mirrored):
    """By a program of the user's own, which knows of no bound."""
    use = jax.jit(lambda x: (x * 2, x.sum()), donate_argnums=0)
    step = lambda x: mirrored.run(lambda x: jax.lax.pmean(x, "replica"), args=(x,))
    x = mirrored.per_replica(np.ones((2, 4), np.float32))
    ends = [use(step(x))[1] for _ in range(100)]
    assert [float(end) for end in ends] == [4.0] * 100


def test_nothing_is_recorded_without_a_token_or_in_a_trace(in_flight):
    eager.throttle(None)
    jax.jit(lambda x: (eager.throttle(x), x)[1])(1.0)
    assert not in_flight


def test_where_programs_are_throttled():
    assert eager.is_throttled() == jax_compat.CPU_COLLECTIVES_NEED_THROTTLE
    assert eager.is_throttled() == (jax_compat.JAX_VERSION < (0, 12))


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
@pytest.mark.parametrize("writes", [False, True])
def test_only_programs_on_several_devices_are_counted(count, is_compiled, writes, monkeypatch):
    strategy = dj.MirroredStrategy(jax.devices()[:count])
    with strategy.scope():
        v = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)
    x = strategy.distribute_values_from_function(lambda ctx: np.float32(1))
    step = lambda x: strategy.run(lambda x: v.assign_add(x) if writes else x + 1, args=(x,))
    step = dj.jit(step) if is_compiled else step
    seen = []
    monkeypatch.setattr(launch, "throttle", seen.append)
    step(x)
    assert len(seen) == (1 if count > 1 and eager.is_throttled() else 0)


@pytest.mark.parametrize("writes", [False, True])
def test_a_program_is_recorded_by_a_small_result(writes, monkeypatch):
    """In whatever tree the user gets it."""
    if not eager.is_throttled():
        pytest.skip("nothing is awaited there")
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        v = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)
    seen = []
    monkeypatch.setattr(launch, "throttle", seen.append)

    def step(x):
        loss = jax.lax.psum(x, "replica")
        return {"loss": (v.assign_add(x) if writes else x, [loss])}

    result = strategy.run(step, args=(jnp.float32(1),))
    assert len(seen) == 1 and any(seen[0] is leaf for leaf in jax.tree.leaves(result))
