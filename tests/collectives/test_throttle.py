"""Programs in flight: bounded where JAX needs it, and never awaited elsewhere."""

import concurrent.futures
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax import jax_compat
from distjax.collectives import eager
from distjax.program import launch


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


HALF = eager.MAX_IN_FLIGHT // 2


class Token:
    """An array that says whether it was awaited."""

    def __init__(self):
        self.awaited = False

    def block_until_ready(self):
        self.awaited = True

    def is_deleted(self):
        return False


def count_from_one():
    """Counts launches as `eager.count_launch` does, of which this one is the first."""
    return itertools.cycle((*range(1, HALF), 0)).__next__


@pytest.fixture
def launches(monkeypatch):
    """Nothing is in flight, and programs are throttled."""
    monkeypatch.setattr(eager, "is_throttled", lambda: True)
    monkeypatch.setattr(eager, "count_launch", count_from_one())
    monkeypatch.setattr(eager, "_older", [])
    monkeypatch.setattr(eager, "_newer", [])


@pytest.mark.parametrize("in_job", [False, True])
def test_the_older_half_is_awaited_when_too_many_are_in_flight(launches, monkeypatch, in_job):
    """In one process by its newest, in whose order the others end; in a job each of them."""
    monkeypatch.setattr(eager, "is_one_of_several", lambda: in_job)
    tokens = [Token() for _ in range(5 * HALF)]
    for number, token in enumerate(tokens, start=1):
        eager.throttle(token)
        done = max(0, number // HALF - 1) * HALF
        newest = range(HALF - 1, done, HALF)
        expected = list(range(done) if in_job else newest)
        assert [i for i, t in enumerate(tokens) if t.awaited] == expected
        assert number - done < eager.MAX_IN_FLIGHT
    assert done == 4 * HALF


def test_other_threads_launch_no_more_while_a_half_is_awaited(launches):
    tokens = [Token() for _ in range(2 * HALF + 4)]
    waits, ends = threading.Event(), threading.Event()
    tokens[HALF - 1].block_until_ready = lambda: (waits.set(), ends.wait(60))
    for token in tokens[: 2 * HALF - 1]:
        eager.throttle(token)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        awaiting = pool.submit(eager.throttle, tokens[2 * HALF - 1])
        assert waits.wait(60)
        others = [pool.submit(eager.throttle, token) for token in tokens[2 * HALF :]]
        assert not any(other.done() for other in (awaiting, *others))
        ends.set()
    assert all(other.done() for other in (awaiting, *others))


def test_programs_on_several_devices_end_in_the_order_of_their_launch():
    """What the guard builds on: the end of one tells the end of all before it."""
    if not eager.is_throttled():
        pytest.skip("nothing is awaited there")
    meshes = [jax.sharding.Mesh(devices, "r") for devices in (jax.devices()[:2], jax.devices())]

    def launch(mesh, size):
        spec = jax.sharding.PartitionSpec("r")
        step = lambda x: jax.lax.psum(jnp.linalg.matrix_power(x[0], 30), "r")[0, :1]
        mapped = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return jax.jit(mapped), jnp.ones((mesh.size, size, size)) / size

    programs = [launch(mesh, size) for mesh in meshes for size in (2, 300)]
    jax.block_until_ready([program(x) for program, x in programs])
    for _ in range(3):
        ends = [program(x) for program, x in (programs[1], programs[2], programs[3], programs[0])]
        for i in reversed(range(len(ends))):
            if ends[i].is_ready():
                assert all(end.is_ready() for end in ends[:i])
        ends[-1].block_until_ready()
        assert all(end.is_ready() for end in ends)


def test_a_program_that_has_failed_stops_no_later_one(launches):
    tokens = [Token() for _ in range(4 * HALF)]

    def fail():
        raise jax.errors.JaxRuntimeError("told to who reads its results")

    tokens[HALF - 1].block_until_ready = fail
    for token in tokens:
        eager.throttle(token)
    assert [i for i, t in enumerate(tokens) if t.awaited] == [2 * HALF - 1, 3 * HALF - 1]


def test_a_signal_handler_may_launch_while_a_half_is_awaited(launches):
    """It runs in the thread that waits."""
    tokens, later = [Token() for _ in range(2 * HALF)], [Token() for _ in range(HALF)]
    handlers = [lambda: [eager.throttle(token) for token in later]]
    tokens[HALF - 1].block_until_ready = lambda: handlers and handlers.pop()()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        pool.submit(lambda: [eager.throttle(token) for token in tokens]).result(60)
    assert not eager.awaiting


@pytest.mark.parametrize("in_job", [False, True])
def test_a_result_that_is_donated_since_tells_nothing(launches, monkeypatch, in_job):
    """Then the newer half is awaited as well."""
    monkeypatch.setattr(eager, "is_one_of_several", lambda: in_job)
    tokens = [Token() for _ in range(2 * HALF)]

    def refuse():
        raise RuntimeError("Array has been deleted")

    for token in tokens[:HALF]:
        token.block_until_ready, token.is_deleted = refuse, lambda: True
    for token in tokens:
        eager.throttle(token)
    awaited = [i for i, t in enumerate(tokens) if t.awaited]
    assert awaited == list(range(HALF if in_job else 2 * HALF - 1, 2 * HALF))


def test_results_that_are_donated_keep_the_bound(mirrored):
    """By a program of the user's own, which knows of no bound."""
    use = jax.jit(lambda x: (x * 2, x.sum()), donate_argnums=0)
    step = lambda x: mirrored.run(lambda x: jax.lax.pmean(x, "replica"), args=(x,))
    x = mirrored.per_replica(np.ones((2, 4), np.float32))
    ends = [use(step(x))[1] for _ in range(100)]
    assert [float(end) for end in ends] == [4.0] * 100


def test_nothing_is_counted_without_a_token_or_in_a_trace(launches):
    eager.throttle(None)
    jax.jit(lambda x: (eager.throttle(x), x)[1])(1.0)
    assert eager.count_launch() == 1


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
    monkeypatch.setattr(launch, "count_launch", lambda: seen.append(None) or 1)
    step(x)
    assert len(seen) == (1 if count > 1 and eager.is_throttled() else 0)


@pytest.mark.parametrize("writes", [False, True])
def test_each_half_is_recorded_by_its_last_program(writes, monkeypatch):
    """By a result if there is a small one, in whatever tree the user gets it."""
    if not eager.is_throttled():
        pytest.skip("nothing is awaited there")
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        v = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)
    recorded = []
    monkeypatch.setattr(launch, "count_launch", count_from_one())
    monkeypatch.setattr(
        launch, "record_completion", lambda end, launch: recorded.append((end, launch))
    )

    def step(x):
        loss = jax.lax.psum(x, "replica")
        return {"loss": (v.assign_add(x) if writes else x, [loss])}

    for number in range(1, 2 * HALF + 1):
        result = strategy.run(step, args=(jnp.float32(number),))
        assert len(recorded) == number // HALF
    ends = [end for end, launch in recorded if launch == 0]
    assert any(ends[-1] is leaf for leaf in jax.tree.leaves(result))
