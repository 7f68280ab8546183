"""Steps on processes of Ray's: the same results, exactly once, whoever is killed."""

import concurrent.futures
import gc

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import distjax as dj
from distjax._src.servers.on_ray.engine import Sent
from distjax._src.servers.server import RefusedPush
from distjax.errors import UnsupportedError
from tests.servers.ray.conftest import make_engine
from tests.servers.ray.kills import Counters, run_with_dead_servers, run_with_dead_workers
from tests.servers.test_groups import Training as GroupTraining
from tests.servers.test_groups import groups
from tests.servers.test_training import Training, batches, values_of

pytestmark = pytest.mark.xdist_group("ray")  # one cluster for all of them


@pytest.mark.drill
def test_a_process_runs_the_replicas_of_its_worker(cluster):
    strategy = dj.ParameterServerStrategy(groups(1, 2), engine=make_engine())
    assert strategy.describe().workers == (("device 0 of its process", "device 1 of its process"),)
    training = GroupTraining(strategy)
    found, expected = training.run(4), GroupTraining(dj.MirroredStrategy(groups(1, 2)[0])).run(4)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)
    with dj.Coordinator(strategy) as coordinator:
        for batch in training.batches(10):
            coordinator.schedule(training.step, strategy.per_replica(batch))
    assert int(training.seen.value) == 14 * 2 * 4


class Mixed:
    """A step with arrays of all kinds: keys, bfloat16, numbers of 64 bits, none."""

    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            self.key = dj.Variable(jax.random.key(3), name="key")
            self.half = dj.Variable(jnp.arange(4, dtype=jnp.bfloat16), name="half")
            self.count = dj.Variable(np.int8(1), name="count")

    def step(self, key, x):
        def merge(strategy, key, x):
            noise = jax.random.normal(self.key.value, (4,), jnp.bfloat16)
            self.half.assign_add(noise + x)
            self.key.assign(jax.random.fold_in(key, self.count.value))
            self.count.assign_add(jnp.int8(1))
            return noise, jax.random.split(self.key.value)

        drawn = jax.random.normal(self.key.value, (4,), jnp.bfloat16)
        return dj.get_replica_context().merge_call(merge, args=(key, x + drawn))

    def run(self):
        results = [
            self.strategy.run(self.step, args=(jax.random.key(i), np.ones(4, jnp.bfloat16)))
            for i in range(3)
        ]
        return jax.tree.map(as_bits, (results, self.half.value, self.key.value, self.count.value))


def as_bits(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(x)), str(jax.random.key_impl(x))
    return np.asarray(x).astype(np.float32), str(x.dtype)


def test_serial_closures_equal_one_device(served, bounded):
    """To the bit where the servers do all of a merge."""
    for strategy, tolerance in ((bounded, 0), (served, 1e-6)):
        there, alone = Training(strategy), Training(dj.OneDeviceStrategy())
        for batch in batches(5):
            loss = strategy.run(there.step, batch)
            assert abs(loss - alone.strategy.run(alone.step, batch)) <= tolerance
        for x, y in zip(values_of(there), values_of(alone), strict=True):
            np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)
        assert there.loss.result() == pytest.approx(float(alone.loss.result()), rel=1e-6)
    jax.tree.map(
        np.testing.assert_array_equal,
        Mixed(bounded).run(),
        Mixed(dj.OneDeviceStrategy()).run(),
    )


def test_numbers_of_64_bits_stay_so(served):
    with jax.enable_x64(True):
        with served.scope():
            v = dj.Variable(np.float64(1.0), name="v")
        third = served.run(lambda x: v.assign_add(x / 3), args=(np.float64(1.0),))
        assert (third.dtype, float(third)) == (np.float64, 1 + 1 / 3)
    assert v.value.dtype == np.float64 and float(v.value) == 1 + 1 / 3


