"""What a step sees of where it was scheduled: modes of JAX, warnings, workers that are gone."""

import queue
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from tests.faults.four_parts import is_explained


def make(workers=2):
    strategy = dj.ParameterServerStrategy(workers=workers)
    with strategy.scope():
        total = dj.Variable(0.0, name="total", aggregation=dj.VariableAggregation.SUM)
    return strategy, total


def test_64_bit_mode_is_that_of_the_call_of_schedule():
    strategy, _ = make()
    with dj.Coordinator(strategy) as coordinator, jax.enable_x64(True):
        with strategy.scope():
            wide = dj.Variable(np.float64(1), name="wide")

        def step(x):
            wide.assign_add(x)
            return x * 3

        data = iter(coordinator.create_per_worker_dataset([np.float64(1e-12)]))
        values = [coordinator.schedule(step, args=(x,)) for x in (np.float64(1e-12), data)]
        assert coordinator.fetch(values) == [np.float64(1e-12) * 3] * 2
        assert strategy.run(step, args=(1e-12,)).dtype == np.float64
        assert float(wide.value) == 1 + 1e-12 + 1e-12 + 1e-12


MODES = {
    "64 bits": (lambda: jax.enable_x64(True), lambda x: jnp.zeros(3)),
    "promotion": (lambda: jax.numpy_dtype_promotion("strict"), lambda x: x + jnp.int8(1)),
    "precision": (
        lambda: jax.default_matmul_precision("highest"),
        lambda x: jnp.float32("HIGHEST" in str(jax.make_jaxpr(jnp.dot)(x, x))),
    ),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_step_is_cut_anew_in_another_mode_of_jax(mode):
    strategy, _ = make()
    enter, step = MODES[mode]

    def outcome(run):
        try:
            result = run()
        except Exception as error:
            return type(error)
        return result.shape, result.dtype, float(result.sum())

    x, number = np.ones(3, np.float32), dj.static(1)
    for args in ((x,), (x, number)):  # found in a quick way, and by signature
        fn = lambda x, number=None: step(x)
        run = lambda args=args, fn=fn: strategy.run(fn, args=args)
        plain = outcome(run)
        with enter():
            assert outcome(run) == outcome(lambda: jax.jit(step)(x)) != plain
        assert outcome(run) == plain


def test_a_new_function_for_each_call_is_warned_of():
    strategy, total = make()
    with dj.Coordinator(strategy) as coordinator:
        with pytest.warns(dj.errors.RecompilationWarning, match="one function object for all") as w:
            for _ in range(8):
                coordinator.schedule(lambda x: total.assign_add(x), args=(1.0,))
        assert w[0].filename == __file__

        def step(x):
            return total.assign_add(x)

        for _ in range(9):
            coordinator.schedule(step, args=(1.0,))
        coordinator.join()
    assert float(total.value) == 17


def test_arguments_that_are_no_tuple_or_mapping():
    strategy, _ = make()
    with dj.Coordinator(strategy) as coordinator:
        data = iter(coordinator.create_per_worker_dataset(lambda context: [1.0]))
        with pytest.raises(ValueError, match="^schedule: positional args must be a list or tuple"):
            coordinator.schedule(lambda x: x, args=data)
        with pytest.raises(ValueError, match="^schedule: kwargs must be a dict"):
            coordinator.schedule(lambda x: x, kwargs=[1])


def test_arguments_are_those_of_the_time_of_schedule():
    strategy, total = make()
    buffer, options = np.zeros(3, np.float32), {"rate": 0.0}

    def step(x, y, options):
        total.assign_add((x + y).sum() * options["rate"])

    with dj.Coordinator(strategy) as coordinator:
        data = iter(coordinator.create_per_worker_dataset([np.zeros(3, np.float32)]))
        with coordinator.paused():  # they run when all has been changed
            for y in (buffer, data, dj.PerWorkerValues([buffer, buffer])):
                buffer[:], options["rate"] = 1, 1.0
                coordinator.schedule(step, args=(buffer, y, options))
                buffer[:], options["rate"] = 7, 7.0
    assert float(total.value) == 6 + 3 + 6


@pytest.mark.parametrize("device", [0, 1], ids=["on the worker's device", "elsewhere"])
def test_an_array_that_is_donated_before_its_closure_runs_fails_that(device):
    strategy, total = make(1)
    x = jax.device_put(np.ones(3, np.float32), jax.devices()[device])

    def step(x):
        total.assign_add(x.sum())

    with dj.Coordinator(strategy) as coordinator:
        with coordinator.paused():
            value = coordinator.schedule(step, (x,))
            jax.jit(lambda x: x + 1, donate_argnums=0)(x)
        with pytest.raises(RuntimeError, match="deleted") as raised:
            value.fetch()
        assert raised.value.__notes__ == ["It was raised in closure 0 (step)."]
        with pytest.raises(RuntimeError, match="deleted"):
            coordinator.join()
    assert float(total.value) == 0


def test_next_of_an_iterator_has_the_values_of_the_workers_that_are_left():
    strategy, total = make(3)
    seen = []
    with dj.Coordinator(strategy) as coordinator:
        coordinator.remove_workers([0, 0])
        source = lambda context: [float(context.input_pipeline_id + 1)]
        values = next(iter(coordinator.create_per_worker_dataset(source)))
        assert values.values == (1.0, 2.0)
        assert (values.draw(1), values.draw(2)) == (1.0, 2.0)
        coordinator.remove_workers([1])

        def step(x):
            return total.assign_add(x)

        seen.append(coordinator.schedule(step, args=(values,)).fetch())
    assert seen == [2.0]


def test_what_jax_checks_is_that_of_the_call_of_schedule_and_a_failed_push_changes_nothing():
    # On another device than the worker's, whose pushes reuse the memory of the server's values.
    strategy = dj.ParameterServerStrategy(workers=[[jax.devices()[1]]], cut="arguments")
    with strategy.scope():
        v = dj.Variable(jnp.ones(3), name="v")

    def step(x):
        update = lambda strategy, x: v.assign(jnp.log(x * v.value))
        dj.get_replica_context().merge_call(update, args=(x,))

    with dj.Coordinator(strategy) as coordinator:
        with jax.debug_nans(True):
            coordinator.schedule(step, args=(np.float32(-1),))
        with pytest.raises(FloatingPointError):
            coordinator.join()
        np.testing.assert_array_equal(v.value, np.ones(3))
        coordinator.schedule(step, args=(np.float32(-1),))
    assert np.isnan(v.value).all()


def enter(context):
    with context:
        pass


#: What may not be called in a step: by name, on a coordinator and a RemoteValue.
OUTSIDE_OF_STEPS = {
    "fetch": lambda coordinator, value: value.fetch(),
    "get": lambda coordinator, value: value.get(),
    "version": lambda coordinator, value: value.version,
    "schedule": lambda coordinator, value: coordinator.schedule(lambda: None),
    "join": lambda coordinator, value: coordinator.join(),
    "done": lambda coordinator, value: coordinator.done(),
    "cancel": lambda coordinator, value: coordinator.cancel(),
    "close": lambda coordinator, value: coordinator.close(),
    "create_per_worker_dataset": lambda c, value: c.create_per_worker_dataset([1.0]),
    "add_workers": lambda coordinator, value: coordinator.add_workers(),
    "remove_workers": lambda coordinator, value: coordinator.remove_workers(1),
    "paused": lambda coordinator, value: enter(coordinator.paused()),
    "snapshot": lambda coordinator, value: coordinator.snapshot(),
    "restore": lambda coordinator, value: coordinator.restore(),
    "Coordinator": lambda coordinator, value: dj.Coordinator(dj.get_strategy()),
}


@pytest.mark.parametrize("method", OUTSIDE_OF_STEPS)
def test_a_step_calls_no_coordinator(method):
    strategy, total = make()
    with dj.Coordinator(strategy) as coordinator:
        value = coordinator.schedule(lambda: total.value)
        coordinator.join()

        def step():
            total.assign_add(1.0)
            OUTSIDE_OF_STEPS[method](coordinator, value)

        text = f"^{method} needs to be called outside of a replica function"
        with pytest.raises(dj.errors.ContextError, match=text) as raised:
            coordinator.schedule(step)
        assert is_explained(raised.value)
        assert len(coordinator.stats()["workers"]) == 2
        with pytest.raises(RuntimeError, match="^restore needs a snapshot"):
            coordinator.restore()
        assert value.fetch() == 0 and float(total.value) == 0


def test_nobody_waits_for_closures_while_an_element_is_drawn():
    strategy, total = make(1)
    coordinator = dj.Coordinator(strategy)
    done = coordinator.schedule(lambda: total.value)
    done.get()
    calls = {
        "run": lambda: strategy.run(lambda: total.value),
        "fetch": lambda: values[-1].fetch(),
        "schedule": lambda: coordinator.schedule(lambda: total.value),
        "join": coordinator.join,
        "done": coordinator.done,
        "close": coordinator.close,
        "snapshot": coordinator.snapshot,
        "restore": coordinator.restore,
        "remove_workers": lambda: coordinator.remove_workers(1),
        "paused": lambda: enter(coordinator.paused()),
        "a pause of the workers": dj.jit(lambda: total.assign_add(0.0)),
    }
    threads = []

    def elements(context):
        for _ in range(2):
            for name, call in calls.items():
                text = f"^{name} needs to be called outside of per-worker data"
                with pytest.raises(dj.errors.ContextError, match=text) as raised:
                    call()
                assert is_explained(raised.value)
            assert done.fetch() == float(total.value) == 0  # these wait for no closure
            assert len(coordinator.stats()["workers"]) == 1
            threads.append(threading.current_thread())
            yield np.float32(1)

    with coordinator:
        iterator = iter(coordinator.create_per_worker_dataset(elements))
        with coordinator.paused():
            values = [coordinator.schedule(lambda: total.value)]
            for _ in range(2):
                values.append(coordinator.schedule(lambda x: x, args=(iterator,)))
        assert coordinator.fetch(values) == [0, 1, 1]
    # The first was an example, for the trace of the step.
    assert threads[0] is threading.current_thread() is not threads[1]


def test_schedule_waits_for_no_element_but_the_first():
    strategy, total = make(1)
    given = queue.SimpleQueue()

    def step(x, y=0.0):
        total.assign_add(x + y)

    with dj.Coordinator(strategy) as coordinator:
        iterator = iter(
            coordinator.create_per_worker_dataset(lambda context: iter(given.get, None))
        )
        given.put(np.float32(1))
        coordinator.schedule(step, args=(iterator,))
        for args in ((iterator,), (iterator, dj.PerWorkerValues([1.0]))):
            coordinator.schedule(step, args=args)  # there is no element yet
            coordinator.schedule(step, args=args)
        for _ in range(4):
            given.put(np.float32(1))
    assert float(total.value) == 7
