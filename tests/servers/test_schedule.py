"""What a step sees of where it was scheduled: modes of JAX, warnings, workers that are gone."""

import jax
import numpy as np
import pytest

import distjax as dj


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


def test_next_of_an_iterator_has_the_values_of_the_workers_that_are_left():
    strategy, total = make(3)
    seen = []
    with dj.Coordinator(strategy) as coordinator:
        coordinator.remove_workers([0, 0])
        source = lambda context: [float(context.input_pipeline_id + 1)]
        values = next(iter(coordinator.create_per_worker_dataset(source)))
        assert values.values == (1.0, 2.0)
        assert (values.peek(1), values.peek(2)) == (1.0, 2.0)
        coordinator.remove_workers([1])

        def step(x):
            return total.assign_add(x)

        seen.append(coordinator.schedule(step, args=(values,)).fetch())
    assert seen == [2.0]
