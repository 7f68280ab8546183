"""Unmodified steps on workers as threads: optimizers, metrics, checkpoints, evaluation."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distjax as dj

TRUE = np.array([1.0, -2.0, 0.5], np.float32)


class Training:
    """A linear regression, on any strategy."""

    def __init__(self, strategy, **options):
        self.strategy = strategy
        with strategy.scope():
            self.w = dj.Variable(jnp.zeros(3), name="w")
            self.b = dj.Variable(jnp.zeros(()), name="b")
            transformation = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
            self.optimizer = dj.optim.Optimizer(transformation, **options)
            self.optimizer.init([self.w, self.b])
            self.loss = dj.metrics.Mean()
        self.state = {"w": self.w, "b": self.b, "optimizer": self.optimizer}

    def step(self, x, y):
        def loss_fn(w, b):
            return jnp.mean((x @ w + b - y) ** 2)

        loss, grads = jax.value_and_grad(loss_fn, argnums=(0, 1))(self.w.value, self.b.value)
        self.optimizer.apply_gradients(zip(grads, (self.w, self.b), strict=True))
        self.loss.update(loss)
        return loss

    def evaluate(self, x, y):
        return jnp.mean((x @ self.w.value + self.b.value - y) ** 2)


def batches(count, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        x = rng.normal(size=(8, 3)).astype(np.float32)
        yield x, x @ TRUE + 3


def values_of(training):
    leaves = jax.tree.leaves(training.optimizer.kept_variables())
    return [np.asarray(v.value) for v in (training.w, training.b, *leaves)]


@pytest.mark.parametrize("num_servers", [1, 2])
def test_serial_closures_equal_one_device(num_servers):
    """To the bit with one server; the norm of several is computed in other programs."""
    served = Training(dj.ParameterServerStrategy(workers=2, servers=num_servers, cut="arguments"))
    alone = Training(dj.OneDeviceStrategy())
    for batch in batches(5):
        served.strategy.run(served.step, batch)
    with dj.Coordinator(served.strategy) as coordinator:
        for batch in batches(5, seed=1):
            coordinator.schedule(served.step, batch).get()
    for batch in (*batches(5), *batches(5, seed=1)):
        alone.strategy.run(alone.step, batch)
    tolerance = 0 if num_servers == 1 else 1e-5
    for a, b in zip(values_of(served), values_of(alone), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance)
    np.testing.assert_allclose(served.loss.result(), alone.loss.result(), rtol=tolerance)


@pytest.mark.api_row("asynchronous training")
def test_workers_together_learn_and_count_every_batch():
    training = Training(dj.ParameterServerStrategy(workers=3, servers=2, max_staleness=4))
    with dj.Coordinator(training.strategy) as coordinator:
        values = [coordinator.schedule(training.step, batch) for batch in batches(300)]
        coordinator.join()
        stats = coordinator.stats()
        losses = coordinator.fetch(values)
        test = coordinator.schedule(training.evaluate, next(batches(1)))
        assert test.fetch() < 0.5 and test.version == tuple(stats["versions"])
    assert all(worker["closures"] for worker in stats["workers"])
    assert max(stats["staleness"]) <= 4
    np.testing.assert_allclose(training.loss.result(), np.mean(losses), rtol=1e-5)


def test_a_checkpoint_from_the_middle_is_one_cut(tmp_path):
    """One closure has pushed to the first server and not to the second when it is asked for."""
    let_go, arrived, at_servers = threading.Event(), threading.Event(), []

    def fault(point, worker, closure):
        at_servers.extend([closure] * (point == "server" and closure == 1))
        if len(at_servers) == 2 and closure == 1:
            arrived.set()
            let_go.wait()

    engine = dj.servers.ThreadEngine(fault=fault)
    strategy = dj.ParameterServerStrategy(workers=2, servers=2, engine=engine)
    with strategy.scope():
        a, b = (dj.Variable(0, name=name) for name in "ab")

    def step():
        a.assign_add(1)
        b.assign_add(1)

    pause_writers = strategy.extended.pause_writers
    strategy.extended.pause_writers = lambda: (let_go.set(), pause_writers())[1]
    with (
        dj.checkpoint.Checkpointer(tmp_path) as checkpointer,
        dj.Coordinator(strategy, queue_size=9) as coordinator,
    ):
        for _ in range(2):
            coordinator.schedule(step)
        arrived.wait()
        checkpointer.save(1, [a, b])
        let_go.set()
        first, second = checkpointer.restore([jax.ShapeDtypeStruct((), jnp.int32)] * 2)
    assert first == second > 0


def test_training_goes_on_elsewhere_and_comes_back(tmp_path):
    served = Training(dj.ParameterServerStrategy(workers=3, servers=2))
    mirrored = Training(dj.MirroredStrategy(jax.devices()[:2]))
    with (
        dj.checkpoint.Checkpointer(tmp_path) as checkpointer,
        dj.Coordinator(served.strategy) as coordinator,
    ):
        for batch in batches(10):
            coordinator.schedule(served.step, batch)
        checkpointer.save(1, served.state)
        coordinator.join()
        checkpointer.restore(mirrored.state)
        for batch in batches(10, seed=1):
            mirrored.strategy.run(mirrored.step, batch)
        checkpointer.save(2, mirrored.state)
        checkpointer.restore(served.state)
        for a, b in zip(values_of(served), values_of(mirrored), strict=True):
            np.testing.assert_array_equal(a, b)
        coordinator.schedule(served.step, next(batches(1))).get()


def test_what_is_read_in_a_pause_fits_together():
    strategy = dj.ParameterServerStrategy(workers=3, servers=2)
    with strategy.scope():
        a, b = (dj.Variable(0, name=name) for name in "ab")

    def step():
        a.assign_add(1)
        b.assign_add(1)

    with dj.Coordinator(strategy, queue_size=100) as coordinator:
        for _ in range(60):
            coordinator.schedule(step)
        with coordinator.paused():
            assert a.value == b.value
    assert a.value == b.value == 60


def test_a_step_draws_its_own_elements():
    training = Training(dj.ParameterServerStrategy(workers=2))
    with dj.Coordinator(training.strategy) as coordinator:

        def shard(context):
            assert context.num_input_pipelines == 2
            yield from batches(5 + context.input_pipeline_id, seed=context.input_pipeline_id)
            x, y = next(batches(1))
            yield x[:5], y[:5]  # a partial batch is cut anew

        def step(batch):
            return training.step(*batch)

        iterator = iter(coordinator.create_per_worker_dataset(shard))
        values = [coordinator.schedule(step, (iterator,)) for _ in range(15)]
        coordinator.join()
        ended = [value for value in values if _has_ended(value)]
    assert len(ended) == 2


def _has_ended(value):
    try:
        value.fetch()
    except dj.errors.EndOfDataError:
        return True
    return False


def test_a_callback_that_raises_is_an_error_of_its_closure_and_nothing_is_applied():
    strategy = dj.ParameterServerStrategy(workers=2)
    with strategy.scope():
        total = dj.Variable(0.0, name="total")

    def check(x):
        if x > 2:
            raise ZeroDivisionError("too large")
        return x

    def step(x):
        x = jax.pure_callback(check, jax.ShapeDtypeStruct((), jnp.float32), x)
        total.assign_add(x)

    with dj.Coordinator(strategy) as coordinator:
        coordinator.schedule(step, (np.float32(1),)).get()
        coordinator.schedule(step, (np.float32(3),))
        with pytest.raises(Exception, match="too large"):
            coordinator.join()
        coordinator.schedule(step, (np.float32(2),)).get()
    assert total.value == 3


def test_a_step_of_another_strategy_and_a_call_in_a_step_are_refused():
    served = Training(dj.ParameterServerStrategy(workers=1))
    other = dj.OneDeviceStrategy()
    with other.scope():
        v = dj.Variable(0.0, name="v")
    with dj.Coordinator(served.strategy) as coordinator:
        with pytest.raises(dj.errors.StrategyMismatchError):
            coordinator.schedule(lambda: v.assign_add(1.0))
        with pytest.raises(dj.errors.ContextError, match="^schedule needs to be called outside"):
            coordinator.schedule(lambda: coordinator.schedule(served.evaluate, next(batches(1))))
        assert coordinator.stats()["closures"]["scheduled"] == 0
    with pytest.raises(ValueError, match='^ParameterServerStrategy: engine needs "threads"'):
        dj.ParameterServerStrategy(engine="rays")


def test_a_worker_is_killed_in_the_middle():
    killed = threading.Event()

    def fault(point, worker, closure):
        if closure == 20 and point == "after_push" and not killed.is_set():
            killed.set()
            raise dj.servers.WorkerDied("killed")

    engine = dj.servers.ThreadEngine(fault=fault)
    training = Training(dj.ParameterServerStrategy(workers=2, engine=engine))
    with dj.Coordinator(training.strategy) as coordinator:
        values = [coordinator.schedule(training.step, batch) for batch in batches(40)]
        coordinator.join()
        stats = coordinator.stats()
    assert killed.is_set() and stats["closures"]["retried"] == 1
    assert len({value.version for value in values}) == 40
    assert sum(stats["staleness"].values()) == 40


def test_accumulation_with_a_global_norm_needs_one_server_as_the_error_says():
    """The fix is the user's to copy: it is evaluated."""

    def train(strategy, transform):
        with strategy.scope():
            a, b = dj.Variable(jnp.ones(2), name="a"), dj.Variable(jnp.ones(3), name="b")
            optimizer = dj.optim.Optimizer(transform, accumulate_steps=2)
            optimizer.init([a, b])

        def step(x):
            grads = jax.grad(lambda values: x * sum(jnp.sum(v**2) for v in values))
            optimizer.apply_gradients(zip(grads([a.value, b.value]), [a, b], strict=True))

        for x in (1.0, 3.0):
            strategy.run(step, args=(np.float32(x),))
        return [np.asarray(v.value) for v in (a, b)]

    for transform in (
        optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
        optax.apply_if_finite(optax.sgd(0.1), 2),
    ):
        with pytest.raises(dj.errors.MergeError, match="live at one server") as raised:
            train(dj.ParameterServerStrategy(workers=1, servers=2), transform)
        fix = str(raised.value).split("Fix: ")[1].split(", where")[0]
        found = train(eval(fix), transform)
        expected = train(dj.OneDeviceStrategy(), transform)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


