"""Workers of several devices: each is a sync group, whose replicas push once, as one."""

import random
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import distjax as dj
from distjax._src.servers.engine import Attempt, Task, WorkerDied
from distjax._src.servers.plan import OnceEach
from distjax._src.servers.server import Answer, Server
from distjax._src.typing import VariableAggregation, VariableSynchronization
from tests.faults.four_parts import is_explained
from tests.servers.replay import Record
from tests.servers.serial import SerialStrategy

ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))


def groups(count, size):
    """Returns the devices of so many workers."""
    return [jax.devices()[i * size : (i + 1) * size] for i in range(count)]


class Training:
    """A linear regression with a metric, and a total to which each replica adds."""

    def __init__(self, strategy, tx=ADAM, **options):
        self.strategy = strategy
        with strategy.scope():
            self.w = dj.Variable(jnp.zeros(3), name="w")
            self.b = dj.Variable(jnp.zeros(()), name="b")
            self.seen = dj.Variable(
                0,
                name="seen",
                synchronization=VariableSynchronization.ON_READ,
                aggregation=VariableAggregation.SUM,
            )
            self.loss = dj.metrics.Mean()
            self.optimizer = dj.optim.Optimizer(tx, "mean", **options)
            self.optimizer.init([self.w, self.b])

    def step(self, x, y):
        loss_fn = lambda w, b: jnp.mean((x @ w + b - y) ** 2)
        loss, grads = jax.value_and_grad(loss_fn, argnums=(0, 1))(self.w.value, self.b.value)
        self.optimizer.apply_gradients(zip(grads, (self.w, self.b), strict=True))
        self.loss.update(loss)
        self.seen.assign_add(x.shape[0])
        return {"loss": loss, "mean": dj.get_replica_context().all_reduce("mean", loss)}

    def run(self, count):
        batches = [self.strategy.per_replica(batch) for batch in self.batches(count)]
        outs = [self.strategy.run(self.step, args=batch) for batch in batches]
        return jax.tree.map(np.asarray, jax.tree.leaves((outs, self.state())))

    def batches(self, count):
        rng = np.random.default_rng(0)
        for _ in range(count):
            x = rng.normal(size=(self.strategy.num_replicas_in_sync, 4, 3)).astype(np.float32)
            yield x, x @ np.array([1.0, -2.0, 0.5], np.float32) + 3

    def state(self):
        kept = jax.tree.leaves(self.optimizer.kept_variables())
        return [v.value for v in (self.w, self.b, self.seen, *kept)], self.loss.result()


@pytest.mark.parametrize(
    "size, servers, tx, options",
    [
        pytest.param(2, 1, ADAM, {}, marks=pytest.mark.drill),
        pytest.param(4, 1, optax.sgd(0.1), {}, marks=pytest.mark.drill),
        (3, 2, ADAM, {}),
        (2, 2, optax.adam(0.1), {"accumulate_steps": 3}),
    ],
)
def test_one_worker_equals_a_mirrored_strategy(size, servers, tx, options):
    expected = Training(dj.MirroredStrategy(jax.devices()[:size]), tx, **options).run(6)
    for cut in ("least_bytes", "arguments"):
        workers = groups(1, size)
        strategy = dj.ParameterServerStrategy(workers, servers, cut=cut)
        found = Training(strategy, tx, **options).run(6)
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)
        if cut == "arguments" and servers == 1:  # but for totals of a metric: another order
            for x, y in zip(found[:-1], expected[:-1], strict=True):
                np.testing.assert_array_equal(x, y)


def test_gradients_are_reduced_before_they_travel():
    for cut, rows in (("least_bytes", 1), ("arguments", 2)):
        strategy = SerialStrategy(2, workers=groups(2, 2), cut=cut)
        training = Training(strategy)
        training.run(3)
        # Clipping by the global norm is done at the worker, or takes all gradients at each server.
        gradients = 4 * (3 + 1) if cut == "least_bytes" else 2 * rows * 4 * (3 + 1)
        sent = gradients + 4 + 4 + 4  # what was seen; a sum and a count of the metric
        engine = strategy.engine
        assert (engine.pushed, engine.answered) == (3 * sent, 0)
        assert engine.trips == engine.closures == 3
        batch = strategy.per_replica(next(training.batches(1)))
        described = dj.explain(training.step, *batch, strategy=strategy).cut
        assert (described.pulled_bytes, described.pushed_bytes) == (16, sent)
        assert described.num_round_trips == 1
        assert "psum" in described.parts[0].operations


