"""The law of the fresh push: once a worker has pulled, neither it nor a server compiles for it.

A worker that pulled first and compiled then would push gradients, and whole values, that are as
many versions old as the others push in that time.
"""

import contextlib
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import distjax as dj
from distjax._src.context.frames import ProgramModes
from distjax._src.placement.topology import REPLICA_AXIS, one_device_topology
from distjax._src.servers.coordinator import Coordinator
from distjax._src.servers.engine import ThreadEngine
from distjax._src.servers.on_ray import actors as wire
from distjax._src.servers.server import Server
from distjax._src.servers.storage import parts_of
from tests.servers.hand_made import HandMade, sgd
from tests.servers.test_random_steps import NUM_VARIABLES, actions, make_step

COMPILED = "/jax/core/compile/backend_compile_duration"


class Watch:
    """Counts what threads compile while what they have pulled gets old.

    Attributes:
      num_late: how many programs were compiled between a pull and the end of its closure.
      num_programs: how many in all.
    """

    def __init__(self):
        self.num_late = self.num_programs = 0
        self._has_pulled = threading.local()

    def at(self, point, worker, closure):
        """A fault function that does no harm."""
        self._has_pulled.value = True

    def end(self):
        self._has_pulled.value = False

    def hear(self, event, seconds, **about):
        is_transfer = "_multi_slice" in about.get(
            "fun_name", ""
        )  # of JAX's, a slice for each device
        if event == COMPILED and not is_transfer:
            self.num_programs += 1
            self.num_late += getattr(self._has_pulled, "value", False)


class WatchedEngine(ThreadEngine):
    def __init__(self, watch):
        super().__init__(fault=watch.at)
        self._watch = watch

    def run(self, worker, task):
        try:
            return super().run(worker, task)
        finally:
            self._watch.end()


@contextlib.contextmanager
def watching():
    watch = Watch()
    jax.monitoring.register_event_duration_secs_listener(watch.hear)
    try:
        yield watch
    finally:
        jax.monitoring.unregister_event_duration_listener(watch.hear)


@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    program=st.lists(actions, min_size=1, max_size=6),
    replicas=st.integers(1, 2),
    servers=st.integers(1, 3),
    shards=st.integers(1, 2),
    cut=st.sampled_from(["arguments", "least_bytes"]),
    bound=st.sampled_from([None, 1]),
    on_host=st.booleans(),
)
def test_nothing_is_compiled_after_a_pull(program, replicas, servers, shards, cut, bound, on_host):
    with watching() as watch:
        strategy = dj.ParameterServerStrategy(
            [jax.devices()[i : i + replicas] for i in (0, replicas)],
            servers,
            partitioner=dj.parts.FixedShards(shards),
            cut=cut,
            max_staleness=bound,
            engine=WatchedEngine(watch),
        )
        with strategy.scope():
            total = dj.VariableAggregation.SUM
            variables = [
                dj.Variable(jnp.arange(4.0) + i, aggregation=total) for i in range(NUM_VARIABLES)
            ]
            optimizer = dj.optim.Optimizer(optax.sgd(1.0, momentum=0.5))
            optimizer.init(variables)
        step = make_step(program, variables, optimizer)
        rows = strategy.per_replica(np.ones((replicas, 4), np.float32))
        with dj.Coordinator(strategy) as coordinator:
            for _ in range(6):
                coordinator.schedule(
                    step, (np.asarray(rows) if on_host and replicas == 1 else rows,)
                )
            coordinator.join()
    assert watch.num_programs > 0
    assert watch.num_late == 0


def test_a_watch_hears_what_is_compiled_late(monkeypatch):
    """Else the law above would hold for whatever is done."""
    strategy = HandMade(workers=1)
    strategy.engine.servers[0].create("w0", np.ones(5, np.float32))
    with watching() as watch, Coordinator(strategy) as coordinator:
        strategy.engine._fault = watch.at
        monkeypatch.setattr(Server, "compile_pull", lambda *args: None)
        coordinator.schedule(sgd(1), (np.float32(1),)).get()
        coordinator.join()
    assert watch.num_late > 0


