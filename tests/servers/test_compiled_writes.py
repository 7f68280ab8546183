"""Compiled cross-replica code writes variables at servers between closures, all of them or none."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distjax as dj
from tests.interrupts import campaign, in_packages

SUM = dj.VariableAggregation.SUM


@pytest.fixture(params=[1, 2])
def served(request):
    """Two workers, one or two servers."""
    return dj.ParameterServerStrategy(workers=2, servers=request.param)


def make_pair(strategy):
    """Returns two variables, at two servers where there are so many."""
    with strategy.scope():
        return dj.Variable(jnp.zeros(3), name="a"), dj.Variable(jnp.zeros(3), name="b")


def test_no_write_of_a_closure_is_lost(served):
    a, b = make_pair(served)

    def step():
        a.assign_add(jnp.ones(3))
        b.assign_add(jnp.ones(3))

    @dj.jit
    def add_many():  # reads, then writes: a push between the two would be undone
        a.assign(a.value + 1000)
        b.assign(b.value + 1000)
        return a.value - b.value

    with dj.Coordinator(served) as coordinator:
        for _ in range(6):
            for _ in range(5):
                coordinator.schedule(step)
            np.testing.assert_array_equal(add_many(), np.zeros(3))
        coordinator.join()
    for variable in (a, b):
        np.testing.assert_array_equal(variable.value, np.full(3, 6030.0))


def test_no_write_of_a_step_is_lost_where_no_coordinator_is_open(served):
    a, _ = make_pair(served)
    step = lambda: a.assign_add(jnp.ones(3))
    served.run(step)
    with served.extended.pause_writers():  # what a program that writes does
        thread = threading.Thread(target=served.run, args=(step,))
        fetched = np.asarray(a.value)
        thread.start()
        thread.join(0.3)
        a.assign(fetched + 1000)
    thread.join()
    np.testing.assert_array_equal(a.value, np.full(3, 1002.0))


def test_a_step_inside_of_it_is_part_of_the_program(served):
    a, b = make_pair(served)

    def step(x):
        a.assign_add(x)
        b.assign_add(2 * x)
        return a.value

    run = dj.jit(lambda x: served.run(step, args=(x,)))
    for number in range(1, 4):
        np.testing.assert_array_equal(run(jnp.ones(3)), np.full(3, number))
    np.testing.assert_array_equal(b.value, np.full(3, 6.0))


def test_an_optimizer_outside_of_a_step(served):
    def train(strategy):
        with strategy.scope():
            w = dj.Variable(jnp.arange(3.0))
            optimizer = dj.optim.Optimizer(optax.adam(0.1))
            optimizer.init([w])
        for _ in range(4):
            optimizer.apply_gradients([(jnp.cos(w.value), w)])
        return w.value

    expected = train(dj.OneDeviceStrategy())
    np.testing.assert_allclose(train(served), expected, rtol=1e-6)


def test_variables_of_this_process_beside_those_of_servers(served):
    a, _ = make_pair(served)
    own = dj.Variable(jnp.zeros(3))
    held = own.value

    @dj.jit
    def step():
        own.assign_add(jnp.ones(3))
        a.assign(own.value * 10)

    for _ in range(3):
        step()
    np.testing.assert_array_equal(own.value, np.full(3, 3.0))
    np.testing.assert_array_equal(a.value, np.full(3, 30.0))
    np.testing.assert_array_equal(held, np.zeros(3))


def test_a_program_that_fails_has_sent_nothing(served):
    a, b = make_pair(served)

    def fail(x):
        raise ValueError("no")

    @dj.jit
    def step(x):
        a.assign_add(x)
        b.assign_add(jax.pure_callback(fail, jax.ShapeDtypeStruct((3,), jnp.float32), x))

    with pytest.raises(Exception, match="no"):
        step(jnp.ones(3))
    np.testing.assert_array_equal(a.value, np.zeros(3))
    np.testing.assert_array_equal(b.value, np.zeros(3))


def test_an_interrupt_at_any_line_sends_all_or_nothing(served):
    a, b = make_pair(served)

    @dj.jit
    def step():
        a.assign_add(jnp.ones(3))
        b.assign_add(jnp.ones(3))

    step()
    step()

    def check(before, outcome):
        found = [float(v.value[0]) for v in (a, b)]
        assert found in ([before, before], [before + 1, before + 1]), found

    frames = in_packages("distjax._src.program.launch", "distjax._src.servers.storage")
    campaign(lambda: (float(a.value[0]), step), check, frames, limit=200)


def test_an_interrupt_keeps_objects_with_what_was_sent(served):
    a, _ = make_pair(served)
    count = nnx.Variable(jnp.zeros(3))

    class Counter(nnx.Module):
        def __init__(self):
            self.count = count

    counter = Counter()

    @dj.jit
    def step():
        a.assign_add(jnp.ones(3))
        counter.count[...] = counter.count[...] + 1

    step()
    step()

    def check(before, outcome):
        assert float(a.value[0]) == float(counter.count[...][0]), "sent, and written back"

    frames = in_packages("distjax._src.program.launch", "distjax._src.servers.storage")
    campaign(lambda: (None, step), check, frames, limit=200)