def test_replicas_meet_in_the_group():
    strategy = dj.ParameterServerStrategy(groups(2, 3), axis_name="batch")
    with strategy.scope():
        v = dj.Variable(jnp.arange(3.0), name="v")
        last = dj.Variable(0.0, name="last", aggregation=VariableAggregation.ONLY_FIRST_REPLICA)
        mean = dj.Variable(0.0, name="mean", aggregation=VariableAggregation.MEAN)

    def local(strategy, x):  # meets no variable: it stays at the worker
        return strategy.reduce("sum", x), x.map(lambda row: row + 1)

    def at_server(strategy, x):
        v.assign_add(strategy.gather(x[None], 0) if not dj.is_per_replica(x) else gathered(x))
        return x.map(lambda row: row * v.value[0])

    gathered = lambda x: strategy.gather(x.map(lambda row: row[None]), 0)

    def step(x, y):
        context = dj.get_replica_context()
        assert context.num_replicas_in_sync == strategy.num_replicas_in_sync == 3
        total, own = context.merge_call(local, args=(x,))
        answer = context.merge_call(at_server, args=(own,))
        last.assign(x)
        mean.assign_add(x)
        number = context.replica_id_in_sync_group
        neighbor = lax.ppermute(x, "batch", [(0, 1), (1, 2), (2, 0)])
        same = lax.psum(x, "batch") + context.all_reduce("sum", y)
        return {"a": total, "b": answer, "c": number, "d": neighbor, "e": same, "f": y}

    x = strategy.per_replica(np.array([10.0, 20.0, 40.0], np.float32))
    with dj.Coordinator(strategy) as coordinator:
        fetched = coordinator.schedule(step, args=(x, 2.0)).fetch()
    found = {key: np.asarray(getattr(value, "stacked", value)) for key, value in fetched.items()}
    expected = {"a": 70.0, "b": [121, 231, 451], "c": [0, 1, 2], "d": [40, 10, 20]}
    for key, value in {**expected, "e": 76.0, "f": 2.0}.items():
        np.testing.assert_array_equal(found[key], value)
        assert dj.is_per_replica(fetched[key]) == isinstance(value, list)
    np.testing.assert_array_equal(v.value, [11.0, 22.0, 43.0])
    assert (float(last.value), float(mean.value)) == (10.0, np.float32(70 / 3))
    assert strategy.reduce("sum", strategy.run(lambda x: x + v.value[0], args=(x,))) == 103.0


class History:
    """The values of one server, version by version, as servers of a worker that runs again."""

    def __init__(self, values):
        self.values, self.server, self.pulled = [values], Server(0, jax.devices()[0]), 0

    def compile(self, wanted, pushes):
        pass

    def pull(self, wanted):
        return {0: (self.pulled, [self.values[self.pulled][key] for key in wanted[0]])}

    def push(self, stage, sent):
        ((push, arrays, _),) = sent
        now = self.values[-1]
        operands = jax.device_put(list(arrays), jax.devices()[0])
        values = [jnp.copy(now[k]) for k in push.takes]
        outs, token = self.server.compile(push).run(values + operands)
        self.values.append({**now, **dict(zip(push.writes, outs, strict=False))})
        return [Answer(len(self.values) - 1, outs[len(push.writes) :], token)]


@pytest.mark.parametrize("seed", range(3))
def test_asynchronous_groups_equal_their_replay_while_workers_die(seed):
    rng, lock = random.Random(seed), threading.Lock()

    def fault(point, worker, closure):
        with lock:
            if point != "server" and rng.random() < 0.15:
                raise WorkerDied(point)

    engine = dj.servers.ThreadEngine(fault=fault)
    engine.max_failures = 100
    strategy = dj.ParameterServerStrategy(groups(4, 2), engine=engine)
    training = Training(strategy)
    (server,) = strategy.servers
    history, before = History(server.snapshot().values), server.version
    record = Record(strategy.servers)
    batches = [strategy.per_replica(batch) for batch in training.batches(25)]
    with dj.Coordinator(strategy) as coordinator:
        numbers = [coordinator.schedule(training.step, b)._closure.number for b in batches]
        coordinator.join(240)
        assert coordinator.stats()["closures"]["retried"] > 0
    assert int(training.seen.value) == 25 * 2 * 4  # each row of each closure once

    of_closure = dict(zip(numbers, batches, strict=True))
    home, compiled = engine._homes[0], OnceEach()
    for version in range(before + 1, server.version + 1):
        closure = record.applied[0][version]
        plan, arrays = strategy.cut_step(training.step, of_closure[closure], None)
        task = Task(closure, plan, arrays)
        again = Attempt(task, history, home, compiled)
        history.pulled = record.pulled[closure][0] - before
        assert len(list(again.run())) == 1
    final = server.snapshot().values
    assert len(history.values) == 26
    for key, value in history.values[-1].items():
        np.testing.assert_array_equal(value, final[key])