@pytest.mark.drill
def test_closures_are_applied_once_whatever_processes_are_killed(served, coordinator):
    counters = Counters(served)
    before = coordinator.stats()
    _, killed = run_with_dead_workers(counters, coordinator, seed=0, num_kills=2)
    assert counters.values() == counters.expected
    stats = coordinator.stats()
    assert stats["closures"]["failed"] == before["closures"]["failed"]
    # One that died with nothing in hand, and was sent nothing since, is not known to be dead.
    unnoticed = {worker["pid"] for worker in stats["workers"]}.intersection(killed)
    assert num_restarts(stats) == num_restarts(before) + 2 - len(unnoticed)
    assert run_with_dead_servers(counters, coordinator, seed=0, num_kills=1) == [True]
    assert counters.values() == counters.expected
    assert [server.report().num_kept for server in served.servers] == [0, 0]


def num_restarts(stats):
    return sum(worker["restarts"] for worker in stats["workers"])


def test_a_bound_holds_with_killed_workers(bounded):
    counters = Counters(bounded)
    with dj.Coordinator(bounded) as coordinator:
        run_with_dead_workers(counters, coordinator, seed=1, num_kills=1)
        for value in [coordinator.schedule(counters.both, (jnp.int32(0),)) for _ in range(10)]:
            value.get()
        assert counters.values() == counters.expected
        assert max(coordinator.stats()["staleness"]) <= 1


@pytest.mark.drill
def test_threads_that_run_steps_without_a_coordinator_share_a_process(bounded):
    """Each pulls in one call and pushes in another: those of others may come in between."""
    counters = Counters(bounded)

    def run():
        return [int(bounded.run(lambda x: x + counters.near.assign_add(x) * 0, (i,))) for i in xs]

    xs = range(1, 11)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        found = [done.result() for done in [threads.submit(run) for _ in range(2)]]
    assert found == [[*xs]] * 2
    assert counters.values() == [2 * sum(xs), 0, 0]


def test_a_late_push_of_a_worker_that_was_given_up_is_refused(served, coordinator):
    counters = Counters(served)
    value = coordinator.schedule(counters.both, (jnp.int32(5),))
    value.get()
    assert [server.version for server in served.servers] != [0, 0]  # they know that it is over
    closure = value._closure
    task = type("Late", (), dict(closure=closure.number, arrays=[jnp.int32(5)]))
    task.plan, _ = served.cut_step(counters.both, (jnp.int32(5),), None)
    with pytest.raises(RefusedPush):
        Sent(served.engine, 0, task).ask("run")
    assert counters.values() == [5, 10, 0]


def test_checkpoints_go_to_a_mirrored_strategy_and_back(served, coordinator, checkpointer):
    there, mirrored = Training(served), Training(dj.MirroredStrategy(jax.devices()[:2]))
    for batch in batches(4):
        coordinator.schedule(there.step, batch)
    checkpointer.save(1, there.state)
    coordinator.join()
    assert dj.explain(there.step, *next(batches(1)), strategy=served).cut.num_round_trips == 1
    checkpointer.restore(mirrored.state, 1)
    for batch in batches(3, seed=1):
        mirrored.strategy.run(mirrored.step, batch)
    checkpointer.save(2, mirrored.state)
    checkpointer.restore(there.state, 2)
    for x, y in zip(values_of(there), values_of(mirrored), strict=True):
        np.testing.assert_array_equal(x, y)


def test_workers_come_and_go_and_draw_elements(served, coordinator):
    training = Training(served)

    def step(batch):
        return training.step(*batch)

    by_worker = lambda context: batches(4, context.input_pipeline_id)
    iterator = iter(coordinator.create_per_worker_dataset(by_worker, at="coordinator"))
    values = [coordinator.schedule(step, (iterator,)) for _ in range(3)]
    assert all(np.isfinite(value.fetch()) for value in values)
    (new,) = coordinator.add_workers()
    coordinator._board.waiters.wait_until(lambda: served.engine.find(new).info)
    processes = {w["id"]: w["pid"] for w in coordinator.stats()["workers"]}
    processes |= {f"server {s['id']}": s["pid"] for s in coordinator.stats()["servers"]}
    children = {p.pid for p in psutil.Process().children(recursive=True)}
    assert len(set(processes.values())) == 5 and set(processes.values()) <= children
    coordinator.remove_workers([new])
    assert ended([processes[new]])
    snapshot = coordinator.snapshot()
    coordinator.schedule(training.step, next(batches(1))).get()
    assert coordinator.restore() == snapshot.closures
    assert coordinator.stats()["versions"] == list(snapshot.versions)