def test_what_other_steps_read_makes_no_push_compile():
    """Such as the metrics that an evaluation reads, and a step of training only writes."""
    with watching() as watch:
        strategy = dj.ParameterServerStrategy(workers=1, engine=WatchedEngine(watch))
        with strategy.scope():
            w, metric = dj.Variable(jnp.arange(3.0)), dj.Variable(jnp.zeros(3))

        def step(x):
            w.assign_add(w.value * x)
            metric.assign_add(jnp.ones(3) * x)

        server, keys = strategy.engine.servers[0], [part_key(metric), part_key(w)]
        home = one_device_topology(server.device, 1, REPLICA_AXIS)
        with dj.Coordinator(strategy) as coordinator:
            coordinator.schedule(step, (np.float32(1),)).get()
            for read in (keys[:1], keys):  # an attempt of another closure
                held = server.pull(read, home)[1]
                before = [np.array(x) for x in held]
                coordinator.schedule(step, (np.float32(1),)).get()
                np.testing.assert_array_equal(before, held)
    assert watch.num_late == 0
    np.testing.assert_array_equal(w.value, np.arange(3.0) * 8)
    np.testing.assert_array_equal(metric.value, np.full(3, 3.0))


def part_key(variable):
    [part] = parts_of(variable)
    return part.key


def test_workers_of_one_device_compile_once():
    with watching() as watch:
        with Coordinator(HandMade(workers=1)) as coordinator:
            create(coordinator)
            coordinator.schedule(sgd(1), (np.float32(1),)).get()
        alone, watch.num_programs = watch.num_programs, 0
        strategy = HandMade(workers=4)
        strategy.engine._homes = strategy.engine._homes[:1]
        with Coordinator(strategy) as coordinator:
            create(coordinator)
            step = sgd(1)
            for _ in range(8):
                coordinator.schedule(step, (np.float32(1),))
            coordinator.join()
    assert 0 < watch.num_programs <= alone


def create(coordinator):
    coordinator._strategy.engine.servers[0].create("w0", np.ones(5, np.float32))


class Handle:
    """An actor of Ray's that is an object of this process, its calls watched."""

    def __init__(self, actor, watch):
        self._actor, self._watch = actor, watch

    def __getattr__(self, method):
        def remote(*args, **options):
            if method == "pull":
                self._watch.at("pull", 0, 0)
            return getattr(self._actor, method)(*args, **options)

        return types.SimpleNamespace(remote=remote)


@pytest.mark.parametrize("size", [3, 600])  # of which 600 x 600 numbers are placed on arrival
def test_ray_workers_compile_before_they_pull(size, monkeypatch):
    from distjax._src.servers.on_ray import actors

    # Not Ray itself: an engine imports it before anyone else.
    ray = types.SimpleNamespace(get=lambda call, timeout: call, exceptions=None)
    monkeypatch.setitem(sys.modules, "ray", ray)
    strategy = dj.ParameterServerStrategy(workers=1, servers=1)
    with strategy.scope():
        w, bias = dj.Variable(np.ones((size, size), np.float32)), dj.Variable(np.float32(0))

    def step(x):
        bias.assign_add(jnp.sum(x))
        w.assign(w.value * x + bias.value)
        return dj.get_replica_context().merge_call(lambda s: jnp.sum(w.value)) * x

    arrays = [np.arange(size, dtype=np.float32)]
    plan, _ = strategy.cut_step(step, arrays, None)
    shipped = wire.export_plan(plan, (1, "replica"), {"cpu"}, {"cpu"})
    with watching() as watch:
        server = actors.ServerActor(0)
        for key in plan.owners:
            [value] = wire.to_wire(strategy.servers[0].read([key])[1])
            server.ask("create", (key, value), None)
        worker = actors.WorkerActor(1, "replica")
        worker.set_servers([Handle(server, watch)])
        worker.add_plan(0, shipped)
        modes = ProgramModes.of_this_thread()
        for closure in range(3):
            done = worker.run(wire.Order(0, closure, arrays, modes))
            watch.end()
    assert isinstance(done, wire.Done)
    assert watch.num_programs > 0
    assert watch.num_late == 0