def test_data_are_split_over_the_group():
    strategy = dj.ParameterServerStrategy(groups(2, 2))
    with strategy.scope():
        total = dj.Variable(jnp.zeros(2), name="total", aggregation=VariableAggregation.SUM)
    shapes = set()

    def step(x):
        shapes.add(x.shape)
        total.assign_add(x.sum(0))

    def elements(context):
        assert context.get_per_replica_batch_size(4) == 2
        rows = np.arange(32.0, dtype=np.float32).reshape(16, 2)[context.input_pipeline_id :: 2]
        return strategy.distribute_dataset(list(rows.reshape(2, 4, 2)))

    with dj.Coordinator(strategy) as coordinator:
        iterator = iter(coordinator.create_per_worker_dataset(elements))
        for _ in range(4):
            coordinator.schedule(step, args=(iterator,))
        coordinator.join()
        for element in strategy.distribute_dataset([np.ones((4, 2), np.float32)] * 2):
            coordinator.schedule(step, args=(element,))
    np.testing.assert_array_equal(total.value, [240.0 + 8, 256.0 + 8])
    assert shapes == {(2, 2)}


def test_workers_that_share_devices_do_not_wait_for_each_other_for_ever():
    """Their programs come to all devices in one order."""
    d = jax.devices()
    strategy = dj.ParameterServerStrategy([[d[0], d[1]], [d[1], d[0]], [d[1], d[2]]], 2)
    training = Training(strategy)
    (batch,) = map(strategy.per_replica, training.batches(1))
    with dj.Coordinator(strategy) as coordinator:
        coordinator.add_workers(2)
        for _ in range(60):
            coordinator.schedule(training.step, batch)
        coordinator.join(240)
    assert int(training.seen.value) == 60 * 2 * 4


def test_what_groups_refuse():
    strategy = dj.ParameterServerStrategy(groups(2, 2))
    with strategy.scope():
        v = dj.Variable(jnp.zeros(()), name="v")
        summed = dj.Variable(0.0, name="s", aggregation=VariableAggregation.SUM)
    other = dj.MirroredStrategy(jax.devices()[:2]).per_replica(np.ones((2, 3), np.float32))
    calls = [
        (dj.errors.AggregationError, "specify an aggregation", lambda: v.assign_add(1.0), ()),
        (ValueError, "aggregation SUM needs an array", lambda: summed.assign_add(1.0), ()),
        (
            dj.errors.LocalityError,
            "lambda> needs a PerReplica over 2",
            lambda x: x,
            (other,),
        ),
    ]
    for kind, text, fn, args in calls:
        with pytest.raises(kind, match=text) as caught:
            strategy.run(fn, args=args)
        assert is_explained(caught.value)
    with strategy.scope(), pytest.raises(ValueError, match="floating dtype for aggregation MEAN"):
        dj.Variable(0, name="m", aggregation=VariableAggregation.MEAN)


def test_a_mean_that_is_summed_over_a_group_is_told():
    strategy = dj.ParameterServerStrategy(groups(1, 2))
    with strategy.scope():
        w = dj.Variable(jnp.zeros(3), name="w")
        optimizer = dj.optim.Optimizer(optax.sgd(0.1))
        optimizer.init([w])

    def step(x):
        optimizer.apply_gradients([(jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w.value), w)])

    with pytest.warns(dj.errors.ReductionWarning, match="a mean over each replica's batch"):
        strategy.run(step, args=(strategy.per_replica(np.ones((2, 4, 3), np.float32)),))