def ended(pids):
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return not psutil.wait_procs(processes, timeout=30)[1]


@pytest.mark.parametrize("call", [jax.debug.print, jax.pure_callback, jax.experimental.io_callback])
def test_callbacks_are_refused_when_they_are_scheduled(served, coordinator, call):
    args = ("{}",) if call is jax.debug.print else (np.sin, jax.ShapeDtypeStruct((), np.float32))
    counters = Counters(served)

    def step(x):
        called = call(*args, x * 1.0)
        counters.near.assign_add(x)
        return called

    scheduled = coordinator.stats()["closures"]["scheduled"]
    with pytest.raises(UnsupportedError, match="step needs programs that run in other proc"):
        coordinator.schedule(step, (jnp.int32(1),))
    assert coordinator.stats()["closures"]["scheduled"] == scheduled
    assert counters.values() == [0, 0, 0]


def test_a_step_returns_values_of_variables(served, coordinator):
    """Small ones arrive at a worker as arrays of the host."""
    with served.scope():
        variables = [dj.Variable(jnp.full(size, 2.0)) for size in (1, 1_000_000)]
    found = coordinator.schedule(lambda: [v.value for v in variables]).fetch()
    for v, value in zip(variables, found, strict=True):
        np.testing.assert_array_equal(v.value, value)


def test_nothing_is_kept_of_what_is_over(served, coordinator, collect_garbage):
    counters = Counters(served)

    def num_alive():
        collect_garbage()
        return sum(type(x).__name__ in ("Sent", "ObjectRef", "Closure") for x in gc.get_objects())

    coordinator.schedule(counters.both, (jnp.int32(1),)).get()
    coordinator.join()
    alive = num_alive()
    for _ in range(60):
        coordinator.schedule(counters.both, (jnp.int32(1),))
    coordinator.join()
    assert num_alive() <= alive + 2  # a worker waits for the next one with the last in hand
    assert [server.report().num_kept for server in served.servers] == [0, 0]


def test_values_are_written_and_added_together(served):
    server, values = served.servers[0], {"x": jnp.arange(3.0), "y": jnp.arange(3)}
    for key, value in values.items():
        server.create(key, 0 * value)
    version = server.version
    assert server.write(values) == version + 1
    assert server.add(values) == version + 2
    read_at, read = server.read(["x", "y"])
    assert read_at == version + 2
    for value, found in zip(values.values(), read, strict=True):
        np.testing.assert_array_equal(found, 2 * value)
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match="inf"):
        server.add({"x": jnp.full(3, jnp.inf)})
    server.remove(values)


def test_servers_forget_variables_that_are_gone(served, coordinator):
    server = served.servers[0]
    server.create("gone", np.ones(256, np.float32))
    nbytes = server.report().nbytes
    server.remove(["gone"])
    assert server.report().nbytes == nbytes - 1024


def test_processes_end_with_their_strategy(cluster, collect_garbage):
    strategy = dj.ParameterServerStrategy(workers=1, engine=make_engine())
    assert strategy.run(lambda: jnp.float32(2)) == 2
    pids = [strategy.engine.pid_of(0), strategy.servers[0].pid]
    with pytest.raises(ValueError, match="a RayEngine that another strategy has"):
        dj.ParameterServerStrategy(workers=1, engine=strategy.engine)
    assert all(map(psutil.pid_exists, pids))
    del strategy
    collect_garbage()
    assert ended(pids)


def test_what_jax_checks_goes_with_a_closure(coordinator, served):
    with served.scope():
        v = dj.Variable(jnp.ones(3), name="v")

    def step(x):
        at_server = lambda strategy, x: strategy.extended.update(
            v, lambda v, x: v.assign(jnp.log(x) + v.value), args=(x,)
        )
        dj.get_replica_context().merge_call(at_server, args=(x,))

    with jax.debug_nans(True):
        coordinator.schedule(step, args=(np.float32(-1),))
    with pytest.raises(FloatingPointError):
        coordinator.join()
    np.testing.assert_array_equal(v.value, np.ones(3))
    coordinator.schedule(step, args=(np.float32(-1),))
    coordinator.join()
    assert np.isnan(v.value).all()