def test_every_worker_has_one_of_the_per_worker_values():
    strategy = dj.ParameterServerStrategy(workers=2)
    text = "PerWorkerValues needs a value for each of the {} workers.\n  Got: {} values"
    with strategy.scope():
        total = dj.Variable(0.0)
    add = lambda x: total.assign_add(x)
    with dj.Coordinator(strategy) as coordinator:

        def refuse(*values):
            with pytest.raises(ValueError, match=text.format(num_workers, len(values))) as raised:
                coordinator.schedule(add, args=(dj.PerWorkerValues(values),))
            assert "Fix: dj.PerWorkerValues([value_of(worker)" in str(raised.value)

        num_workers = 2
        refuse(1.0)
        refuse(1.0, 2.0, 3.0)
        coordinator.add_workers(1)
        num_workers = 3
        refuse(1.0, 2.0)
        coordinator.schedule(add, args=(dj.PerWorkerValues([1.0, 1.0, 1.0]),)).get()
        coordinator.remove_workers([0, 1])
        num_workers = 1
        refuse(1.0, 2.0)
        coordinator.schedule(add, args=(dj.PerWorkerValues([4.0]),)).get()  # for worker 2
        assert coordinator.stats()["closures"]["scheduled"] == 2
    assert float(total.value) == 5
